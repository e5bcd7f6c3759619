"""Computes causal depthwise convolutions over the rows of a pass, continued from states in slots.

The operation is that of Dao's causal-conv1d (https://github.com/Dao-AILab/causal-conv1d). A state is the last
`width - 1` inputs of each channel, the latest at the end. The activation that follows, or the products before and after
it in the gated short convolution of LFM2 (Liquid AI 2025, arXiv 2511.23404), are part of the kernels.
"""

from typing import Literal

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.recurrence.pass_tables import CHUNK_SIZE, PassTables
from mini_infer_engine.kernels.sizes import cdiv, next_power_of_2

Epilogue = Literal["silu", "gates"]
"""silu(convolution(x)), or after * convolution(before * x) for x [before, after, x] of three times the channels."""
_STEP_CHANNELS = 256
_CHUNK_CHANNELS = 64
_STORE_CHANNELS = 256


@triton.jit
def _inputs(x, places, x_stride, offs, channels, mask, GATED: tl.constexpr):
    """Returns the convolution's inputs, which broadcast places and channels, in fp32."""
    at = x + places * x_stride + offs
    if GATED:
        gates = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        values = tl.load(at + 2 * channels, mask=mask, other=0.0).to(tl.float32)
        return (gates * values).to(x.dtype.element_ty).to(tl.float32)
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _outputs(total, x, places, x_stride, offs, channels, mask, GATED: tl.constexpr):
    """Returns the activated or gated outputs of a convolution, which is rounded to the dtype of x before."""
    total = total.to(x.dtype.element_ty).to(tl.float32)
    if GATED:
        return total * tl.load(x + places * x_stride + channels + offs, mask=mask, other=0.0).to(tl.float32)
    return total / (1.0 + tl.exp(-total))


