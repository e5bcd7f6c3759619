"""Computes what the chunks of a linear recurrence need and does not depend on its state, for all chunks at once.

Within a chunk the updates of the gated delta rule depend on each other by a triangular system, whose solution is its WY
representation (Yang et al. 2024, DeltaNet, arXiv 2406.06484, section 3); the form is that of flash-linear-attention
(https://github.com/fla-org/flash-linear-attention).
"""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.recurrence.gates import decay_of, normalised_rows, time_step_of
from mini_infer_engine.kernels.recurrence.pass_tables import CHUNK_SIZE, PassTables
from mini_infer_engine.kernels.sizes import next_power_of_2


@triton.jit
def _inverse(system, SIZE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """Returns the inverse of I plus a matrix that is zero on and above the diagonal.

    Blocks on the diagonal are inverted by forward substitution, row by row. I plus the matrix times the inverse of
    these blocks is I less a matrix E of which the power SIZE / BLOCK = 4 is zero: (I + E) (I + E^2) inverts it.
    """
    number: tl.constexpr = SIZE // BLOCK
    wide = tl.reshape(system, (number, BLOCK, number, BLOCK))
    of_row = tl.arange(0, number)[:, None, None, None]
    of_column = tl.arange(0, number)[None, None, :, None]
    blocks = tl.sum(tl.where(of_row == of_column, wide, 0.0), axis=2)
    rest = tl.reshape(tl.where(of_row == of_column, 0.0, wide), (SIZE, SIZE))
    rows = tl.arange(0, BLOCK)[None, :, None]
    columns = tl.arange(0, BLOCK)[None, None, :]
    small = tl.broadcast_to(tl.where(rows == columns, 1.0, 0.0), (number, BLOCK, BLOCK))
    for place in range(1, BLOCK):
        row = -tl.sum(tl.where(rows == place, blocks, 0.0), axis=1)
        solved = tl.sum(row[:, :, None] * small, axis=1)
        small = tl.where((rows == place) & (columns < rows), solved[:, None, :], small)
    inverse = tl.reshape(tl.where(of_row == of_column, small[:, :, None, :], 0.0), (SIZE, SIZE))
    rest = -tl.dot(rest, inverse, input_precision=PRECISION)
    inverse += tl.dot(inverse, rest, input_precision=PRECISION)
    rest = tl.dot(rest, rest, input_precision=PRECISION)
    return inverse + tl.dot(inverse, rest, input_precision=PRECISION)


@triton.jit
def _prepare_gated_delta(
    mixed,
    mixed_stride,
    strengths,
    decays,
    weights_stride,
    a_log,
    dt_bias,
    chunks,
    values,
    corrections,
    totals,
    heads,
    REPEATS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Solves the system of one head of a chunk with one program per (chunk, head)."""
    chunk = chunks + tl.program_id(0) * 4
    first = tl.load(chunk).to(tl.int64)
    count = tl.load(chunk + 1)
    if count == 0:
        return
    head = tl.program_id(1)
    ts = tl.arange(0, SIZE)
    ks = tl.arange(0, BLOCK_K)
    vs = tl.arange(0, BLOCK_V)
    is_token = ts < count
    tokens = first + ts
    is_key = is_token[:, None] & (ks[None, :] < KEY_DIM)
    is_value = is_token[:, None] & (vs[None, :] < VALUE_DIM)
    key_width = (heads // REPEATS) * KEY_DIM
    at = mixed + tokens[:, None] * mixed_stride
    key_at = at + key_width + (head // REPEATS) * KEY_DIM + ks[None, :]
    key = normalised_rows(tl.load(key_at, mask=is_key, other=0.0, eviction_policy="evict_last").to(tl.float32), 1)
    weights_at = tokens * weights_stride + head
    decay = decay_of(
        tl.load(decays + weights_at, mask=is_token, other=0.0), tl.load(a_log + head), tl.load(dt_bias + head)
    )
    total = tl.cumsum(tl.where(is_token, decay, 0.0), axis=0)
    strength = tl.sigmoid(tl.load(strengths + weights_at, mask=is_token, other=0.0).to(tl.float32))
    strength = tl.where(is_token, strength, 0.0)
    dtype = mixed.dtype.element_ty
    narrow = key.to(dtype)
    system = tl.dot(narrow, tl.trans(narrow), input_precision="tf32x3")
    is_before = ts[:, None] > ts[None, :]
    between = tl.exp(tl.where(is_before, total[:, None] - total[None, :], 0.0))
    system = tl.where(is_before, system * between * strength[:, None], 0.0)
    inverse = _inverse(system, SIZE, SIZE // 4, PRECISION).to(dtype)
    value = tl.load(at + 2 * key_width + head * VALUE_DIM + vs[None, :], mask=is_value, other=0.0).to(tl.float32)
    value = tl.dot(inverse, (value * strength[:, None]).to(dtype), input_precision="tf32x3")
    # Read once more: beside the inverse there are no registers for keys.
    key = normalised_rows(tl.load(key_at, mask=is_key, other=0.0, eviction_policy="evict_first").to(tl.float32), 1)
    correction = (key * (strength * tl.exp(total))[:, None]).to(dtype)
    correction = tl.dot(inverse, correction, input_precision="tf32x3")
    rows = tokens * heads + head
    tl.store(values + rows[:, None] * VALUE_DIM + vs[None, :], value.to(dtype), mask=is_value)
    tl.store(corrections + rows[:, None] * KEY_DIM + ks[None, :], correction.to(dtype), mask=is_key)
    tl.store(totals + rows, total, mask=is_token)


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


def prepare_gated_delta(
    mixed: torch.Tensor,
    strengths: torch.Tensor,
    decays: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    key_dim: int,
    value_dim: int,
    tables: PassTables,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns each chunk's values if its state were zero, what they lose by its state, and its decays' logarithms added
    up to each token.

    The inputs are those of `gated_delta_step`. Returns values [tokens, heads, value_dim] and corrections [tokens,
    heads, key_dim] in the dtype of `mixed`, and totals [tokens, heads] fp32; rows of tokens outside chunks are not
    written.
    """
    tokens, heads = decays.shape
    key_heads = (mixed.shape[1] - heads * value_dim) // (2 * key_dim)
    values = torch.empty((tokens, heads, value_dim), dtype=mixed.dtype, device=mixed.device)
    corrections = torch.empty((tokens, heads, key_dim), dtype=mixed.dtype, device=mixed.device)
    totals = torch.empty((tokens, heads), dtype=torch.float32, device=mixed.device)
    _prepare_gated_delta[(len(tables.chunks), heads)](
        mixed,
        mixed.stride(0),
        strengths,
        decays,
        decays.stride(0),
        a_log,
        dt_bias,
        tables.chunks,
        values,
        corrections,
        totals,
        heads,
        REPEATS=heads // key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        SIZE=CHUNK_SIZE,
        BLOCK_K=max(16, next_power_of_2(key_dim)),
        BLOCK_V=max(16, next_power_of_2(value_dim)),
        PRECISION="tf32x3" if mixed.dtype == torch.float32 else "tf32",  # bf16 rounds the inverse more than tf32
        num_warps=4,
    )
    return values, corrections, totals


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
