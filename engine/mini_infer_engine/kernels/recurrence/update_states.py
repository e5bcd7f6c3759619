"""Updates the states of linear recurrences by one token in each of several sequences, in their slots.

A head's state S maps keys to values: S <- a S + k v^T in the state space of Mamba-2 (Dao and Gu 2024, arXiv
2405.21060), S <- a S + b k (v - (a S)^T k)^T by the gated delta rule (Yang et al. 2024, arXiv 2412.06464). The output
is S^T q.
"""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.sizes import cdiv, next_power_of_2

_MOST_VALUES = 32
"""Columns of the state in one program: with 128 rows they are 32 registers of each thread."""


@triton.jit
def _update_states(
    q,
    k,
    v,
    log_decay,
    strength,
    states,
    slot_stride,
    steps,
    out,
    heads,
    REPEATS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    IS_DELTA: tl.constexpr,
):
    """Updates some columns of the state of one head with one program per (sequence, head, block of columns)."""
    line = steps + tl.program_id(0) * 4
    token = tl.load(line).to(tl.int64)
    source = tl.load(line + 1).to(tl.int64)
    target = tl.load(line + 2).to(tl.int64)
    checkpoint = tl.load(line + 3).to(tl.int64)
    head = tl.program_id(1)
    row = token * heads + head
    ks = tl.arange(0, BLOCK_K)
    vs = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    keys = token * (heads // REPEATS) + head // REPEATS
    query = tl.load(q + keys * KEY_DIM + ks, mask=ks < KEY_DIM, other=0.0)
    key = tl.load(k + keys * KEY_DIM + ks, mask=ks < KEY_DIM, other=0.0)
    added = tl.load(v + row * VALUE_DIM + vs, mask=vs < VALUE_DIM, other=0.0)
    offs = head * (KEY_DIM * VALUE_DIM) + ks[:, None] * VALUE_DIM + vs[None, :]
    mask = (ks[:, None] < KEY_DIM) & (vs[None, :] < VALUE_DIM)
    state = tl.load(states + source * slot_stride + offs, mask=mask & (source >= 0), other=0.0)
    state = state * tl.exp(tl.load(log_decay + row))
    if IS_DELTA:
        added = (added - tl.sum(state * key[:, None], axis=0)) * tl.load(strength + row)
    state = state + key[:, None] * added[None, :]
    result = tl.sum(state * query[:, None], axis=0)
    tl.store(out + row * VALUE_DIM + vs, result.to(out.dtype.element_ty), mask=vs < VALUE_DIM)
    tl.store(states + target * slot_stride + offs, state, mask=mask)
    if checkpoint >= 0:
        tl.store(states + checkpoint * slot_stride + offs, state, mask=mask)


def update_states(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    strength: torch.Tensor | None,
    states: torch.Tensor,
    steps: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Writes the outputs of some tokens to `out`, and updates states in place.

    Inputs are dense and fp32: q and k [tokens, key_heads, key_dim], v [tokens, heads, value_dim], log_decay and the
    delta rule's `strength` [tokens, heads]. `states` [slots, heads, key_dim, value_dim] has dense slots. `out` is like
    v in any dtype.

    steps [sequences, 4] int32 on the device: token, slot of the state before it or -1, slot of the state after it,
    another slot for that or -1. No target is another step's source.
    """
    heads, value_dim = v.shape[1:]
    key_heads, key_dim = k.shape[1:]
    block = min(next_power_of_2(value_dim), _MOST_VALUES)
    _update_states[(len(steps), heads, cdiv(value_dim, block))](
        q,
        k,
        v,
        log_decay,
        log_decay if strength is None else strength,
        states,
        states.stride(0),
        steps,
        out,
        heads,
        REPEATS=heads // key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_K=next_power_of_2(key_dim),
        BLOCK_V=block,
        IS_DELTA=strength is not None,
        num_warps=4,
    )
