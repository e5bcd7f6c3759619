"""Decode and prefill attention over pages, against fp64: dtypes, GQA ratios, page sizes, lengths, windows."""

import pytest
import torch

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from mini_infer_engine.attention.prefill_rows import PrefillRows
from mini_infer_engine.kernels.decode_attention import decode_attention, splits_for
from mini_infer_engine.kernels.prefill_attention import prefill_attention
from mini_infer_engine.kernels.prefill_choice import hopper_knows
from tests.gpu.device import BF16, DEVICE, FP32, KERNELS, ON_GPU, cases, error
from tests.gpu.paged import exact_attention, make_paged, strided_queries

pytestmark = KERNELS
ON_HOPPER = ON_GPU and torch.cuda.get_device_capability(DEVICE) == (9, 0)
ROUNDING = {FP32: 256.0, BF16: 3.0}
"""bf16 weights and a bf16 result: two roundings; fp32 sums of thousands of terms that are larger than their mean."""

SHAPES = cases(  # q_heads, kv_heads, head_dim, page_size, window, dtype
    [(4, 2, 64, 16, None, FP32), (7, 1, 64, 64, 40, FP32), (2, 2, 96, 256, None, FP32), (8, 1, 24, 16, None, FP32)],
    [
        (28, 4, 128, 128, None, BF16),
        (12, 2, 128, 256, None, BF16),
        (16, 8, 128, 64, None, BF16),
        (16, 8, 128, 16, 1000, BF16),
        (32, 8, 128, 128, 4096, BF16),
        (14, 2, 64, 16, None, BF16),
        (14, 2, 64, 128, None, BF16),
        (8, 8, 96, 128, None, BF16),
        (8, 1, 64, 256, 100, BF16),
        (16, 8, 128, 128, None, FP32),
        (28, 4, 128, 16, 300, FP32),
    ],
)
LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 128, 255, 257, 1000, 4097, 9001] if ON_GPU else [1, 17, 64, 70]
CHUNKS = (  # (tokens before, new tokens); a padded sequence of a graph has none of both
    [(0, 1), (0, 37), (4000, 128), (131, 77), (0, 1025), (513, 1), (5, 0), (70, 64), (0, 0)]
    if ON_GPU
    else [(20, 1), (0, 37), (5, 0), (70, 64), (0, 0)]
)


@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim", "page_size", "window", "dtype"), SHAPES)
def test_decode_attention(
    q_heads: int, kv_heads: int, head_dim: int, page_size: int, window: int | None, dtype: torch.dtype
) -> None:
    paged = make_paged(LENGTHS, page_size, kv_heads, head_dim, dtype)
    slots = list(range(len(LENGTHS)))[::-1]  # rows are in another order than page tables
    q = strided_queries(len(slots), q_heads, kv_heads, head_dim, dtype)
    scale = head_dim**-0.5
    exact = torch.cat(
        [
            exact_attention(q[row : row + 1], paged.keys[slot], paged.values[slot], LENGTHS[slot] - 1, scale, window)
            for row, slot in enumerate(slots)
        ]
    )
    rows = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([LENGTHS[slot] - 1 for slot in slots], device=DEVICE)
    for splits in (1, 3, splits_for(len(slots), kv_heads, max(LENGTHS))):
        run = [
            decode_attention(q, paged.pool, paged.tables, rows, positions, scale=scale, splits=splits,
                             sliding_window=window)
            for _ in range(2)
        ]  # fmt: skip
        assert error(run[0], exact) <= ROUNDING[dtype], splits
        assert torch.equal(run[0], run[1]), "counters were not left at zero, or results depend on timing"
    empty = decode_attention(q[:0], paged.pool, paged.tables, rows[:0], positions[:0], scale=scale, splits=2)
    assert empty.shape == (0, q_heads * head_dim)


@pytest.mark.parametrize("on_hopper", [False, True])
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim", "page_size", "window", "dtype"), SHAPES)
def test_prefill_attention(
    q_heads: int, kv_heads: int, head_dim: int, page_size: int, window: int | None, dtype: torch.dtype, on_hopper: bool
) -> None:
    lengths = [before + new for before, new in CHUNKS]
    if on_hopper and not (ON_HOPPER and hopper_knows(dtype, head_dim, page_size, window, max(lengths))):
        pytest.skip("the kernel for Hopper does not know this device or shape")
    paged = make_paged(lengths, page_size, kv_heads, head_dim, dtype)
    scale = head_dim**-0.5

    def check(chosen: list[int], longest: int, padding: int = 0) -> None:
        """`padding`: sequences without tokens, and tokens of no sequence, behind those chosen."""
        counts = [CHUNKS[index][1] for index in chosen]
        total = sum(counts)
        starts = torch.tensor([0, *counts, *[0] * padding], dtype=torch.int32, device=DEVICE).cumsum(0).to(torch.int32)
        ends = torch.tensor([lengths[index] for index in chosen] + [1] * padding, dtype=torch.int32, device=DEVICE)
        tables = torch.nn.functional.pad(paged.tables[chosen], (0, 0, 0, padding))
        q = strided_queries(total + padding, q_heads, kv_heads, head_dim, dtype)
        exact = [
            exact_attention(part, paged.keys[index], paged.values[index], CHUNKS[index][0], scale, window)
            for index, part in zip(chosen, q[:total].split(counts), strict=True)
        ]
        key_starts = torch.nn.functional.pad(ends.cumsum(0), (1, 0)).to(torch.int32)
        rows = PrefillRows(tables, starts, key_starts, ends, longest, max(lengths))
        run = [
            prefill_attention(q, paged.pool, rows, scale=scale, sliding_window=window, on_hopper=on_hopper)[:total]
            for _ in range(2)
        ]
        for index, part, wanted in zip(chosen, run[0].split(counts), exact, strict=True):
            assert error(part, wanted) <= ROUNDING[dtype], CHUNKS[index]
        assert torch.equal(run[0], run[1]), "counters were not left at zero, or results depend on timing"

    everything = list(range(len(CHUNKS)))
    longest = max(new for _, new in CHUNKS)
    check(everything, longest)
    check(everything, 2 * longest, 64 - len(everything))  # as a graph says it: the bucket's size
    for alone in (0, 1, 3):
        check([alone], CHUNKS[alone][1])  # few tiles share the keys
    check([2], max(1, CHUNKS[2][1]))
