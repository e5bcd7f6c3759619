"""Repetition (Keskar et al., arXiv:1909.05858), presence and frequency penalties (OpenAI) on the device, by slot.

One kernel changes logits, another counts the token that was sampled from them.
"""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.sampling.penalty_state import MAX_COUNT, PenaltyState
from mini_infer_engine.kernels.sampling.sampling_state import SamplingState
from mini_infer_engine.kernels.sizes import cdiv, next_power_of_2

_BLOCK = 2048


@triton.jit
def _changed(values, count, repetition, presence, frequency):
    """Returns logits after penalties; `PenaltyState.counts` documents the count."""
    repeated = tl.where(values > 0, tl.div_rn(values, tl.zeros_like(values) + repetition), values * repetition)
    output_count = (count >> 1).to(tl.float32)
    return tl.where(count > 0, repeated, values) - (
        presence * (output_count > 0).to(tl.float32) + frequency * output_count
    )


@triton.jit
def _penalise(logits, slots, counts, strengths, out, vocabulary, logits_stride, BLOCK: tl.constexpr):
    """Applies penalties with one program per (row, block of the vocabulary)."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = tokens < vocabulary
    values = tl.load(logits + row * logits_stride + tokens, mask=mask, other=0.0).to(tl.float32)
    repetition = tl.load(strengths + slot * 3)
    presence = tl.load(strengths + slot * 3 + 1)
    frequency = tl.load(strengths + slot * 3 + 2)
    if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
        count = tl.load(counts + slot * vocabulary + tokens, mask=mask, other=0).to(tl.int32)
        values = _changed(values, count, repetition, presence, frequency)
    tl.store(out + row * vocabulary + tokens, values, mask=mask)


@triton.jit
def _penalise_checks(
    logits,
    slots,
    positions,
    history,
    history_stride,
    counts,
    strengths,
    out,
    vocabulary,
    logits_stride,
    QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Applies penalties where guesses are verified, with one program per (row and query, block of the vocabulary)."""
    line = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + line // QUERIES).to(tl.int64)
    query = (line % QUERIES).to(tl.int32)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = tokens < vocabulary
    values = tl.load(logits + line * logits_stride + tokens, mask=mask, other=0.0).to(tl.float32)
    repetition = tl.load(strengths + slot * 3)
    presence = tl.load(strengths + slot * 3 + 1)
    frequency = tl.load(strengths + slot * 3 + 2)
    if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
        count = tl.load(counts + slot * vocabulary + tokens, mask=mask, other=0).to(tl.int32)
        guesses = history + slot * history_stride + tl.load(positions + slot) + 1
        for place in range(query):
            count += 2 * (tokens == tl.load(guesses + place)).to(tl.int32)
        values = _changed(values, count, repetition, presence, frequency)
    tl.store(out + line * vocabulary + tokens, values, mask=mask)


@triton.jit
def _count_made(slots, results, counts, vocabulary, MAX: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr):
    """Counts each token that a row has generated, with one program per row; a repeated token is counted in one step."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    line = results + row * (QUERIES + 1)
    places = tl.arange(0, BLOCK)
    is_made = places < tl.load(line).to(tl.int32)
    tokens = tl.load(line + 1 + places, mask=is_made, other=-1)
    same = (tokens[:, None] == tokens[None, :]) & is_made[None, :]
    times = tl.sum(same.to(tl.int32), axis=1)
    earlier = tl.sum((same & (places[None, :] < places[:, None])).to(tl.int32), axis=1)
    is_first = is_made & (earlier == 0)
    at = counts + slot * vocabulary + tokens
    count = tl.load(at, mask=is_first, other=0).to(tl.int32)
    most = MAX + 1 - (count & 1)  # what counting one by one would end at
    counted = tl.maximum(count, tl.minimum(count + 2 * times, most))
    tl.store(at, counted.to(counts.dtype.element_ty), mask=is_first)


@triton.jit
def _count(slots, last_tokens, counts, vocabulary, MAX: tl.constexpr):
    """Counts the token sampled last, with one program per row. Counts of a slot without penalties are never read."""
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    count_at = counts + slot * vocabulary + tl.load(last_tokens + slot)
    count = tl.load(count_at)
    tl.store(count_at, tl.where(count < MAX, count + 2, count))


def penalised(logits: torch.Tensor, slots: torch.Tensor, penalties: PenaltyState) -> torch.Tensor:
    """Applies penalties like `Penalties.applied` to logits [rows, vocabulary] of slots [rows] int32 on the device:
    always fp32.
    """
    rows, vocabulary = logits.shape
    out = torch.empty((rows, vocabulary), dtype=torch.float32, device=logits.device)
    _penalise[(rows, cdiv(vocabulary, _BLOCK))](
        logits,
        slots,
        penalties.counts,
        penalties.strengths,
        out,
        vocabulary,
        logits.stride(0),
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return out


def count_sampled(slots: torch.Tensor, state: SamplingState, penalties: PenaltyState) -> None:
    """Counts the tokens that `sample` has just chosen for slots [rows] int32 on the device, like `Penalties.count`."""
    _count[(slots.shape[0],)](
        slots, state.last_tokens, penalties.counts, penalties.counts.shape[1], MAX=MAX_COUNT, num_warps=1
    )


def penalised_checks(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    history: torch.Tensor,
    penalties: PenaltyState,
    queries: int,
) -> torch.Tensor:
    """Applies penalties to logits [rows * queries, vocabulary] where guesses are verified: query n follows n of them.

    positions [slots] and history [slots, positions] int32 are those of `kernels.sampling.speculate`.
    """
    lines, vocabulary = logits.shape
    out = torch.empty((lines, vocabulary), dtype=torch.float32, device=logits.device)
    _penalise_checks[(lines, cdiv(vocabulary, _BLOCK))](
        logits,
        slots,
        positions,
        history,
        history.stride(0),
        penalties.counts,
        penalties.strengths,
        out,
        vocabulary,
        logits.stride(0),
        QUERIES=queries,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return out


def count_made(slots: torch.Tensor, results: torch.Tensor, penalties: PenaltyState) -> None:
    """Counts the results [rows, queries + 1] of `settle_guesses` for slots [rows], like `Penalties.count_made`."""
    queries = results.shape[1] - 1
    _count_made[(slots.shape[0],)](
        slots,
        results,
        penalties.counts,
        penalties.counts.shape[1],
        MAX=MAX_COUNT,
        QUERIES=queries,
        BLOCK=next_power_of_2(queries),
        num_warps=1,
    )
