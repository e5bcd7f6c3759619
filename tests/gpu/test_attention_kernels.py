"""Decode and prefill attention over pages, against fp64: dtypes, GQA ratios, page sizes, lengths, windows."""

import pytest
import torch

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from mini_infer_engine.kernels.attention.attention_config import (
    DecodeConfig,
    PrefillConfig,
    PrefillShape,
    supports_hopper_fa3,
)
from mini_infer_engine.kernels.attention.check_attention import check_attention
from mini_infer_engine.kernels.attention.decode_attention import decode_attention
from mini_infer_engine.kernels.attention.decode_plan import DecodePlan, plan_decode
from mini_infer_engine.kernels.attention.prefill_attention import prefill_attention, prefill_shape
from mini_infer_engine.kernels.attention.prefill_rows import PrefillRows
from mini_infer_engine.kernels.attention.rope_kv import Rotation
from tests.gpu.decoding import LENGTHS, ROUNDING, DecodeShape, assert_decodes
from tests.gpu.device import BF16, DEVICE, FP32, KERNELS, ON_GPU, POLICY, WORKSPACE, cases, error, normal
from tests.gpu.exact import exact_rotated
from tests.gpu.hopper import enforce, here
from tests.gpu.paged import exact_attention, make_paged, make_sinks, strided_queries

pytestmark = KERNELS
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
CONFIGS = [
    DecodeConfig(target_programs=1, programs_per_row=1.0),
    DecodeConfig(target_programs=264),
    DecodeConfig(block_tokens=32, target_programs=1, programs_per_row=2.5, warps=2),
    DecodeConfig(target_programs=264, pdl=POLICY.pdl),
    DecodeConfig(block_tokens=16, target_programs=1000),
]
CHUNKS = (  # (tokens before, new tokens); a padded sequence of a graph has none of both
    [(0, 1), (0, 37), (4000, 128), (131, 77), (0, 1025), (513, 1), (5, 0), (70, 64), (0, 0)]
    if ON_GPU
    else [(20, 1), (0, 37), (5, 0), (70, 64), (0, 0)]
)


@pytest.mark.parametrize(("softcap", "has_sinks"), [(None, False), (1.5, False), (None, True)])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim", "page_size", "window", "dtype"), SHAPES)
def test_decode_attention(
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    window: int | None,
    dtype: torch.dtype,
    with_norm: bool,
    softcap: float | None,
    has_sinks: bool,
) -> None:
    shape = DecodeShape(q_heads, kv_heads, head_dim, page_size, window, dtype)
    assert_decodes(shape, CONFIGS, with_norm=with_norm, softcap=softcap, has_sinks=has_sinks)


CHECKED = cases(  # queries, q_heads, kv_heads, head_dim, page_size, window, with norm, softcap, dtype
    [
        (2, 4, 2, 64, 16, None, True, None, FP32),
        (6, 7, 1, 32, 64, None, False, None, FP32),
        (4, 2, 2, 24, 16, 40, True, 1.5, FP32),
        (3, 4, 1, 64, 16, 2, False, None, FP32),
    ],
    [
        (6, 28, 4, 128, 128, None, False, None, BF16),
        (2, 28, 4, 128, 128, None, False, None, BF16),
        (6, 14, 2, 64, 128, None, False, None, BF16),
        (2, 14, 2, 64, 16, None, False, None, BF16),
        (4, 16, 8, 128, 64, 1000, True, None, BF16),
        (8, 32, 4, 128, 128, None, True, None, BF16),
        (6, 8, 4, 256, 128, 4096, True, 30.0, BF16),
        (9, 2, 2, 128, 256, None, False, None, BF16),
        (6, 16, 8, 128, 128, None, True, None, FP32),
        (6, 28, 4, 128, 16, 300, False, None, FP32),
    ],
)


