"""Who attends to what in a decode pass: its programs, given tokens in equal shares.

Lengths live on the device and change from pass to pass, while a captured graph keeps its number of programs. So one
small kernel a pass, not every program of every layer, divides: the smallest share for which the programs suffice.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.attention.attention_config import MANY_LANES, DecodeConfig
from mini_infer_engine.kernels.sizes import cdiv, next_power_of_2

NO_WINDOW = 1 << 30
FIELDS: tl.constexpr = tl.constexpr(8)
"""Of a program: row or -1, slot, position of the new token, first token, end, part, parts of its row, unused."""


MOST_PARTS: tl.constexpr = tl.constexpr(64)
"""Of a sequence: whoever is last adds all parts up while the others wait."""
_MERGED_HEADS = 32
"""Query heads of parts that are added up in a turn, which takes as long as reading 1.6 blocks."""
_MANY_BLOCKS: tl.constexpr = tl.constexpr(56)
"""Of the longest row, from which it is worth many parts."""


def _blocks_worth_a_part(group: int, *, of_many: bool) -> float:
    """To read b blocks in n parts and add them up takes b / n + f * n: least for parts of sqrt(f * b). This is f."""
    return 0.008 * next_power_of_2(group) if of_many else 1.6 / max(2, _MERGED_HEADS // next_power_of_2(group))


@triton.jit(do_not_specialize=["rows", "programs", "window"], do_not_specialize_on_alignment=["slots", "positions"])
def _plan_decode(
    slots,
    positions,
    plan,
    rows,
    programs,
    window,
    blocks_worth_a_part,
    blocks_worth_one_of_many,
    ROWS_BLOCK: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.arange(0, ROWS_BLOCK)
    inside = row < rows
    slot = tl.load(slots + row, mask=inside, other=0).to(tl.int32)
    position = tl.load(positions + row, mask=inside, other=0).to(tl.int32)
    first = tl.maximum(position + 1 - window, 0) // BLOCK * BLOCK
    blocks = tl.where(inside & (position >= 0), tl.maximum(tl.cdiv(position - first, BLOCK), 1), 0)

    # Parts are at most all blocks over the share, and one more for each row.
    most = tl.max(blocks)
    share = tl.maximum(tl.cdiv(tl.sum(blocks), programs), tl.maximum(tl.cdiv(most, MOST_PARTS), 1))
    worth = tl.where(most >= _MANY_BLOCKS, blocks_worth_one_of_many, blocks_worth_a_part)
    share = tl.maximum(share, tl.sqrt(most.to(tl.float32) * worth).to(tl.int32))
    enough = tl.minimum(most, tl.cdiv(tl.sum(blocks), tl.maximum(programs - rows, 1)))
    enough = tl.maximum(enough, share)
    while share < enough:
        middle = (share + enough) // 2
        fits = tl.sum(tl.cdiv(blocks, middle)) <= programs
        share = tl.where(fits, share, middle + 1)
        enough = tl.where(fits, middle, enough)

    parts = tl.cdiv(blocks, share)
    tokens_of_part = tl.cdiv(blocks, tl.maximum(parts, 1)) * BLOCK
    begins = tl.cumsum(parts) - parts
    for start in range(0, tl.max(parts), PARTS_BLOCK):
        part = start + tl.arange(0, PARTS_BLOCK)[None, :]
        entry = plan + (begins[:, None] + part) * FIELDS
        mine = part < parts[:, None]
        begin = first[:, None] + part * tokens_of_part[:, None]
        end = tl.minimum(begin + tokens_of_part[:, None], position[:, None])
        none = tl.zeros((ROWS_BLOCK, PARTS_BLOCK), dtype=tl.int32)
        tl.store(entry, none + row[:, None], mask=mine)
        tl.store(entry + 1, none + slot[:, None], mask=mine)
        tl.store(entry + 2, none + position[:, None], mask=mine)
        tl.store(entry + 3, begin, mask=mine)
        tl.store(entry + 4, end, mask=mine)
        tl.store(entry + 5, none + part, mask=mine)
        tl.store(entry + 6, none + parts[:, None], mask=mine)
    for start in range(tl.sum(parts), programs, 128):
        idle = start + tl.arange(0, 128)
        tl.store(plan + idle * FIELDS, tl.full((128,), -1, dtype=tl.int32), mask=idle < programs)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """One pass's division, for all layers with the same window."""

    entries: torch.Tensor  # [programs of a KV head, FIELDS] int32, device
    sliding_window: int | None
    config: DecodeConfig
    splits: bool
    """Whether there are more programs than rows, so that a row may have several."""


def plan_decode(
    slots: torch.Tensor,
    positions: torch.Tensor,
    kv_heads: int,
    most_tokens: int,
    sliding_window: int | None = None,
    *,
    config: DecodeConfig,
    group: int = 1,
) -> DecodePlan:
    """Divide rows whose new tokens stand at `positions` [rows], all below `most_tokens`.

    slots [rows] are passed on to the programs. Every row has a part, and its last part has the new token; a row at
    position -1 is padding, of which no program knows. group: query heads of a KV head.
    """
    rows = positions.shape[0]
    are_few = rows * kv_heads < MANY_LANES
    wanted = max(config.target_programs // kv_heads, int(rows * config.programs_per_row))
    most_blocks = cdiv(min(most_tokens, sliding_window or most_tokens) + 1, config.block_tokens)
    programs = max(rows, min(wanted, rows * most_blocks))
    entries = torch.empty((programs, FIELDS.value), dtype=torch.int32, device=positions.device)
    if rows:
        rows_block = 64 if rows <= 64 else max(512, next_power_of_2(rows))  # two sizes, for each is compiled
        _plan_decode[(1,)](
            slots,
            positions,
            entries,
            rows,
            programs,
            sliding_window or NO_WINDOW,
            _blocks_worth_a_part(group, of_many=False),
            _blocks_worth_a_part(group, of_many=are_few),
            ROWS_BLOCK=rows_block,
            PARTS_BLOCK=max(1, 512 // rows_block),
            BLOCK=config.block_tokens,
            num_warps=4,
        )
    return DecodePlan(entries, sliding_window, config, splits=programs > rows)
