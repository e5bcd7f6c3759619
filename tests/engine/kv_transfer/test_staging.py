"""What is gathered into slots arrives where it belongs, whatever page sizes, numbers of ranks and dtypes."""

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from mini_infer_engine.kv_transfer.layout import CONVERTIBLE, KVLayout, KVMemory, Span
from mini_infer_engine.kv_transfer.staging import staging_copies
from mini_infer_engine.kv_transfer.staging.staging_copies import HostCopies, StagingCopies, TorchCopies, converted
from mini_infer_engine.kv_transfer.staging_slots import blocks, blocks_for, chunks

LAYOUT = KVLayout(num_layers=3, halves=2, page_size=16, num_heads=4, head_bytes=32, dtype="float32")
PAGES = {16: [5, 0, 3], 32: [1, 3], 48: [2]}
SLOT_BYTES = 8192


def of_group(tp_size: int, **changes: Any) -> KVLayout:
    """A group's layout, whose ranks hold the same head where there are more ranks than heads."""
    heads = LAYOUT.num_heads
    layout = replace(LAYOUT, tp_size=tp_size, num_heads=max(1, heads // tp_size), copies=max(1, tp_size // heads))
    return replace(layout, **changes)


class Rank:
    """A pool [pages, layers, halves, page_size, heads, head], and a staging buffer."""

    def __init__(self, layout: KVLayout, kind: str) -> None:
        kinds = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
        sizes = (6, layout.num_layers, layout.halves, layout.page_size, layout.num_heads, layout.head_elements)
        self.pool = torch.zeros(sizes, dtype=kinds[layout.dtype])
        raw = self.pool.view(torch.uint8).view(-1)
        memory = KVMemory(address=raw.data_ptr(), num_pages=6, device="cpu", device_index=0, layout=layout)
        self.copies: StagingCopies
        if kind == "numpy":
            self.copies = HostCopies(memory, SLOT_BYTES)
        else:
            self.copies = TorchCopies(memory, "host", SLOT_BYTES, raw)


def values_of(layout: KVLayout, rank: int, token: int) -> torch.Tensor:
    """[layers, halves, heads, head] of a token: different in each layer, half, head of the model and element."""
    first = rank // layout.copies * layout.num_heads
    sizes = (layout.num_layers, layout.halves, LAYOUT.num_heads, layout.head_elements)
    every = torch.arange(np.prod(sizes), dtype=torch.float32).view(sizes) * 0.37 + token * 1.01
    return every[:, :, first : first + layout.num_heads]


@pytest.mark.parametrize("kind", ["numpy", "torch", "torch, page by page"])
@pytest.mark.parametrize(("our_size", "their_size"), [(1, 1), (1, 2), (2, 1), (4, 2), (8, 1), (1, 8)])
@pytest.mark.parametrize(
    "changes",
    [{}, {"page_size": 32}, {"dtype": "bfloat16", "head_bytes": 16}, {"dtype": "float16", "head_bytes": 16}],
    ids=str,
)
@pytest.mark.parametrize("swapped", [False, True])
def test_every_token_arrives_through_staging(
    kind: str,
    our_size: int,
    their_size: int,
    changes: dict[str, Any],
    swapped: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kind == "torch, page by page":
        monkeypatch.setattr(staging_copies, "_LEAST_COPY_BYTES", 1)
    producer, consumer = of_group(our_size), of_group(their_size, **changes)
    if swapped:
        producer, consumer = consumer, producer
    producers = [Rank(producer, kind) for _ in range(producer.tp_size)]
    consumers = [Rank(consumer, kind) for _ in range(consumer.tp_size)]
    for rank, side in enumerate(producers):
        for token in range(48):
            page, offset = PAGES[producer.page_size][token // producer.page_size], token % producer.page_size
            side.pool[page, :, :, offset] = values_of(producer, rank, token).to(side.pool.dtype)
    begin, end = (32, 43) if producer.page_size == consumer.page_size == 16 else (0, 43)
    parts = chunks(producer, consumer, Span(PAGES[producer.page_size], [], begin, end), SLOT_BYTES)
    assert len(parts) > 1 or begin
    for part in parts:
        for rank, side in enumerate(producers):
            for block in blocks(producer, rank, consumer, part):
                side.copies.gather(producer, consumer, part, block, block.offset)
        there = replace(part, our_pages=PAGES[consumer.page_size])
        for rank, side in enumerate(consumers):
            for block, offset in blocks_for(producer, consumer, rank, there):
                source = producers[block.producer_rank].copies.address + block.offset
                assert max(block.offset, offset) + block.size <= SLOT_BYTES
                ctypes.memmove(side.copies.address + offset, source, block.size)
                side.copies.scatter(producer, consumer, there, block, offset)
            assert side.copies.mark()()
    for rank, side in enumerate(consumers):
        for token in range(48):
            page, offset = PAGES[consumer.page_size][token // consumer.page_size], token % consumer.page_size
            found = side.pool[page, :, :, offset]
            expected = values_of(consumer, rank, token).to(producers[0].pool.dtype).to(found.dtype)
            if begin <= token < end:
                assert torch.equal(found, expected), token
            elif token < begin:
                assert not found.any(), token


def test_a_page_is_staged_by_layers_when_it_does_not_fit_into_a_slot() -> None:
    parts = chunks(LAYOUT, LAYOUT, Span([0, 1], [], 0, 32), 2 * LAYOUT.layer_bytes)
    assert [(part.begin, part.end, part.layers) for part in parts] == [
        (0, 16, (0, 2)),
        (0, 16, (2, 3)),
        (16, 32, (0, 2)),
        (16, 32, (2, 3)),
    ]
    with pytest.raises(ValueError, match="--kv-staging-memory"):
        chunks(LAYOUT, LAYOUT, Span([0], [], 0, 16), LAYOUT.layer_bytes - 1)


@pytest.mark.parametrize("source", CONVERTIBLE)
@pytest.mark.parametrize("target", CONVERTIBLE)
def test_numpy_dtype_conversion_equals_torchs(source: str, target: str) -> None:
    special = [0.0, -0.0, 1.0, float("inf"), float("-inf"), float("nan"), 65519.0, 65520.0, 1e-8, 3e38, 1.00390625]
    values = torch.cat([torch.tensor(special), torch.randn(4096) * 50]).to(getattr(torch, source))
    expected = values.to(getattr(torch, target))
    raw = converted(values.view(torch.uint8).numpy(), source, target).view(np.uint8).copy()
    found = torch.from_numpy(raw).view(getattr(torch, target))
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(1.5), expected.nan_to_num(1.5))
