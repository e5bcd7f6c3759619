"""Computes what the chunks of a Mamba-2 block need and does not depend on its state, for all chunks at once."""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.recurrence.gates import time_step_of
from mini_infer_engine.kernels.recurrence.pass_tables import CHUNK_SIZE, PassTables
from mini_infer_engine.kernels.sizes import next_power_of_2


@triton.jit
def _prepare_state_space(
    time_steps,
    time_steps_stride,
    a_log,
    dt_bias,
    least,
    most,
    chunks,
    steps_out,
    totals,
    heads,
    SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Adds up the logarithms of decays of some heads of a chunk with one program per (chunk, block of heads)."""
    chunk = chunks + tl.program_id(0) * 4
    first = tl.load(chunk).to(tl.int64)
    count = tl.load(chunk + 1)
    if count == 0:
        return
    ts = tl.arange(0, SIZE)[:, None]
    hs = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[None, :]
    in_heads = hs < heads
    mask = (ts < count) & in_heads
    bias = tl.load(dt_bias + hs, mask=in_heads, other=0.0)
    rate = tl.exp(tl.load(a_log + hs, mask=in_heads, other=0.0))
    raw = tl.load(time_steps + (first + ts) * time_steps_stride + hs, mask=mask, other=0.0)
    step = tl.where(mask, time_step_of(raw, bias, least, most), 0.0)
    tl.store(steps_out + (first + ts) * heads + hs, step, mask=mask)
    tl.store(totals + (first + ts) * heads + hs, tl.cumsum(-rate * step, axis=0), mask=mask)


def prepare_state_space(
    time_steps: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    limits: tuple[float, float],
    tables: PassTables,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns time steps, and the logarithms of a chunk's decays added up to each token, both [tokens, heads] fp32.

    The inputs are those of `state_space_step`. Rows of tokens outside chunks are not written.
    """
    tokens, heads = time_steps.shape
    steps, totals = torch.empty((2, tokens, heads), dtype=torch.float32, device=time_steps.device).unbind()
    block = min(next_power_of_2(heads), 16)
    _prepare_state_space[(len(tables.chunks), -(-heads // block))](
        time_steps,
        time_steps.stride(0),
        a_log,
        dt_bias,
        *limits,
        tables.chunks,
        steps,
        totals,
        heads,
        SIZE=CHUNK_SIZE,
        BLOCK_H=block,
        num_warps=4,
    )
    return steps, totals
