"""Computes what the chunks of a gated delta net need and does not depend on its state, for all chunks at once.

Within a chunk the updates of the gated delta rule depend on each other by a triangular system, whose solution is its WY
representation (Yang et al. 2024, DeltaNet, arXiv 2406.06484, section 3): new values U and what they lose by the state,
W. Attention within the chunk is computed here, too. Keys and queries are operands of products as they are; the factors
that normalise them are part of the other operand.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.recurrence.gates import decay_of
from mini_infer_engine.kernels.recurrence.pass_tables import CHUNK_SIZE, PassTables
from mini_infer_engine.kernels.sizes import next_power_of_2

_MOST_REGISTERS = 168
"""Registers of a thread with which three programs of four warps fit an SM."""


@dataclass(frozen=True, slots=True)
class PreparedChunks:
    """The WY representation and the attention of all chunks. Rows of tokens outside chunks are not written."""

    values: torch.Tensor  # [tokens, heads, value_dim], U in the dtype of the model
    corrections: torch.Tensor  # [tokens, heads, key_dim], W in the dtype of the model
    attention: torch.Tensor  # [chunks, heads, CHUNK_SIZE, CHUNK_SIZE] in the dtype of the model
    kept: torch.Tensor  # [heads, tokens] fp32, what scales a token's key in the state after its chunk
    query_factors: torch.Tensor  # [heads, tokens] fp32, what scales a token's query where it meets the state
    decays: torch.Tensor  # [chunks, heads] fp32, of a whole chunk


@triton.jit
def _inverse(system, SIZE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """Returns the inverse of I plus a matrix that is zero on and above the diagonal.

    Blocks on the diagonal are inverted by forward substitution, right-looking: once a row is complete, it is taken from
    all rows below it, and no thread needs what another warp has. I plus the matrix times the inverse of these blocks is
    I less a matrix E of which the power SIZE / BLOCK = 4 is zero: (I + E) (I + E^2) inverts it.
    """
    number: tl.constexpr = SIZE // BLOCK
    wide = tl.reshape(system, (number, BLOCK, number, BLOCK))
    of_row = tl.arange(0, number)[:, None, None, None]
    of_column = tl.arange(0, number)[None, None, :, None]
    blocks = tl.sum(tl.where(of_row == of_column, wide, 0.0), axis=2)
    rest = tl.reshape(tl.where(of_row == of_column, 0.0, wide), (SIZE, SIZE))
    rows = tl.arange(0, BLOCK)[None, :, None]
    columns = tl.arange(0, BLOCK)[None, None, :]
    small = tl.where(rows == columns, 1.0, 0.0) + tl.zeros_like(blocks)
    for place in tl.static_range(BLOCK - 1):
        factors = tl.sum(tl.where(columns == place, blocks, 0.0), axis=2, keep_dims=True)
        small -= factors * tl.sum(tl.where(rows == place, small, 0.0), axis=1, keep_dims=True)
    inverse = tl.reshape(tl.where(of_row == of_column, small[:, :, None, :], 0.0), (SIZE, SIZE))
    rest = -tl.dot(rest, inverse, input_precision=PRECISION)
    inverse += tl.dot(inverse, rest, input_precision=PRECISION)
    rest = tl.dot(rest, rest, input_precision=PRECISION)
    return inverse + tl.dot(inverse, rest, input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_tokens"])
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
    attention,
    kept,
    query_factors,
    chunk_decays,
    num_tokens,
    HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Solves the system of one head of a chunk with one program per (head, chunk).

    Heads come first, so that those of the same key head run at the same time.
    """
    head = tl.program_id(0)
    number = tl.program_id(1)
    first = tl.load(chunks + number * 4).to(tl.int64)
    count = tl.load(chunks + number * 4 + 1)
    if count == 0:
        return
    ts = tl.arange(0, SIZE)
    ks = tl.arange(0, BLOCK_K)
    is_token = ts < count
    is_key = is_token[:, None] & (ks[None, :] < KEY_DIM)
    dtype = mixed.dtype.element_ty
    at = mixed + first * mixed_stride
    offs = ts[:, None] * mixed_stride
    query_at = at + (head // REPEATS) * KEY_DIM
    key_at = query_at + (HEADS // REPEATS) * KEY_DIM
    value_at = at + 2 * (HEADS // REPEATS) * KEY_DIM + head * VALUE_DIM
    key = tl.load(key_at + offs + ks[None, :], mask=is_key, other=0.0)
    query = tl.load(query_at + offs + ks[None, :], mask=is_key, other=0.0)
    weights_at = first * weights_stride + ts * weights_stride + head
    decay = tl.load(decays + weights_at, mask=is_token, other=0.0)
    strength = tl.load(strengths + weights_at, mask=is_token, other=0.0).to(tl.float32)
    strength = tl.where(is_token, tl.sigmoid(strength), 0.0)
    decay = tl.where(is_token, decay_of(decay, tl.load(a_log + head), tl.load(dt_bias + head)), 0.0)
    total = tl.cumsum(decay, axis=0)
    last = tl.sum(decay, axis=0)
    wide = key.to(tl.float32)
    key_scale = tl.rsqrt(tl.sum(wide * wide, axis=1) + 1e-6)
    wide = query.to(tl.float32)
    query_scale = tl.rsqrt(tl.sum(wide * wide, axis=1) + 1e-6) * (KEY_DIM**-0.5)

    is_seen = ts[:, None] >= ts[None, :]
    between = tl.exp(tl.where(is_seen, total[:, None] - total[None, :], 0.0)) * key_scale[None, :]
    weights = tl.dot(query, tl.trans(key), input_precision="tf32x3") * between * query_scale[:, None]
    part = (number * HEADS + head).to(tl.int64)
    attention_at = attention + part * (SIZE * SIZE) + ts[:, None] * SIZE + ts[None, :]
    tl.store(attention_at, tl.where(is_seen, weights, 0.0).to(dtype))
    system = tl.dot(key, tl.trans(key), input_precision="tf32x3") * between * (strength * key_scale)[:, None]
    inverse = _inverse(tl.where(ts[:, None] > ts[None, :], system, 0.0), SIZE, SIZE // 4, PRECISION)

    # Half of the columns at a time: there are no registers for all of them.
    row = first * HEADS + head
    by_value = (inverse * strength[None, :]).to(dtype)
    for half in tl.static_range(2):
        vs = half * (BLOCK_V // 2) + tl.arange(0, BLOCK_V // 2)
        mask = is_token[:, None] & (vs[None, :] < VALUE_DIM)
        value = tl.load(value_at + offs + vs[None, :], mask=mask, other=0.0)
        value = tl.dot(by_value, value, input_precision="tf32x3").to(dtype)
        tl.store(values + row * VALUE_DIM + ts[:, None] * (HEADS * VALUE_DIM) + vs[None, :], value, mask=mask)
    by_key = (inverse * (strength * key_scale * tl.exp(total))[None, :]).to(dtype)
    for half in tl.static_range(2):
        hs = half * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
        mask = is_token[:, None] & (hs[None, :] < KEY_DIM)
        correction = tl.load(key_at + offs + hs[None, :], mask=mask, other=0.0)
        correction = tl.dot(by_key, correction, input_precision="tf32x3").to(dtype)
        tl.store(corrections + row * KEY_DIM + ts[:, None] * (HEADS * KEY_DIM) + hs[None, :], correction, mask=mask)
    place = head * num_tokens + first + ts
    tl.store(kept + place, tl.exp(last - total) * key_scale, mask=is_token)
    tl.store(query_factors + place, tl.exp(total) * query_scale, mask=is_token)
    tl.store(chunk_decays + part, tl.exp(last))


def prepare_gated_delta(
    mixed: torch.Tensor,
    strengths: torch.Tensor,
    decays: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    key_dim: int,
    value_dim: int,
    tables: PassTables,
) -> PreparedChunks:
    """Returns what `gated_delta_scan` needs beside queries and keys. The inputs are those of `gated_delta_step`."""
    tokens, heads = decays.shape
    chunks = len(tables.chunks)
    key_heads = (mixed.shape[1] - heads * value_dim) // (2 * key_dim)
    values, corrections = (mixed.new_empty((tokens, heads, size)) for size in (value_dim, key_dim))
    attention = mixed.new_empty((chunks, heads, CHUNK_SIZE, CHUNK_SIZE))
    kept, query_factors = torch.empty((2, heads, tokens), dtype=torch.float32, device=mixed.device).unbind()
    chunk_decays = torch.empty((chunks, heads), dtype=torch.float32, device=mixed.device)
    is_exact = mixed.dtype == torch.float32
    _prepare_gated_delta[(heads, chunks)](
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
        attention,
        kept,
        query_factors,
        chunk_decays,
        tokens,
        HEADS=heads,
        REPEATS=heads // key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        SIZE=CHUNK_SIZE,
        BLOCK_K=max(32, next_power_of_2(key_dim)),
        BLOCK_V=max(32, next_power_of_2(value_dim)),
        PRECISION="tf32x3" if is_exact else "tf32",  # bf16 rounds the inverse more than tf32
        num_warps=4,
        maxnreg=None if is_exact else _MOST_REGISTERS,
    )
    return PreparedChunks(values, corrections, attention, kept, query_factors, chunk_decays)
