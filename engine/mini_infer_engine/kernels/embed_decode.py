"""Gathers a decode step's inputs from each row's slot: its last token's embedding, its position and its cache index."""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.sampling.sampling_state import SamplingState
from mini_infer_engine.kernels.sizes import cdiv


@triton.jit
def _gather(
    slots,
    last_tokens,
    slot_positions,
    slot_kv_lengths,
    embedding,
    scales,
    hidden,
    positions,
    kv_lengths,
    width,
    first_token,
    num_tokens,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row).to(tl.int64)
    token = tl.load(last_tokens + slot).to(tl.int64) - first_token
    mask = offsets < width
    is_here = (token >= 0) & (token < num_tokens)
    if scales is None:
        values = tl.load(embedding + token * width + offsets, mask=mask & is_here, other=0.0)
    else:
        integers = tl.load(embedding + token * width + offsets, mask=mask & is_here, other=0)
        scale = tl.load(scales + token, mask=is_here, other=0.0)
        values = (integers.to(tl.float32) * scale).to(hidden.dtype.element_ty)
    tl.store(hidden + row.to(tl.int64) * width + offsets, values, mask=mask)
    if tl.program_id(1) == 0:
        tl.store(positions + row, tl.load(slot_positions + slot).to(tl.int64))
        tl.store(kv_lengths + row, tl.load(slot_kv_lengths + slot).to(tl.int64))


@triton.jit(do_not_specialize=["padding_slot"], do_not_specialize_on_alignment=["slots"])
def _gather_places(slots, slot_positions, slot_kv_lengths, positions, kv_lengths, padding_slot):
    """Gathers with one program per row."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    tl.store(positions + row, tl.load(slot_positions + slot).to(tl.int64))
    tl.store(kv_lengths + row, tl.where(slot == padding_slot, -1, tl.load(slot_kv_lengths + slot)).to(tl.int64))


def gather_decode_inputs(
    slots: torch.Tensor,
    state: SamplingState,
    embedding: torch.Tensor,
    *,
    first_token: int = 0,
    scales: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (hidden [rows, width], positions, kv_lengths [rows] int64) of the last token in slots [rows] int32.

    The table may be a rank's, from `first_token` on; the embeddings of other tokens are zeros. `scales` [tokens] fp32
    are given for a table of integers, whose embeddings are in `dtype`.
    """
    rows, width = slots.shape[0], embedding.shape[1]
    hidden = torch.empty((rows, width), dtype=dtype or embedding.dtype, device=slots.device)
    positions, kv_lengths = _places(rows, slots.device)
    _gather[(rows, cdiv(width, 1024))](
        slots,
        state.last_tokens,
        state.positions,
        state.kv_lengths,
        embedding,
        scales,
        hidden,
        positions,
        kv_lengths,
        width,
        first_token,
        embedding.shape[0],
        BLOCK=1024,
        num_warps=4,
    )
    return hidden, positions, kv_lengths


def gather_places(
    slots: torch.Tensor, state: SamplingState, padding_slot: int = -1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (positions, kv_lengths) [rows] int64 of slots [rows]; kv_lengths are -1 in rows of the `padding_slot`."""
    positions, kv_lengths = _places(slots.shape[0], slots.device)
    _gather_places[(slots.shape[0],)](
        slots, state.positions, state.kv_lengths, positions, kv_lengths, padding_slot, num_warps=1
    )
    return positions, kv_lengths


def _places(rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(rows, dtype=torch.int64, device=device), torch.empty(rows, dtype=torch.int64, device=device)
