"""Plans the split-KV schedule of a decode pass: which program attends to which keys of which row, in equal splits.

Lengths are on the device and change from pass to pass, while a captured graph has a fixed number of programs. Therefore
one small kernel per pass, not every program of every layer, chooses the split length: the shortest for which the
programs suffice (as FlashInfer's plan does on the host: Ye et al., arXiv:2501.01005).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.attention.attention_config import MANY_HEAD_ROWS, DecodeConfig
from mini_infer_engine.kernels.sizes import cdiv, next_power_of_2

NO_WINDOW = 1 << 30
FIELDS: tl.constexpr = tl.constexpr(10)
"""Fields of a program's entry.

They are: row or -1, slot, KV length before the new token, first key, end, split, splits of its row, position; and for
hopper_decode_attention the pages of its first key and of the new token.
"""


MAX_SPLITS: tl.constexpr = tl.constexpr(64)
"""The largest number of splits of a sequence: the split that arrives last merges all of them alone."""
_MERGE_HEADS = 32
"""Query heads of the splits in one round of the merge, which takes as long as reading 1.6 blocks."""
_LONG_ROW_BLOCKS: tl.constexpr = tl.constexpr(56)
"""Blocks of the longest row from which many splits are worth their merge."""


def _merge_cost_blocks(group: int, *, of_many: bool) -> float:
    """Returns the cost f of merging a split, in blocks.

    Reading b blocks in n splits and merging them takes b / n + f * n, which is least for splits of sqrt(f * b) blocks.
    """
    return 0.008 * next_power_of_2(group) if of_many else 1.6 / max(2, _MERGE_HEADS // next_power_of_2(group))


@triton.jit(do_not_specialize=["rows", "programs", "window", "table_stride", "group_stride", "plan_stride"],
            do_not_specialize_on_alignment=["slots", "positions", "kv_lengths", "page_tables"])  # fmt: skip
def _plan_decode(
    slots,
    positions,
    kv_lengths,
    page_tables,
    plan,
    table_stride,
    group_stride,
    plan_stride,
    rows,
    programs,
    window,
    merge_cost,
    merge_cost_of_many,
    ROWS_BLOCK: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    kv_group = tl.program_id(0).to(tl.int64)
    page_tables += kv_group * group_stride
    plan += kv_group * plan_stride
    row = tl.arange(0, ROWS_BLOCK)
    mask = row < rows
    slot = tl.load(slots + row, mask=mask, other=0).to(tl.int32)
    position = tl.load(positions + row, mask=mask, other=0).to(tl.int32)
    kv_length = tl.load(kv_lengths + row, mask=mask, other=0).to(tl.int32)
    first = tl.maximum(kv_length + 1 - window, 0) // BLOCK * BLOCK
    blocks = tl.where(mask & (kv_length >= 0), tl.maximum(tl.cdiv(kv_length - first, BLOCK), 1), 0)

    # Binary search: splits are at most all blocks over the split length, and one more for each row.
    longest = tl.max(blocks)
    split_blocks = tl.maximum(tl.cdiv(tl.sum(blocks), programs), tl.maximum(tl.cdiv(longest, MAX_SPLITS), 1))
    cost = tl.where(longest >= _LONG_ROW_BLOCKS, merge_cost_of_many, merge_cost)
    split_blocks = tl.maximum(split_blocks, tl.sqrt(longest.to(tl.float32) * cost).to(tl.int32))
    upper = tl.minimum(longest, tl.cdiv(tl.sum(blocks), tl.maximum(programs - rows, 1)))
    upper = tl.maximum(upper, split_blocks)
    while split_blocks < upper:
        middle = (split_blocks + upper) // 2
        fits = tl.sum(tl.cdiv(blocks, middle)) <= programs
        split_blocks = tl.where(fits, split_blocks, middle + 1)
        upper = tl.where(fits, middle, upper)

    splits = tl.cdiv(blocks, split_blocks)
    split_tokens = tl.cdiv(blocks, tl.maximum(splits, 1)) * BLOCK
    first_splits = tl.cumsum(splits) - splits
    if PAGE_SIZE:
        tables = page_tables + slot.to(tl.int64) * table_stride
        new_page = tl.load(tables + tl.maximum(kv_length, 0) // PAGE_SIZE, mask=blocks > 0, other=0)
    for start in range(0, tl.max(splits), SPLITS_BLOCK):
        split = start + tl.arange(0, SPLITS_BLOCK)[None, :]
        entry = plan + (first_splits[:, None] + split) * FIELDS
        own = split < splits[:, None]
        begin = first[:, None] + split * split_tokens[:, None]
        end = tl.minimum(begin + split_tokens[:, None], kv_length[:, None])
        none = tl.zeros((ROWS_BLOCK, SPLITS_BLOCK), dtype=tl.int32)
        tl.store(entry, none + row[:, None], mask=own)
        tl.store(entry + 1, none + slot[:, None], mask=own)
        tl.store(entry + 2, none + kv_length[:, None], mask=own)
        tl.store(entry + 3, begin, mask=own)
        tl.store(entry + 4, end, mask=own)
        tl.store(entry + 5, none + split, mask=own)
        tl.store(entry + 6, none + splits[:, None], mask=own)
        tl.store(entry + 7, none + position[:, None], mask=own)
        if PAGE_SIZE:
            first_page = tl.load(tables[:, None] + begin // PAGE_SIZE, mask=own, other=0)
            tl.store(entry + 8, first_page, mask=own)
            tl.store(entry + 9, none + new_page[:, None], mask=own)
    for start in range(tl.sum(splits), programs, 128):
        idle = start + tl.arange(0, 128)
        tl.store(plan + idle * FIELDS, tl.full((128,), -1, dtype=tl.int32), mask=idle < programs)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """One pass's schedule, for all layers with the same window and, if it has pages, the same KV group."""

    entries: torch.Tensor  # [programs of a KV head, FIELDS] int32, device
    sliding_window: int | None
    config: DecodeConfig
    splits: bool
    """True if there are more programs than rows, so that a row may have several."""


