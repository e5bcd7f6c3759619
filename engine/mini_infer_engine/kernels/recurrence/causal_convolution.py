"""Computes causal depthwise convolutions over the rows of a pass, continued from states in slots.

The operation is that of Dao's causal-conv1d (https://github.com/Dao-AILab/causal-conv1d). A state is the last
`width - 1` inputs of each channel, the latest at the end.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.sizes import cdiv, next_power_of_2

_BLOCK = 256


@dataclass(frozen=True, slots=True)
class ConvolutionRows:
    """The rows of a pass, int32 on the device."""

    rows: torch.Tensor  # [rows, 4]: first token, slot of the state before it or -1, first of its stores, their number
    stores: torch.Tensor  # [stores, 2]: tokens of the row, the slot to which the state after them is written
    row_of_token: torch.Tensor  # [tokens]


@triton.jit
def _convolve(
    x,
    x_stride,
    weight,
    bias,
    states,
    slot_stride,
    rows,
    row_of_token,
    out,
    channels,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes one token with one program per block of channels."""
    token = tl.program_id(0)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < channels
    line = rows + tl.load(row_of_token + token) * 4
    begin = tl.load(line)
    source = tl.load(line + 1).to(tl.int64)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + offs, mask=mask, other=0.0).to(tl.float32)
    for tap in tl.static_range(WIDTH):
        place = token - (WIDTH - 1) + tap
        is_here = place >= begin
        here = tl.load(x + place.to(tl.int64) * x_stride + offs, mask=mask & is_here, other=0.0)
        before = states + source * slot_stride + offs * (WIDTH - 1) + (place - begin + WIDTH - 1)
        earlier = tl.load(before, mask=mask & (place < begin) & (source >= 0), other=0.0)
        taps = tl.load(weight + offs * WIDTH + tap, mask=mask, other=0.0).to(tl.float32)
        total += (here.to(tl.float32) + earlier.to(tl.float32)) * taps
    tl.store(out + token.to(tl.int64) * channels + offs, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _store_states(
    x,
    x_stride,
    states,
    slot_stride,
    rows,
    stores,
    channels,
    TAPS: tl.constexpr,
    ALL_TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes a row's states with one program per block of channels. The last store may overwrite the state before."""
    offs = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[:, None]
    taps = tl.arange(0, ALL_TAPS)[None, :]
    mask = (offs < channels) & (taps < TAPS)
    line = rows + tl.program_id(0) * 4
    begin = tl.load(line)
    source = tl.load(line + 1).to(tl.int64)
    first = tl.load(line + 2)
    for store in range(first, first + tl.load(line + 3)):
        place = begin + tl.load(stores + store * 2) - TAPS + taps
        slot = tl.load(stores + store * 2 + 1).to(tl.int64)
        here = tl.load(x + place.to(tl.int64) * x_stride + offs, mask=mask & (place >= begin), other=0.0)
        before = states + source * slot_stride + offs * TAPS + (place - begin + TAPS)
        earlier = tl.load(before, mask=mask & (place < begin) & (source >= 0), other=0.0)
        tl.debug_barrier()  # every tap is read before one is overwritten
        tl.store(states + slot * slot_stride + offs * TAPS + taps, here + earlier, mask=mask)


def causal_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    plan: ConvolutionRows,
) -> torch.Tensor:
    """Returns the convolution of x [tokens, channels], whose channels are contiguous, and updates states in place.

    `weight` is [channels, 1, width]. `states` [slots, channels, width - 1] has dense slots, in the dtype of x.
    """
    tokens, channels = x.shape
    width = weight.shape[-1]
    out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    blocks = cdiv(channels, _BLOCK)
    _convolve[(tokens, blocks)](
        x,
        x.stride(0),
        weight,
        weight if bias is None else bias,
        states,
        states.stride(0),
        plan.rows,
        plan.row_of_token,
        out,
        channels,
        WIDTH=width,
        HAS_BIAS=bias is not None,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    if width > 1:
        _store_states[(len(plan.rows), blocks)](
            x,
            x.stride(0),
            states,
            states.stride(0),
            plan.rows,
            plan.stores,
            channels,
            TAPS=width - 1,
            ALL_TAPS=next_power_of_2(width - 1),
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return out
