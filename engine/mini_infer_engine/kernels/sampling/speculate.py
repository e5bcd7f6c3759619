"""Stores and verifies guesses of speculative decoding on the device, and prepares the model's input from them.

`history` has the tokens of each slot by position: those that were computed, the last one, which was not, and guesses
after it. Guesses are verified by coupled draws (Daliri et al., arXiv:2408.07978): every position is sampled with its
own noise, and a guess is correct if it is the sampled token. Nothing here waits for the host.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.sampling.sampling_state import SUPPRESSED_WIDTH, SamplingState
from mini_infer_engine.kernels.sizes import next_power_of_2

LOOK_UP_BLOCK = 1024
"""Positions that prompt look-up compares at a time."""


@triton.jit
def _expand(
    slots,
    history,
    history_stride,
    last_tokens,
    positions,
    kv_lengths,
    noise_seeds,
    output_indexes,
    inverse_temperatures,
    top_ks,
    top_ps,
    min_ps,
    suppress_until,
    suppressed,
    to_last_tokens,
    to_positions,
    to_kv_lengths,
    to_noise_seeds,
    to_output_indexes,
    to_inverse_temperatures,
    to_top_ks,
    to_top_ps,
    to_min_ps,
    to_suppress_until,
    to_suppressed,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Makes a slot for each position of a row, as if it were decoded alone, with one program per (row, query)."""
    row, query = tl.program_id(0), tl.program_id(1)
    to = row * QUERIES + query
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(positions + slot)
    token = tl.load(last_tokens + slot)
    tl.store(to_last_tokens + to, token)
    tl.store(to_positions + to, position + query)
    tl.store(to_kv_lengths + to, tl.load(kv_lengths + slot) + query)
    tl.store(to_output_indexes + to, tl.load(output_indexes + slot) + query)
    tl.store(to_noise_seeds + to, tl.load(noise_seeds + slot))
    tl.store(to_inverse_temperatures + to, tl.load(inverse_temperatures + slot))
    tl.store(to_top_ks + to, tl.load(top_ks + slot))
    tl.store(to_top_ps + to, tl.load(top_ps + slot))
    tl.store(to_min_ps + to, tl.load(min_ps + slot))
    tl.store(to_suppress_until + to, tl.load(suppress_until + slot))
    columns = tl.arange(0, WIDTH)
    tl.store(to_suppressed + to * WIDTH + columns, tl.load(suppressed + slot * WIDTH + columns))
    if query == 0:
        tl.store(history + slot * history_stride + position, token.to(tl.int32))


@triton.jit
def _keep_guess(slots, positions, tokens, history, history_stride, step):
    """Stores the guess of this step after the earlier ones, with one program per row."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    at = tl.load(positions + slot) + 1 + step
    tl.store(history + slot * history_stride + at, tl.load(tokens + row).to(tl.int32))


@triton.jit
def _look_up(
    slots,
    positions,
    history,
    history_stride,
    longest,
    shortest,
    COUNT: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Prompt look-up with one program per row: finds the longest n-gram at the end of the text that occurred before.

    The guesses are the tokens after its latest occurrence. A place's score is the length of its match, then its
    position: the best has all that follows from it.
    """
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    last = tl.load(positions + slot)
    text = history + slot * history_stride
    best = tl.full((), -1, tl.int64)
    for start in range(0, last, BLOCK):
        ends = start + tl.arange(0, BLOCK)
        matched = tl.zeros((BLOCK,), tl.int32)
        still = ends < last
        for back in tl.static_range(MOST):
            mask = still & (ends >= back) & (back < longest)
            here = tl.load(text + ends - back, mask=mask, other=-1)
            expected = tl.load(text + tl.maximum(last - back, 0))
            still = mask & (here == expected)
            matched += still.to(tl.int32)
        score = tl.where(matched >= shortest, matched.to(tl.int64) * (1 << 32) + ends, -1)
        best = tl.maximum(best, tl.max(score, axis=0))
    end = (best % (1 << 32)).to(tl.int32)
    period = tl.maximum(last - end, 1)
    for place in tl.static_range(COUNT):
        token = tl.full((), -1, tl.int32)
        if best >= 0:
            token = tl.load(text + end + 1 + place % period)
        tl.store(text + last + 1 + place, token)


