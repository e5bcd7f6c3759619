"""Page selection for decodes: bounds, the choice, and decode attention over page tables of each KV head."""

import pytest
import torch

pytest.importorskip("triton", reason="needs triton; on a CPU with TRITON_INTERPRET=1")

from mini_infer_engine.config.options.kv_selection import FIRST_PAGES, LAST_PAGES
from mini_infer_engine.kernels.attention import hopper_decode_attention as hopper_module
from mini_infer_engine.kernels.attention.attention_config import DecodeConfig
from mini_infer_engine.kernels.attention.decode_attention import decode_attention
from mini_infer_engine.kernels.attention.decode_plan import plan_decode
from mini_infer_engine.kernels.attention.page_selection import (
    SelectionPlan,
    bound_pages,
    plan_selection,
    select_pages,
)
from mini_infer_engine.kernels.attention.rope_kv import Rotation
from mini_infer_engine.runtime.attention import page_scores as reference
from tests.gpu.device import BF16, DEVICE, FP32, INTERPRETED, KERNELS, ON_GPU, WORKSPACE, cases, error, normal
from tests.gpu.exact import exact_rotated
from tests.gpu.hopper import enforce, here
from tests.gpu.paged import Paged, exact_attention, make_paged
from tests.gpu.test_hopper_decode_attention import _ByPrograms

pytestmark = KERNELS
SHAPES = cases(
    [(4, 2, 64, 16, FP32), (3, 1, 40, 32, FP32)],
    [(32, 8, 128, 128, BF16), (28, 4, 128, 64, BF16), (16, 8, 128, 128, BF16),
     (8, 1, 96, 48, BF16), (71, 1, 64, 16, BF16)],
)  # fmt: skip
BUDGET = 5


def lengths_of(page_size: int) -> list[int]:
    """Tokens before the new one: none, within the budget, at borders, far beyond it."""
    pages = [0, 3, BUDGET - 1, BUDGET, BUDGET + 1, 11] + ([40, 300] if ON_GPU else [])
    return [0, *(page_size * number + offset for number in pages for offset in (1, page_size - 1)), page_size * 9]


def rotation_of(tokens: int, head_dim: int, dtype: torch.dtype, *, with_norm: bool) -> Rotation:
    angles = torch.arange(tokens, device=DEVICE)[:, None] / 10.0 ** torch.arange(head_dim // 2, device=DEVICE)
    weights = [1 + normal(head_dim, dtype=dtype, seed=seed) / 4 for seed in (4, 5)] if with_norm else [None, None]
    return Rotation(torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype), *weights, eps=1e-5)


def bounds_of(pool: torch.Tensor) -> torch.Tensor:
    """The bounds of all pages by the reference; those of pages with poison are poison."""
    return reference.key_bounds(pool[:, 0])


def plan(paged: Paged, slots: list[int], kv_lengths: list[int], kv_heads: int, page_size: int) -> SelectionPlan:
    lengths = torch.tensor(kv_lengths, device=DEVICE)
    return plan_selection(
        torch.tensor(slots, dtype=torch.int32, device=DEVICE),
        lengths.clamp(min=0) + 3,  # tokens stand further on in their texts than in their caches
        lengths,
        paged.tables,
        kv_heads=kv_heads,
        page_size=page_size,
        budget=BUDGET,
        first_pages=FIRST_PAGES,
        last_pages=LAST_PAGES,
        most_pages=2 * paged.tables.shape[1],
        pdl=ON_GPU and torch.cuda.get_device_capability()[0] >= 9,
    )


@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim", "page_size", "dtype"), SHAPES)
def test_bounds_are_made_when_tokens_complete_pages(
    q_heads: int, kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype
) -> None:
    del q_heads
    pages, tokens = 9, 260
    pool = normal(pages, 2, 2, page_size, kv_heads, head_dim, dtype=dtype)[:, 1]
    bounds = torch.full((pages, 2, kv_heads, 2, head_dim), 7.0, dtype=dtype, device=DEVICE)[:, 1]
    kv_index = torch.arange(tokens, device=DEVICE) % page_size  # of page 0, again and again, but for its last token
    kv_index[kv_index == page_size - 1] = -1
    completed = {3: 5 * page_size + page_size - 1, 4: 2 * page_size + page_size - 1, 259: 8 * page_size + page_size - 1}
    for token, index in completed.items():
        kv_index[token] = index
    bound_pages(pool, kv_index.int(), bounds)
    expected = torch.full_like(bounds, 7.0)
    expected[[5, 2, 8]] = bounds_of(pool)[[5, 2, 8]]
    assert torch.equal(bounds, expected)


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim", "page_size", "dtype"), SHAPES)
def test_each_kv_head_selects_the_pages_with_the_highest_bounds(
    q_heads: int, kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype, with_norm: bool
) -> None:
    before = lengths_of(page_size)
    paged = make_paged([length + 1 for length in before], page_size, kv_heads, head_dim, dtype)
    slots = [*range(len(before))[::-1], 0]  # rows are in another order than page tables, and the last is padding
    kv_lengths = [*before[::-1], -1]
    rotation = rotation_of(max(before) + 4, head_dim, dtype, with_norm=with_norm)
    qkv = normal(len(slots), (q_heads + 2 * kv_heads) * head_dim, dtype=dtype, seed=9)
    bounds, made = bounds_of(paged.pool), plan(paged, slots, kv_lengths, kv_heads, page_size)
    selected = select_pages(qkv, rotation, bounds, made).clone()

    heads = qkv.unflatten(1, (-1, head_dim))[:, :q_heads]
    queries = exact_rotated(heads, rotation, rotation.q_norm, made.positions).to(dtype)
    for row, (slot, length) in enumerate(zip(slots, kv_lengths, strict=True)):
        newest, table = length // page_size, paged.tables[slot]
        if length < 0:
            assert (made.lengths[row], made.kv_index[row]) == (-1, -1)
            assert not selected[row].any()
            continue
        kept = min(newest, BUDGET - 1)
        assert made.lengths[row] == kept * page_size + length % page_size
        assert made.kv_index[row] == table[newest] * page_size + length % page_size
        if newest < BUDGET:
            assert torch.equal(selected[row, :, : newest + 1], table[: newest + 1].expand(kv_heads, -1))
            continue
        grouped = queries[row].view(1, kv_heads, -1, head_dim)
        scores = reference.page_scores(grouped, bounds[table[:newest].long()][None])[0]
        for head in range(kv_heads):
            places = [table.tolist().index(page) for page in selected[row, head].tolist()]
            assert places == sorted(set(places)), "each once, in the order of the text"
            assert {*range(FIRST_PAGES), *range(newest - LAST_PAGES + 1, newest + 1)} <= set(places)
            free = scores[head, FIRST_PAGES : newest - LAST_PAGES + 1]
            chosen = [place for place in places if FIRST_PAGES <= place <= newest - LAST_PAGES]
            least = free.sort(descending=True).values[len(chosen) - 1]
            assert scores[head, chosen].min() >= least - 1e-3 * free.abs().max(), "a better page was left out"


