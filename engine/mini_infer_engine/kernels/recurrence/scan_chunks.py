"""Carries the state of a linear recurrence from chunk to chunk of one sequence: the part of a scan that is sequential.

What does not depend on the state has been computed for all chunks at once, in the form of Mamba-2 (Dao and Gu 2024,
state space duality, arXiv 2405.21060, section 6) and of DeltaNet (Yang et al. 2024, arXiv 2406.06484, section 3).
"""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.sizes import cdiv, next_power_of_2

_LEAST = 16
"""The least width of a tensor core's tile."""
_MOST_VALUES = 32


@triton.jit
def _scan_chunks(
    queries,
    within,
    keys,
    kept,
    values,
    corrections,
    states,
    slot_stride,
    slots,
    out,
    num_chunks,
    num_tokens,
    heads,
    SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_CORRECTIONS: tl.constexpr,
):
    """Computes all tokens of some columns of one head's values with one program per (head, block of columns)."""
    head = tl.program_id(0)
    source = tl.load(slots).to(tl.int64)
    target = tl.load(slots + 1).to(tl.int64)
    checkpoint = tl.load(slots + 2).to(tl.int64)
    ts = tl.arange(0, BLOCK_T)
    ks = tl.arange(0, BLOCK_K)
    vs = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key = (ts[:, None] < SIZE) & (ks[None, :] < KEY_DIM)
    is_value = (ts[:, None] < SIZE) & (vs[None, :] < VALUE_DIM)
    is_pair = (ts[:, None] < SIZE) & (ts[None, :] < SIZE)
    key_offs = ts[:, None] * KEY_DIM + ks[None, :]
    value_offs = ts[:, None] * VALUE_DIM + vs[None, :]
    offs = head * (KEY_DIM * VALUE_DIM) + ks[:, None] * VALUE_DIM + vs[None, :]
    in_state = (ks[:, None] < KEY_DIM) & (vs[None, :] < VALUE_DIM)
    state = tl.load(states + source * slot_stride + offs, mask=in_state & (source >= 0), other=0.0)
    for chunk in range(num_chunks):
        part = (chunk * heads + head).to(tl.int64)
        added = tl.load(values + part * (SIZE * VALUE_DIM) + value_offs, mask=is_value, other=0.0)
        if HAS_CORRECTIONS:
            correction = tl.load(corrections + part * (SIZE * KEY_DIM) + key_offs, mask=is_key, other=0.0)
            added -= tl.dot(correction, state, input_precision="tf32x3")
        query = tl.load(queries + part * (SIZE * KEY_DIM) + key_offs, mask=is_key, other=0.0)
        result = tl.dot(query, state, input_precision="tf32x3")
        weights = tl.load(within + part * (SIZE * SIZE) + ts[:, None] * SIZE + ts[None, :], mask=is_pair, other=0.0)
        result += tl.dot(weights, added, input_precision="tf32x3")
        token = chunk * SIZE + ts[:, None]
        place = out + (token.to(tl.int64) * heads + head) * VALUE_DIM + vs[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=is_value & (token < num_tokens))
        key = tl.load(keys + part * (SIZE * KEY_DIM) + key_offs, mask=is_key, other=0.0)
        state = state * tl.load(kept + part) + tl.dot(tl.trans(key), added, input_precision="tf32x3")
    tl.store(states + target * slot_stride + offs, state, mask=in_state)
    if checkpoint >= 0:
        tl.store(states + checkpoint * slot_stride + offs, state, mask=in_state)


def scan_chunks(
    queries: torch.Tensor,
    within: torch.Tensor,
    keys: torch.Tensor,
    kept: torch.Tensor,
    values: torch.Tensor,
    corrections: torch.Tensor | None,
    states: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Writes the outputs of one sequence's tokens to `out` [tokens, heads, value_dim], and its state to slots.

    Inputs are dense and fp32: queries, keys and `corrections` [chunks, heads, size, key_dim], `within` [chunks, heads,
    size, size], `kept` [chunks, heads, 1, 1] and values [chunks, heads, size, value_dim]. `states` [slots, heads,
    key_dim, value_dim] has dense slots.

    slots [4] int32 on the device, of which three are read: the slot of the state before the tokens or -1, that of the
    state after them, and another slot for that or -1. Each `size` compiles a kernel of its own.
    """
    num_chunks, heads, size, key_dim = keys.shape
    value_dim = values.shape[-1]
    block = min(max(_LEAST, next_power_of_2(value_dim)), _MOST_VALUES)
    _scan_chunks[(heads, cdiv(value_dim, block))](
        queries,
        within,
        keys,
        kept,
        values,
        keys if corrections is None else corrections,
        states,
        states.stride(0),
        slots,
        out,
        num_chunks,
        len(out),
        heads,
        SIZE=size,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_T=max(_LEAST, next_power_of_2(size)),
        BLOCK_K=max(_LEAST, next_power_of_2(key_dim)),
        BLOCK_V=block,
        HAS_CORRECTIONS=corrections is not None,
        num_warps=4,
        num_stages=1,  # loads of the next chunk beside a product would take more shared memory than an SM has
    )