@pytest.mark.parametrize(
    ("queries", "q_heads", "kv_heads", "head_dim", "page_size", "window", "with_norm", "softcap", "dtype"), CHECKED
)
def test_check_attention(
    queries: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    window: int | None,
    with_norm: bool,
    softcap: float | None,
    dtype: torch.dtype,
) -> None:
    """A few new tokens of each sequence from q, k and v before rotation: all are in their pages afterwards.

    Heads with a window have sinks as well, unless scores are capped.
    """
    sinks = make_sinks(q_heads, dtype) if window is not None and softcap is None else None
    cached = [length - 1 for length in LENGTHS]
    rows = len(cached)
    paged = make_paged([length + queries for length in cached], page_size, kv_heads, head_dim, dtype)
    slots = list(range(rows))[::-1]  # in another order than page tables
    firsts = torch.tensor(cached, device=DEVICE)[slots]
    positions = (firsts[:, None] + torch.arange(queries, device=DEVICE)).flatten()
    width = (q_heads + 2 * kv_heads) * head_dim
    qkv = normal(rows * queries, width + 32, dtype=dtype, seed=99)[:, :width]  # its rows are strided
    weights = [1 + normal(head_dim, dtype=dtype, seed=seed) / 4 for seed in (4, 5)] if with_norm else [None, None]
    longest = max(LENGTHS) + queries
    angles = torch.arange(longest, device=DEVICE)[:, None] / 10.0 ** torch.arange(head_dim // 2, device=DEVICE)
    rotation = Rotation(torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype), *weights, eps=1e-5)

    heads = qkv.unflatten(1, (-1, head_dim))
    q = exact_rotated(heads[:, :q_heads], rotation, rotation.q_norm, positions)
    new_keys = exact_rotated(heads[:, q_heads : q_heads + kv_heads], rotation, rotation.k_norm, positions)
    new_values = heads[:, q_heads + kv_heads :]
    of_tokens = torch.tensor(slots, device=DEVICE).repeat_interleave(queries)
    pages = paged.tables[of_tokens].gather(1, positions[:, None] // page_size)[:, 0].long()
    before = paged.pool.clone()
    before[pages, :, positions % page_size] = 0
    paged.pool[pages, :, positions % page_size] = float("nan")  # what stood there is not read
    exact = []
    for row, slot in enumerate(slots):
        keys, values, own = paged.keys[slot], paged.values[slot], slice(row * queries, (row + 1) * queries)
        keys[cached[slot] :], values[cached[slot] :] = new_keys[own], new_values[own].double()
        exact.append(exact_attention(q[own], keys, values, cached[slot], head_dim**-0.5, window, softcap, sinks))
    kv_index = (pages * page_size + positions % page_size).int()

    for config in CONFIGS:
        slot_tensor, group = torch.tensor(slots, dtype=torch.int32, device=DEVICE), queries * q_heads // kv_heads
        plan = plan_decode(slot_tensor, firsts, firsts, kv_heads, longest, window, config=config, group=group)

        def run(written: torch.Tensor, plan: DecodePlan = plan) -> torch.Tensor:
            return check_attention(
                qkv,
                rotation,
                paged.pool,
                paged.tables,
                plan,
                positions.int(),
                written,
                queries=queries,
                scale=head_dim**-0.5,
                workspace=WORKSPACE,
                softcap=softcap,
                sinks=sinks,
            )

        paged.pool[pages, :, positions % page_size] = float("nan")
        unwritten = run(torch.full_like(kv_index, -1))
        assert paged.pool[pages, :, positions % page_size].isnan().all(), "a padded row wrote"
        results = [run(kv_index) for _ in range(2)]
        assert error(results[0], torch.cat(exact)) <= ROUNDING[dtype], config
        assert torch.equal(results[0], unwritten)
        assert torch.equal(*results), "counters were not left at zero, or results depend on timing"
        written = paged.pool[pages, :, positions % page_size]
        assert error(written[:, 0], new_keys) <= ROUNDING[dtype]
        assert torch.equal(written[:, 1], new_values)
        after = paged.pool.clone()
        after[pages, :, positions % page_size] = 0
        assert torch.equal(after.nan_to_num(7.0), before.nan_to_num(7.0)), "another token's place was written"


@pytest.mark.parametrize(("length", "max_splits"), [(700, 11), (1000, 32)])
def test_decode_attention_merges_many_splits_of_a_long_sequence(length: int, max_splits: int) -> None:
    q_heads, head_dim = 7, 128
    paged = make_paged([length], 64, 1, head_dim, FP32)
    slots, places = (torch.tensor([value], device=DEVICE) for value in (0, length - 1))
    config = DecodeConfig(block_tokens=16, target_programs=100)
    plan = plan_decode(slots.int(), places, places, 1, 1024, config=config, group=q_heads)
    assert int((plan.entries[:, 0] >= 0).sum()) == max_splits
    qkv = normal(1, (q_heads + 2) * head_dim)
    table = torch.cat((torch.ones(1024, 64, device=DEVICE), torch.zeros(1024, 64, device=DEVICE)), dim=-1)
    keys, values = paged.keys[0], paged.values[0]
    keys[-1], values[-1] = qkv.view(-1, head_dim)[-2:, None].double()
    exact = exact_attention(qkv[:, : q_heads * head_dim].view(1, q_heads, -1), keys, values, length - 1, 0.1, None)
    mixed = decode_attention(qkv, Rotation(table), paged.pool, paged.tables, plan, scale=0.1, workspace=WORKSPACE)
    assert error(mixed, exact) <= ROUNDING[FP32]


@pytest.mark.parametrize(
    ("on_hopper", "softcap", "has_sinks"),
    [
        (False, None, False),
        (False, 1.5, False),
        (True, None, False),
        (False, None, True),
        (False, 1.5, True),
        (True, None, True),
    ],
)
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim", "page_size", "window", "dtype"), SHAPES)
def test_prefill_attention(
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    window: int | None,
    dtype: torch.dtype,
    on_hopper: bool,
    softcap: float | None,
    has_sinks: bool,
) -> None:
    sinks = make_sinks(q_heads, dtype) if has_sinks else None
    lengths = [before + new for before, new in CHUNKS]
    shape = PrefillShape(dtype, dtype, 1, 1, q_heads, kv_heads, head_dim, page_size, window, max(lengths))
    if on_hopper and not supports_hopper_fa3(shape):
        pytest.skip("the FlashAttention-3 kernel cannot compute this shape")
    if on_hopper:
        enforce(here())
    paged = make_paged(lengths, page_size, kv_heads, head_dim, dtype)
    scale = head_dim**-0.5

    def check(chosen: list[int], padding: int = 0, out: PrefillConfig | None = None) -> None:
        """`padding`: sequences without tokens, and tokens of no sequence, behind those chosen."""
        counts = [CHUNKS[index][1] for index in chosen]
        total = sum(counts)
        starts = torch.tensor([0, *counts, *[0] * padding], dtype=torch.int32, device=DEVICE).cumsum(0).to(torch.int32)
        ends = torch.tensor([lengths[index] for index in chosen] + [1] * padding, dtype=torch.int32, device=DEVICE)
        tables = torch.nn.functional.pad(paged.tables[chosen], (0, 0, 0, padding))
        q = strided_queries(total + padding, q_heads, kv_heads, head_dim, dtype)
        exact = [
            exact_attention(
                part, paged.keys[index], paged.values[index], CHUNKS[index][0], scale, window, softcap, sinks
            )
            for index, part in zip(chosen, q[:total].split(counts), strict=True)
        ]
        rows = PrefillRows(tables, starts, ends, max(counts), max(lengths))
        sizes = prefill_shape(q, paged.pool, rows, window, softcap)
        config = out or (POLICY.hopper_prefill_config if on_hopper else POLICY.flash_attention_2_config)(sizes)
        assert config is not None
        run = [
            prefill_attention(
                q,
                paged.pool,
                rows,
                scale=scale,
                config=config,
                workspace=WORKSPACE,
                sliding_window=window,
                softcap=softcap,
                sinks=sinks,
            )[:total]
            for _ in range(2)
        ]
        for index, part, expected in zip(chosen, run[0].split(counts), exact, strict=True):
            assert error(part, expected) <= ROUNDING[dtype], CHUNKS[index]
        assert torch.equal(run[0], run[1]), "results depend on timing"

    everything = list(range(len(CHUNKS)))
    check(everything)
    check(everything, 64 - len(everything))  # as a graph has it
    for alone in (0, 1, 2, 3):
        check([alone])  # few tiles: programs split the keys
        if not on_hopper:
            check([alone], 7, PrefillConfig(16, 32, 4, 2, programs=4000))


@pytest.mark.parametrize("block", [3, 50])
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim", "page_size", "window", "dtype"), SHAPES)
def test_prefill_attention_reaches_the_last_key_of_each_token_when_blocks_attend_in_both_directions(
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    window: int | None,
    dtype: torch.dtype,
    block: int,
) -> None:
    lengths = [before + new for before, new in CHUNKS]
    paged = make_paged(lengths, page_size, kv_heads, head_dim, dtype)
    counts = [new for _, new in CHUNKS]
    total, scale = sum(counts), head_dim**-0.5
    starts = torch.tensor([0, *counts], dtype=torch.int32, device=DEVICE).cumsum(0).to(torch.int32)
    ends = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    seen = []
    for before, new in CHUNKS:  # every other block sees its last token, the tokens between are causal
        own = torch.arange(before, before + new, device=DEVICE)
        block_ends = (own // block * block + block - 1).clamp(max=before + new - 1)
        seen.append(torch.where(own // block % 2 == 0, block_ends, own))
    q = strided_queries(total, q_heads, kv_heads, head_dim, dtype)
    exact = torch.cat(
        [
            exact_attention(part, paged.keys[index], paged.values[index], before, scale, window, last_keys=ends_of_part)
            for index, ((before, _), part, ends_of_part) in enumerate(zip(CHUNKS, q.split(counts), seen, strict=True))
        ]
    )
    rows = PrefillRows(paged.tables, starts, ends, max(counts), max(lengths), last_keys=torch.cat(seen).int())
    sizes = prefill_shape(q, paged.pool, rows, window)
    for config in (POLICY.flash_attention_2_config(sizes), PrefillConfig(16, 32, 4, 2, programs=4000)):
        mixed = prefill_attention(
            q, paged.pool, rows, scale=scale, config=config, workspace=WORKSPACE, sliding_window=window
        )
        assert error(mixed, exact) <= ROUNDING[dtype], config