def test_the_first_of_pages_with_equal_bounds_are_selected() -> None:
    page_size, head_dim = 16, 64
    paged = make_paged([page_size * 12], page_size, 1, head_dim, FP32)
    bounds = torch.zeros(paged.pool.shape[0], 1, 2, head_dim, device=DEVICE)
    rotation = rotation_of(page_size * 12 + 3, head_dim, FP32, with_norm=False)
    qkv = normal(1, 3 * head_dim)
    made = plan(paged, [0], [page_size * 12 - 1], 1, page_size)
    assert select_pages(qkv, rotation, bounds, made)[0, 0].tolist() == paged.tables[0, [0, 1, 2, 10, 11]].tolist()
    bounds[paged.tables[0, 7].item(), :, 0] = -1.0
    bounds[paged.tables[0, 7].item(), :, 1] = 1.0
    assert select_pages(qkv, rotation, bounds, made)[0, 0].tolist() == paged.tables[0, [0, 1, 7, 10, 11]].tolist()


CONFIGS = {
    "portable": [DecodeConfig(1, 16, programs_per_row=1.0), DecodeConfig(40, 32, programs_per_row=3.0)],
    "hopper": [
        DecodeConfig(1, 32, programs_per_row=1.0, pdl=True, hopper=True),
        DecodeConfig(40, 32, stages=3, pdl=True, hopper=True),
    ],
}


@pytest.mark.parametrize("kernel", CONFIGS)
def test_decode_attention_reads_the_pages_of_each_kv_head(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    is_hopper = kernel == "hopper"
    if is_hopper and INTERPRETED:
        monkeypatch.setattr(hopper_module, "_hopper_decode_attention", _ByPrograms())
    elif is_hopper:
        enforce(here())
    dtype = BF16 if is_hopper or ON_GPU else FP32
    q_heads, kv_heads, head_dim, page_size = 4, 2, 64, 32
    before = lengths_of(page_size)
    paged = make_paged([length + 1 for length in before], page_size, kv_heads, head_dim, dtype)
    slots = list(range(len(before)))[::-1]
    rotation = rotation_of(max(before) + 4, head_dim, dtype, with_norm=True)
    qkv = normal(len(slots), (q_heads + 2 * kv_heads) * head_dim, dtype=dtype, seed=9)
    made = plan(paged, slots, before[::-1], kv_heads, page_size)
    selected = select_pages(qkv, rotation, bounds_of(paged.pool), made)
    heads = qkv.unflatten(1, (-1, head_dim))
    queries = exact_rotated(heads[:, :q_heads], rotation, rotation.q_norm, made.positions)
    new_keys = exact_rotated(heads[:, q_heads : q_heads + kv_heads], rotation, rotation.k_norm, made.positions)
    new_values = heads[:, q_heads + kv_heads :].double()
    exact = []
    for row, length in enumerate(made.lengths.tolist()):
        pages = selected[row, :, : length // page_size + 1].long()
        read = [
            torch.stack([paged.pool[pages[head], half, :, head].flatten(0, 1)[:length] for head in range(kv_heads)], 1)
            for half in (0, 1)
        ]
        keys = torch.cat((read[0].double(), new_keys[row : row + 1]))
        values = torch.cat((read[1].double(), new_values[row : row + 1]))
        exact.append(exact_attention(queries[row : row + 1], keys, values, length, 0.125, None))
    for config in CONFIGS[kernel]:
        rows = torch.arange(len(slots), dtype=torch.int32, device=DEVICE)
        entries = plan_decode(
            rows, made.positions, made.lengths, kv_heads, BUDGET * page_size, config=config, group=2,
            page_tables=selected.flatten(1), page_size=page_size,
        )  # fmt: skip
        pool = paged.pool.clone()
        mixed = decode_attention(qkv, rotation, pool, selected, entries, scale=0.125, workspace=WORKSPACE)
        assert error(mixed, torch.cat(exact)) <= (256.0 if dtype == FP32 else 4.0), config
        at = made.kv_index.long()
        assert error(pool[at // page_size, 0, at % page_size], new_keys) <= (256.0 if dtype == FP32 else 4.0)
