"""Repetition (Keskar et al., arXiv:1909.05858), presence and frequency penalties (OpenAI) on the device, by slot.

One kernel changes logits, another counts the token that was chosen from them.
"""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.sampling.penalty_state import MAX_COUNT, PenaltyState
from mini_infer_engine.kernels.sampling.sampling_state import SamplingState
from mini_infer_engine.kernels.sizes import cdiv

_BLOCK = 2048


@triton.jit
def _penalise(logits, slots, counts, strengths, out, vocabulary, logits_stride, BLOCK: tl.constexpr):
    """Penalties: program (row, block of the vocabulary)."""
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
        repeated = tl.where(values > 0, tl.div_rn(values, tl.zeros_like(values) + repetition), values * repetition)
        output_count = (count >> 1).to(tl.float32)
        values = tl.where(count > 0, repeated, values) - (
            presence * (output_count > 0).to(tl.float32) + frequency * output_count
        )
    tl.store(out + row * vocabulary + tokens, values, mask=mask)


@triton.jit
def _count(slots, last_tokens, counts, vocabulary, MAX: tl.constexpr):
    """Program (row): one more of the token chosen last. Counts of a slot without penalties are never read."""
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    count_at = counts + slot * vocabulary + tl.load(last_tokens + slot)
    count = tl.load(count_at)
    tl.store(count_at, tl.where(count < MAX, count + 2, count))


def penalised(logits: torch.Tensor, slots: torch.Tensor, penalties: PenaltyState) -> torch.Tensor:
    """`Penalties.applied` for logits [rows, vocabulary] of slots [rows] int32 on the device: always fp32."""
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
    """`Penalties.count` of what `sample` has just chosen for slots [rows] int32 on the device."""
    _count[(slots.shape[0],)](
        slots, state.last_tokens, penalties.counts, penalties.counts.shape[1], MAX=MAX_COUNT, num_warps=1
    )
