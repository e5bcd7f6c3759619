"""Copies between a page pool on a GPU and staging buffers on it or in pinned memory: as those in main memory do."""

import time

import pytest
from msgspec.structs import replace

from mini_infer_engine.kv_transfer.layout import KVLayout, KVMemory, Span
from mini_infer_engine.kv_transfer.staging.staging_copies import IsDone, TorchCopies
from mini_infer_engine.kv_transfer.staging_slots import Area, blocks, blocks_for, chunks

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
LAYOUT = KVLayout(num_layers=3, halves=2, page_size=16, num_heads=4, head_bytes=256, dtype="bfloat16")
NUM_PAGES, SLOT_BYTES = 8, 64 << 10
OTHERS = {
    "alike": LAYOUT,
    "larger pages": replace(LAYOUT, page_size=32),
    "float32": replace(LAYOUT, dtype="float32", head_bytes=512),
    "half the heads": replace(LAYOUT, num_heads=2, tp_size=2),
}


class Pool:
    """A rank's pages on the GPU, and a staging buffer."""

    def __init__(self, layout: KVLayout, area: Area) -> None:
        sizes = (NUM_PAGES, layout.num_layers, layout.halves, layout.page_size, layout.num_heads, layout.head_elements)
        self.pages = torch.zeros(sizes, dtype=getattr(torch, layout.dtype), device="cuda")
        memory = KVMemory(
            address=self.pages.data_ptr(), num_pages=NUM_PAGES, device="cuda", device_index=0, layout=layout
        )
        self.copies = TorchCopies(memory, area, SLOT_BYTES)
        self.buffer = self.copies._buffer


def wait(is_done: IsDone) -> None:
    limit_s = time.monotonic() + 10
    while not is_done():
        assert time.monotonic() < limit_s
        time.sleep(0.0001)


@pytest.mark.parametrize("area", ["device", "host"])
@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_every_token_arrives(area: Area, other: KVLayout) -> None:
    producer = Pool(LAYOUT, area)
    consumers = [Pool(other, area) for _ in range(other.tp_size)]
    producer.pages.copy_(torch.randn(producer.pages.shape, device="cuda"))
    torch.cuda.synchronize()
    our_pages, their_pages = [5, 0, 3], ([1, 6, 2] if other.page_size == 16 else [4, 7])
    for part in chunks(LAYOUT, other, Span(our_pages, [], 0, 41), SLOT_BYTES):
        for block in blocks(LAYOUT, 0, other, part):
            producer.copies.gather(LAYOUT, other, part, block, block.offset)
        wait(producer.copies.mark())
        there = replace(part, our_pages=their_pages)
        for rank, consumer in enumerate(consumers):
            for block, offset in blocks_for(LAYOUT, other, rank, there):
                out = producer.buffer[block.offset : block.offset + block.size]
                consumer.buffer[offset : offset + block.size].copy_(out)
                torch.cuda.synchronize()
                consumer.copies.scatter(LAYOUT, other, there, block, offset)
            wait(consumer.copies.mark())
    for rank, consumer in enumerate(consumers):
        heads = slice(rank * other.num_heads, (rank + 1) * other.num_heads)
        for token in range(41):
            expected = producer.pages[our_pages[token // 16], :, :, token % 16, heads].to(consumer.pages.dtype)
            found = consumer.pages[their_pages[token // other.page_size], :, :, token % other.page_size]
            assert torch.equal(found, expected), token