@triton.jit(do_not_specialize=["padding_slot"])
def _convolve_steps(
    x,
    x_stride,
    weight,
    bias,
    states,
    slot_stride,
    steps,
    padding_slot,
    out,
    channels,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes the tokens of a step and moves their state on with one program per (step, block of channels)."""
    line = steps + tl.program_id(0) * 4
    token = tl.load(line).to(tl.int64)
    source = tl.load(line + 1).to(tl.int64)
    target = tl.load(line + 2).to(tl.int64)
    checkpoint = tl.load(line + 3).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < channels
    if target == padding_slot:
        zeros = tl.zeros((BLOCK,), tl.float32).to(out.dtype.element_ty)
        for number in tl.static_range(TOKENS):
            tl.store(out + (token + number) * channels + offs, zeros, mask=mask & (token >= 0))
    else:
        dtype = states.dtype.element_ty
        before = states + source * slot_stride + offs * (WIDTH - 1)
        copies = mask & (checkpoint >= 0) & (TOKENS == 1)
        for number in tl.static_range(TOKENS):
            newest = _inputs(x, token + number, x_stride, offs, channels, mask, GATED)
            total = newest * tl.load(weight + offs * WIDTH + WIDTH - 1, mask=mask, other=0.0).to(tl.float32)
            if HAS_BIAS:
                total += tl.load(bias + offs, mask=mask, other=0.0).to(tl.float32)
            slot = target if number == TOKENS - 1 else checkpoint + number
            after = states + slot * slot_stride + offs * (WIDTH - 1)
            copy = states + checkpoint * slot_stride + offs * (WIDTH - 1)
            # The same thread reads a tap and overwrites one before it, which it has read.
            for tap in tl.static_range(WIDTH - 1):
                if number + tap < WIDTH - 1:
                    earlier = tl.load(before + number + tap, mask=mask & (source >= 0), other=0.0)
                else:
                    place = token + (number + tap - WIDTH + 1)
                    earlier = _inputs(x, place, x_stride, offs, channels, mask, GATED).to(dtype)
                factor = tl.load(weight + offs * WIDTH + tap, mask=mask, other=0.0).to(tl.float32)
                total += earlier.to(tl.float32) * factor
                if tap > 0:
                    tl.store(after + tap - 1, earlier, mask=mask)
                    tl.store(copy + tap - 1, earlier, mask=copies)
            if WIDTH > 1:
                tl.store(after + WIDTH - 2, newest.to(dtype), mask=mask)
                tl.store(copy + WIDTH - 2, newest.to(dtype), mask=copies)
            result = _outputs(total, x, token + number, x_stride, offs, channels, mask, GATED)
            tl.store(out + (token + number) * channels + offs, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _convolve_chunks(
    x,
    x_stride,
    weight,
    bias,
    states,
    slot_stride,
    rows,
    chunks,
    out,
    channels,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes the tokens of one chunk with one program per (chunk, block of channels)."""
    chunk = chunks + tl.program_id(0) * 4
    first = tl.load(chunk).to(tl.int64)
    count = tl.load(chunk + 1)
    if count == 0:
        return
    row = rows + tl.load(chunk + 2) * 8
    begin = tl.load(row).to(tl.int64)
    source = tl.load(row + 1).to(tl.int64)
    ts = tl.arange(0, SIZE)[:, None]
    offs = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = (ts < count) & (offs < channels)
    # Places are relative to the chunk: 32 bits are enough for them.
    x += first * x_stride
    out += first * channels
    row_begin = (begin - first).to(tl.int32)
    total = tl.zeros((SIZE, BLOCK), dtype=tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + offs, mask=offs < channels, other=0.0).to(tl.float32)
    for tap in tl.static_range(WIDTH):
        places = ts - (WIDTH - 1) + tap
        here = _inputs(x, places, x_stride, offs, channels, mask & (places >= row_begin), GATED)
        total += here * tl.load(weight + offs * WIDTH + tap, mask=offs < channels, other=0.0).to(tl.float32)
    if (first == begin) & (source >= 0):
        for tap in tl.static_range(WIDTH - 1):
            places = ts - (WIDTH - 1) + tap
            before = states + source * slot_stride + offs * (WIDTH - 1) + (places + WIDTH - 1)
            earlier = tl.load(before, mask=mask & (places < 0), other=0.0).to(tl.float32)
            total += earlier * tl.load(weight + offs * WIDTH + tap, mask=offs < channels, other=0.0).to(tl.float32)
    result = _outputs(total, x, ts, x_stride, offs, channels, mask, GATED)
    tl.store(out + ts * channels + offs, result.to(out.dtype.element_ty), mask=mask)


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
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes a row's states with one program per block of channels. The last store may overwrite the state before."""
    offs = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[:, None]
    taps = tl.arange(0, ALL_TAPS)[None, :]
    mask = (offs < channels) & (taps < TAPS)
    row = rows + tl.program_id(0) * 8
    begin = tl.load(row).to(tl.int64)
    source = tl.load(row + 1).to(tl.int64)
    store = tl.load(row + 5)
    for number in range(store, store + tl.load(row + 6)):
        places = begin + tl.load(stores + number * 2) - TAPS + taps
        slot = tl.load(stores + number * 2 + 1).to(tl.int64)
        here = _inputs(x, places, x_stride, offs, channels, mask & (places >= begin), GATED)
        before = states + source * slot_stride + offs * TAPS + (places - begin + TAPS)
        earlier = tl.load(before, mask=mask & (places < begin) & (source >= 0), other=0.0)
        tl.debug_barrier()  # every tap is read before one is overwritten
        value = (here + earlier.to(tl.float32)).to(states.dtype.element_ty)
        tl.store(states + slot * slot_stride + offs * TAPS + taps, value, mask=mask)


def causal_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    tables: PassTables,
    epilogue: Epilogue,
) -> torch.Tensor:
    """Returns the convolution of x [tokens, channels] with its epilogue, and updates states in place.

    The channels of x are contiguous, three times as many with the epilogue "gates". `weight` is [channels, 1, width].
    `states` [slots, channels, width - 1] has dense slots, in the dtype of x.
    """
    channels, width = weight.shape[0], weight.shape[-1]
    out = tables.outputs(x.shape[0], channels, x)
    parameters = weight, weight if bias is None else bias
    constants = {"WIDTH": width, "HAS_BIAS": bias is not None, "GATED": epilogue == "gates"}
    memory = states, states.stride(0)
    if len(tables.steps):
        _convolve_steps[(len(tables.steps), cdiv(channels, _STEP_CHANNELS))](
            x,
            x.stride(0),
            *parameters,
            *memory,
            tables.steps,
            tables.padding_slot,
            out,
            channels,
            TOKENS=tables.step_tokens,
            **constants,
            BLOCK=_STEP_CHANNELS,
            num_warps=4,
        )
    if len(tables.rows):
        _convolve_chunks[(len(tables.chunks), cdiv(channels, _CHUNK_CHANNELS))](
            x,
            x.stride(0),
            *parameters,
            *memory,
            tables.rows,
            tables.chunks,
            out,
            channels,
            **constants,
            SIZE=CHUNK_SIZE,
            BLOCK=_CHUNK_CHANNELS,
            num_warps=4,
        )
        if width > 1:
            _store_states[(len(tables.rows), cdiv(channels, _STORE_CHANNELS))](
                x,
                x.stride(0),
                *memory,
                tables.rows,
                tables.stores,
                channels,
                TAPS=width - 1,
                ALL_TAPS=next_power_of_2(width - 1),
                GATED=epilogue == "gates",
                BLOCK=_STORE_CHANNELS,
                num_warps=4,
            )
    return out
