"""Carries the states of Mamba-2 blocks from chunk to chunk of each row: the part of a scan that is sequential.

The form is that of Mamba-2 (Dao and Gu 2024, state space duality, arXiv 2405.21060, section 6) and of
flash-linear-attention (https://github.com/fla-org/flash-linear-attention).
"""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.recurrence.pass_tables import CHUNK_SIZE, PassTables
from mini_infer_engine.kernels.sizes import cdiv, next_power_of_2

_LEAST = 16
"""The least width of a tensor core's tile."""
_MOST_VALUES = 32


@triton.jit
def _chunk_states(
    keys,
    keys_stride,
    values,
    values_stride,
    factors,
    totals,
    rows,
    chunks,
    states,
    slot_stride,
    before,
    heads,
    REPEATS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Follows some columns of the state of one head through a row, one program per (row, head, block of columns)."""
    row = rows + tl.program_id(0) * 8
    source = tl.load(row + 1).to(tl.int64)
    target = tl.load(row + 2).to(tl.int64)
    first_chunk = tl.load(row + 3)
    num_chunks = tl.load(row + 4)
    if num_chunks == 0:
        return
    head = tl.program_id(1)
    ts = tl.arange(0, SIZE)
    ks = tl.arange(0, BLOCK_K)
    vs = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_state = (ks[:, None] < KEY_DIM) & (vs[None, :] < VALUE_DIM)
    inner = ks[:, None] * VALUE_DIM + vs[None, :]
    offs = head * (KEY_DIM * VALUE_DIM) + inner
    state = tl.load(states + source * slot_stride + offs, mask=in_state & (source >= 0), other=0.0)
    dtype = keys.dtype.element_ty
    for number in range(first_chunk, first_chunk + num_chunks):
        chunk = chunks + number * 4
        first = tl.load(chunk).to(tl.int64)
        count = tl.load(chunk + 1)
        checkpoint = tl.load(chunk + 3).to(tl.int64)
        is_token = ts < count
        tokens = first + ts
        is_value = is_token[:, None] & (vs[None, :] < VALUE_DIM)
        narrow = state.to(dtype)
        part = (number * heads + head).to(tl.int64)
        tl.store(before + part * (KEY_DIM * VALUE_DIM) + inner, narrow, mask=in_state)
        key_at = keys + tokens[None, :] * keys_stride + (head // REPEATS) * KEY_DIM + ks[:, None]
        key = tl.load(key_at, mask=is_token[None, :] & (ks[:, None] < KEY_DIM), other=0.0)
        at = tokens * heads + head
        value_at = values + tokens[:, None] * values_stride + head * VALUE_DIM + vs[None, :]
        added = tl.load(value_at, mask=is_value, other=0.0).to(tl.float32)
        added *= tl.load(factors + at, mask=is_token, other=0.0)[:, None]
        total = tl.load(totals + at, mask=is_token, other=0.0)
        last = tl.load(totals + (first + count - 1) * heads + head)
        kept = tl.where(is_token, tl.exp(last - total), 0.0)
        state = state * tl.exp(last) + tl.dot(key, (added * kept[:, None]).to(dtype), input_precision="tf32x3")
        if checkpoint >= 0:
            tl.store(states + checkpoint * slot_stride + offs, state, mask=in_state)
    tl.store(states + target * slot_stride + offs, state, mask=in_state)


def chunk_states(
    keys: torch.Tensor,
    values: torch.Tensor,
    factors: torch.Tensor,
    totals: torch.Tensor,
    states: torch.Tensor,
    tables: PassTables,
) -> torch.Tensor:
    """Returns the state before each chunk [chunks, heads, key_dim, value_dim] in the dtype of keys; updates states in
    place.

    `keys` [tokens, key_heads * key_dim] and `values` [tokens, heads * value_dim] may be parts of wider rows. `factors`
    of values and `totals`, the logarithms of decays added up within chunks, are [tokens, heads] fp32. `states` [slots,
    heads, key_dim, value_dim] fp32 has dense slots.
    """
    _, heads, key_dim, value_dim = states.shape
    before = torch.empty((len(tables.chunks), heads, key_dim, value_dim), dtype=keys.dtype, device=keys.device)
    block = min(max(_LEAST, next_power_of_2(value_dim)), _MOST_VALUES)
    _chunk_states[(len(tables.rows), heads, cdiv(value_dim, block))](
        keys,
        keys.stride(0),
        values,
        values.stride(0),
        factors,
        totals,
        tables.rows,
        tables.chunks,
        states,
        states.stride(0),
        before,
        heads,
        REPEATS=heads * key_dim // keys.shape[1],
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        SIZE=CHUNK_SIZE,
        BLOCK_K=max(_LEAST, next_power_of_2(key_dim)),
        BLOCK_V=block,
        num_warps=4,
        num_stages=2,
    )
    return before