def plan_decode(
    slots: torch.Tensor,
    positions: torch.Tensor,
    kv_lengths: torch.Tensor,
    kv_heads: int,
    max_tokens: int,
    sliding_window: int | None = None,
    *,
    config: DecodeConfig,
    group: int = 1,
    page_tables: torch.Tensor | None = None,
    page_size: int = 0,
) -> DecodePlan:
    """Schedules as `plan_decode_of_groups` does, for the page tables [slots, width] of one KV group.

    They are required if the config is that of hopper_decode_attention, and not read otherwise.
    """
    tables = None if page_tables is None else page_tables.unsqueeze(0)
    (plan,) = plan_decode_of_groups(
        slots,
        positions,
        kv_lengths,
        kv_heads,
        max_tokens,
        sliding_window,
        config=config,
        group=group,
        page_tables=tables,
        page_size=page_size,
    )
    return plan


def plan_decode_of_groups(
    slots: torch.Tensor,
    positions: torch.Tensor,
    kv_lengths: torch.Tensor,
    kv_heads: int,
    max_tokens: int,
    sliding_window: int | None = None,
    *,
    config: DecodeConfig,
    group: int = 1,
    page_tables: torch.Tensor | None = None,
    page_size: int = 0,
) -> list[DecodePlan]:
    """Schedules rows with `kv_lengths` [rows] tokens in the cache before the new one, all fewer than `max_tokens`.

    slots and positions [rows] are passed on to the programs. Every row has a split, and its last split has the new
    token, whose cache index is the KV length; a row with a length of -1 is padding and has no program. A window covers
    the last `sliding_window` cache indexes, which may differ from positions (`Row.position_offset`). group: query heads
    of a KV head. page_tables [KV groups, slots, width] int32, and tokens in a page: required if the config is that of
    hopper_decode_attention, whose plan differs from group to group, and not read otherwise. Returns the plan of each
    group, made by one launch.
    """
    assert not config.hopper or (page_tables is not None and page_size)
    num_groups = 1 if page_tables is None else page_tables.shape[0]
    num_plans = num_groups if config.hopper else 1
    rows = positions.shape[0]
    are_few = rows * kv_heads < MANY_HEAD_ROWS
    target = max(config.target_programs // kv_heads, int(rows * config.programs_per_row))
    max_blocks = cdiv(min(max_tokens, sliding_window or max_tokens) + 1, config.block_tokens)
    programs = max(rows, min(target, rows * max_blocks))
    # An even number of programs, so that every group's entries are aligned to 16 bytes.
    sizes = (num_plans, programs + programs % 2, FIELDS.value)
    entries = torch.empty(sizes, dtype=torch.int32, device=positions.device)
    if rows:
        rows_block = 64 if rows <= 64 else max(512, next_power_of_2(rows))  # two sizes, for each is compiled
        _plan_decode[(num_plans,)](
            slots,
            positions,
            kv_lengths,
            positions if page_tables is None else page_tables,
            entries,
            0 if page_tables is None else page_tables.stride(1),
            0 if page_tables is None else page_tables.stride(0),
            entries.stride(0),
            rows,
            programs,
            sliding_window or NO_WINDOW,
            _merge_cost_blocks(group, of_many=False),
            _merge_cost_blocks(group, of_many=are_few),
            ROWS_BLOCK=rows_block,
            SPLITS_BLOCK=max(1, 512 // rows_block),
            BLOCK=config.block_tokens,
            PAGE_SIZE=page_size if config.hopper else 0,
            num_warps=4,
        )
    plans = [
        DecodePlan(of_group, sliding_window, config, splits=programs > rows)
        for of_group in entries[:, :programs].unbind(0)
    ]
    return plans if config.hopper else plans * num_groups
