"""Computes the outputs of Mamba-2 blocks for all chunks at once, from the states before them.

The form is that of Mamba-2 (Dao and Gu 2024, state space duality, arXiv 2405.21060, section 6) and of
flash-linear-attention (https://github.com/fla-org/flash-linear-attention). The product with D is part of the kernel.
"""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.recurrence.pass_tables import CHUNK_SIZE, PassTables
from mini_infer_engine.kernels.sizes import next_power_of_2


@triton.jit
def _chunk_outputs(
    queries,
    keys,
    keys_stride,
    values,
    values_stride,
    factors,
    totals,
    before,
    chunks,
    d,
    out,
    heads,
    REPEATS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Computes the tokens of one head of a chunk with one program per (chunk, head)."""
    number = tl.program_id(0)
    first = tl.load(chunks + number * 4).to(tl.int64)
    count = tl.load(chunks + number * 4 + 1)
    if count == 0:
        return
    head = tl.program_id(1)
    ts = tl.arange(0, SIZE)
    ks = tl.arange(0, BLOCK_K)
    vs = tl.arange(0, BLOCK_V)
    is_token = ts < count
    tokens = first + ts
    is_value = is_token[:, None] & (vs[None, :] < VALUE_DIM)
    dtype = queries.dtype.element_ty
    inner = tokens * keys_stride + (head // REPEATS) * KEY_DIM
    query = tl.load(queries + inner[:, None] + ks[None, :], mask=is_token[:, None] & (ks[None, :] < KEY_DIM), other=0.0)
    key = tl.load(keys + inner[None, :] + ks[:, None], mask=is_token[None, :] & (ks[:, None] < KEY_DIM), other=0.0)
    at = tokens * heads + head
    total = tl.load(totals + at, mask=is_token, other=0.0)
    part = (number * heads + head).to(tl.int64) * (KEY_DIM * VALUE_DIM)
    in_state = (ks[:, None] < KEY_DIM) & (vs[None, :] < VALUE_DIM)
    state = tl.load(before + part + ks[:, None] * VALUE_DIM + vs[None, :], mask=in_state, other=0.0)
    result = tl.dot(query, state, input_precision="tf32x3") * tl.exp(total)[:, None]
    weights = tl.dot(query, key, input_precision="tf32x3")
    is_seen = (ts[:, None] >= ts[None, :]) & is_token[:, None]
    weights = tl.where(is_seen, weights * tl.exp(tl.where(is_seen, total[:, None] - total[None, :], 0.0)), 0.0)
    value_at = values + tokens[:, None] * values_stride + head * VALUE_DIM + vs[None, :]
    value = tl.load(value_at, mask=is_value, other=0.0)
    added = (value.to(tl.float32) * tl.load(factors + at, mask=is_token, other=0.0)[:, None]).to(dtype)
    result += tl.dot(weights.to(dtype), added, input_precision="tf32x3")
    result += value.to(tl.float32) * tl.load(d + head)
    tl.store(out + at[:, None] * VALUE_DIM + vs[None, :], result.to(dtype), mask=is_value)


def state_space_outputs(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    factors: torch.Tensor,
    totals: torch.Tensor,
    before: torch.Tensor,
    d: torch.Tensor,
    tables: PassTables,
    out: torch.Tensor,
) -> None:
    """Writes the outputs of all chunks to `out` [tokens, heads * head_dim].

    `queries`, `keys` and `values` are C, B and inputs, parts of the rows of one tensor. The other tensors are those of
    `chunk_states`, and D [heads] fp32.
    """
    _, heads, key_dim, value_dim = before.shape
    _chunk_outputs[(len(tables.chunks), heads)](
        queries,
        keys,
        keys.stride(0),
        values,
        values.stride(0),
        factors,
        totals,
        before,
        tables.chunks,
        d,
        out,
        heads,
        REPEATS=heads * key_dim // keys.shape[1],
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        SIZE=CHUNK_SIZE,
        BLOCK_K=max(16, next_power_of_2(key_dim)),
        BLOCK_V=max(16, next_power_of_2(value_dim)),
        num_warps=4,
        num_stages=1,
    )