@triton.jit
def _inputs(
    slots,
    slot_positions,
    slot_kv_lengths,
    history,
    history_stride,
    page_tables,
    group_stride,
    table_stride,
    token_ids,
    positions,
    kv_index,
    ends,
    offset,
    cache_offset,
    vocabulary,
    padding_slot,
    GROUPS: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Gathers each row's tokens from `offset` after the last one on, and their cache places: one program per row."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    # The range begins in the cache: padded rows have no tokens before it.
    first = tl.maximum(tl.load(slot_kv_lengths + slot) + cache_offset, 0)
    query = tl.arange(0, BLOCK)
    mask = query < COUNT
    cache_index = first + query
    position = tl.maximum(tl.load(slot_positions + slot) + offset + query, 0)
    token = tl.load(history + slot * history_stride + position, mask=mask, other=0)
    token = tl.where((token >= 0) & (token < vocabulary), token, 0)  # no guess: any token, which is never right
    to = row * COUNT + query
    tl.store(token_ids + to, token, mask=mask)
    tl.store(positions + to, position, mask=mask)
    for group in tl.static_range(GROUPS):
        table = page_tables + group * group_stride + slot * table_stride
        page = tl.load(table + cache_index // PAGE_SIZE, mask=mask, other=0)
        at = tl.where(slot == padding_slot, -1, page * PAGE_SIZE + cache_index % PAGE_SIZE)
        tl.store(kv_index + group * tl.num_programs(0) * COUNT + to, at, mask=mask)
    tl.store(ends + row, first + COUNT)


@triton.jit
def _settle(
    slots,
    limits,
    sampled,
    history,
    history_stride,
    last_tokens,
    positions,
    kv_lengths,
    output_indexes,
    results,
    padding_slot,
    QUERIES: tl.constexpr,
):
    """Accepts the tokens sampled up to the first wrong guess, and advances the row's slot: one program per row."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    limit = tl.load(limits + row)
    position = tl.load(positions + slot)
    text = history + slot * history_stride + position + 1
    result = results + row * (QUERIES + 1)
    made = tl.full((), 0, tl.int32)
    goes_on = slot != padding_slot
    last = tl.full((), 0, tl.int64)
    for query in tl.static_range(QUERIES):
        token = tl.load(sampled + row * QUERIES + query)
        if goes_on:
            guess = tl.load(text + query)
            tl.store(text + query, token.to(tl.int32))
            tl.store(result + 1 + query, token)
            last = token
            made += 1
            goes_on = (query < limit) & (guess.to(tl.int64) == token)
    tl.store(result, made.to(tl.int64))
    if slot != padding_slot:
        tl.store(last_tokens + slot, last)
        tl.store(positions + slot, position + made)
        tl.store(kv_lengths + slot, tl.load(kv_lengths + slot) + made)
        tl.store(output_indexes + slot, tl.load(output_indexes + slot) + made)


@dataclass(frozen=True, slots=True)
class ChunkInputs:
    """The input tokens of some rows, equally many for each."""

    token_ids: torch.Tensor  # [rows * count] int32
    positions: torch.Tensor  # [rows * count] int32
    kv_index: torch.Tensor  # [KV groups, rows * count] int32, page * page_size + offset; -1: of a padded row, nowhere
    ends: torch.Tensor  # [rows] int32, the last cache index and one


def expand_slots(
    slots: torch.Tensor, state: SamplingState, history: torch.Tensor, virtual: SamplingState, queries: int
) -> None:
    """Gives each position of each row a slot in `virtual`: row * queries + query, as if that position were decoded.

    slots [rows] int32 index `state` and history [slots, positions] int32, which gets the slots' last tokens.
    """
    _expand[(slots.shape[0], queries)](
        slots,
        history,
        history.stride(0),
        state.last_tokens,
        state.positions,
        state.kv_lengths,
        state.noise_seeds,
        state.output_indexes,
        state.inverse_temperatures,
        state.top_ks,
        state.top_ps,
        state.min_ps,
        state.suppress_until,
        state.suppressed,
        virtual.last_tokens,
        virtual.positions,
        virtual.kv_lengths,
        virtual.noise_seeds,
        virtual.output_indexes,
        virtual.inverse_temperatures,
        virtual.top_ks,
        virtual.top_ps,
        virtual.min_ps,
        virtual.suppress_until,
        virtual.suppressed,
        QUERIES=queries,
        WIDTH=SUPPRESSED_WIDTH,
        num_warps=1,
    )


def keep_guess(
    slots: torch.Tensor, state: SamplingState, history: torch.Tensor, tokens: torch.Tensor, step: int
) -> None:
    """Stores guess number `step` of each row, tokens [rows or more], in the history."""
    _keep_guess[(slots.shape[0],)](slots, state.positions, tokens, history, history.stride(0), step, num_warps=1)


def look_up_guesses(
    slots: torch.Tensor, state: SamplingState, history: torch.Tensor, count: int, longest: int, shortest: int
) -> None:
    """Runs prompt look-up (`speculation.ngram.look_up`) on the GPU: stores `count` guesses in history, -1 for none."""
    _look_up[(slots.shape[0],)](
        slots,
        state.positions,
        history,
        history.stride(0),
        longest,
        shortest,
        COUNT=count,
        MOST=next_power_of_2(longest),
        BLOCK=LOOK_UP_BLOCK,
        num_warps=4,
    )


def chunk_inputs(
    slots: torch.Tensor,
    state: SamplingState,
    history: torch.Tensor,
    page_tables: torch.Tensor,
    *,
    page_size: int,
    offset: int,
    count: int,
    vocabulary: int,
    cache_offset: int | None = None,
) -> ChunkInputs:
    """Returns `count` tokens of each row, from `offset` after its last one on; an offset of -1 begins one before it.

    `cache_offset` is the same for their cache indexes; None: `offset`. page_tables [KV groups, slots, width] int32.
    """
    rows, groups = slots.shape[0], page_tables.shape[0]

    def make(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=torch.int32, device=slots.device)

    inputs = ChunkInputs(make(rows * count), make(rows * count), make(groups, rows * count), make(rows))
    _inputs[(rows,)](
        slots,
        state.positions,
        state.kv_lengths,
        history,
        history.stride(0),
        page_tables,
        page_tables.stride(0),
        page_tables.stride(1),
        inputs.token_ids,
        inputs.positions,
        inputs.kv_index,
        inputs.ends,
        offset,
        offset if cache_offset is None else cache_offset,
        vocabulary,
        state.last_tokens.shape[0] - 1,
        GROUPS=groups,
        COUNT=count,
        BLOCK=next_power_of_2(count),
        PAGE_SIZE=page_size,
        num_warps=1,
    )
    return inputs


def settle_guesses(
    slots: torch.Tensor,
    limits: torch.Tensor,
    sampled: torch.Tensor,
    state: SamplingState,
    history: torch.Tensor,
    results: torch.Tensor,
) -> None:
    """Compares guesses with the sampled tokens, and advances the slots.

    limits [rows] int32: guesses of each row that may count; sampled [rows * queries or more] int64. results [rows,
    queries + 1] int64 receives the number of tokens that a row has generated, and the tokens.
    """
    _settle[(slots.shape[0],)](
        slots,
        limits,
        sampled,
        history,
        history.stride(0),
        state.last_tokens,
        state.positions,
        state.kv_lengths,
        state.output_indexes,
        results,
        state.last_tokens.shape[0] - 1,
        QUERIES=results.shape[1] - 1,
        num_warps=1,
    )
