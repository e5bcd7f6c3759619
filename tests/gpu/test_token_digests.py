"""Digests of tokens on a GPU are those that a CPU computes of the same bytes."""

from collections.abc import Callable
from functools import reduce

import numpy as np
import pytest
import torch
from msgspec.structs import replace

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from mini_infer_engine.kernels.token_digests import TokenSums
from mini_infer_engine.kv_transfer.layout import KVLayout, KVMemory, Span
from mini_infer_engine.kv_transfer.pool_digests import PoolDigests
from mini_infer_engine.kv_transfer.token_digests import (
    GOLDEN,
    MODULUS,
    mix_words,
    num_rows,
    place_factors,
    regions,
    token_factors,
    word_bytes_of,
)
from mini_infer_engine.kv_transfer.transport import Digest
from tests.gpu.device import DEVICE, GPU_ONLY, KERNELS

NUM_PAGES = 5
PLAIN = KVLayout(num_layers=3, halves=2, page_size=16, num_heads=2, head_bytes=48, dtype="bfloat16")
LAYOUTS = {
    "16 bits": PLAIN,
    "few bytes": replace(PLAIN, num_heads=3, head_bytes=6),
    "latents": replace(PLAIN, halves=1, num_heads=1, head_bytes=1152, num_layers=2),
    "scales": replace(PLAIN, head_bytes=64, dtype="float8_e4m3fn", scale_bytes=2),
    "the second rank's heads": replace(PLAIN, tp_size=2),
    "a state": replace(PLAIN, num_layers=9, halves=1, page_size=1, num_heads=4, head_bytes=512, dtype="states"),
}
Test = Callable[..., None]


def on_kernels(test: Test) -> Test:
    """Runs on a GPU, or under Triton's interpreter."""
    return reduce(lambda marked, mark: mark(marked), KERNELS, test)


def on_gpu(test: Test) -> Test:
    return reduce(lambda marked, mark: mark(marked), GPU_ONLY, test)


def pool_of(layout: KVLayout) -> torch.Tensor:
    torch.manual_seed(5)
    if layout.dtype == "bfloat16":
        values = torch.randn(NUM_PAGES * layout.page_bytes // 2 + 1).bfloat16()
        return values.view(torch.uint8)[: NUM_PAGES * layout.page_bytes].clone()
    return torch.randint(0, 256, (NUM_PAGES * layout.page_bytes,), dtype=torch.uint8)


def memory_of(layout: KVLayout, pool: torch.Tensor) -> KVMemory:
    device = "cuda" if pool.is_cuda else "cpu"
    index = pool.device.index or 0
    return KVMemory(address=pool.data_ptr(), num_pages=NUM_PAGES, device=device, device_index=index, layout=layout)


@on_kernels
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_kernel_adds_up_what_numpy_does(name: str) -> None:
    layout, pool = LAYOUTS[name], pool_of(LAYOUTS[name])
    rank, heads = layout.tp_size - 1, layout.num_heads
    size = layout.page_size
    begin, number, order = 3 % size, (1 << 40) + 5, [4, 0, 3, 2]
    count = len(order) * size - begin - (size > 1)
    tokens = [(order[place // size], place % size) for place in range(begin, begin + count)]
    factors_of = token_factors(number + np.arange(count)).tolist()
    numbers = torch.tensor([7, number, *order])
    for region in regions(layout, layout.total_heads, word_bytes_of(layout)):
        signed = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[region.word_bytes]
        found = numbers.to(DEVICE).clone()
        sums = TokenSums(
            pool.to(DEVICE).view(signed),
            page_size=size,
            page_words=layout.page_bytes // region.word_bytes,
            half_words=layout.half_bytes // region.word_bytes,
            first_word=region.first_word,
            token_stride=region.token_stride,
            head_stride=region.head_stride,
            head_words=region.head_words,
            num_rows=num_rows(layout),
            num_heads=heads,
            first_column=rank * heads * region.head_words,
            first_index=region.first_index,
            row_indices=region.row_indices,
            golden=GOLDEN - MODULUS,
        )
        sums.add(found, count, begin)
        words = pool.numpy().view(f"u{region.word_bytes}").reshape(NUM_PAGES, num_rows(layout), -1)
        factors = place_factors(region, num_rows(layout), rank * heads, heads)
        columns = np.arange(heads * region.head_words)
        in_row = columns // region.head_words * region.head_stride + columns % region.head_words
        expected = 0
        for (page, offset), factor in zip(tokens, factors_of, strict=True):
            own = words[page][:, region.first_word + offset * region.token_stride + in_row]
            mixed = np.empty(own.shape, np.uint64)
            mix_words(own.astype(np.uint64), mixed)
            expected += int((mixed * factors).sum()) * factor
        assert int(found[0]) % MODULUS == (7 + expected) % MODULUS
        sums.add(found, count, begin)
        assert int(found[0]) % MODULUS == (7 + 2 * expected) % MODULUS


def value(digest: Digest) -> int:
    while digest.progress() == "busy":
        pass
    return digest.value


@on_gpu
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_pools_digest_is_that_of_its_copy_in_main_memory(name: str) -> None:
    layout, pool = LAYOUTS[name], pool_of(LAYOUTS[name])
    on_gpu = pool.to(DEVICE)
    rank = layout.tp_size - 1
    here, there = (PoolDigests(memory_of(layout, one), rank) for one in (on_gpu, pool))
    span = Span([4, 1, 0], [], 1, 2 * layout.page_size + 1) if layout.page_size > 1 else Span([3], [], 0, 1)
    consumers: list[KVLayout | None] = [None, layout]
    if layout.is_convertible and layout.head_bytes % 4 == 0:
        consumers += [
            replace(layout, dtype="float32", head_bytes=2 * layout.head_bytes, page_size=32),
            replace(layout, dtype="float16"),
        ]
    if name == "16 bits":
        consumers.append(replace(layout, tp_size=2, num_heads=1))
    for consumer in consumers:
        assert value(here.begin(span, consumer)) == value(there.begin(span, consumer))
    flipped = pool.clone()
    flipped[4 * layout.page_bytes * (span.our_pages[0] == 4) + layout.row_bytes] ^= 1
    if layout.page_size > 1:  # the second token of the first page
        assert value(PoolDigests(memory_of(layout, flipped.to(DEVICE)), rank).begin(span, None)) != value(
            here.begin(span, None)
        )


@on_gpu
def test_digests_that_are_computed_at_the_same_time_do_not_mix() -> None:
    pool = pool_of(PLAIN)
    here, there = (PoolDigests(memory_of(PLAIN, one)) for one in (pool.to(DEVICE), pool))
    here.prepare()
    spans = [Span([page, (page + 1) % NUM_PAGES], [], page, page + 17) for page in range(NUM_PAGES)]
    for _ in range(3):  # the memory of digests that are done serves others
        begun = [here.begin(span, None) for span in spans]
        assert [value(digest) for digest in reversed(begun)] == [
            value(there.begin(span, None)) for span in reversed(spans)
        ]
    del begun
    assert value(here.begin(spans[0], None)) == value(there.begin(spans[0], None))
