"""Updates the states of Mamba-2 blocks (Dao and Gu 2024, arXiv 2405.21060) by one token, or a few, in each of several
sequences.

A head's state S maps B to inputs: S <- a S + B (dt x)^T; the output is S^T C + D x.
"""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.recurrence.gates import time_step_of
from mini_infer_engine.kernels.recurrence.pass_tables import MOST_PROGRAMS, PassTables
from mini_infer_engine.kernels.sizes import cdiv, next_power_of_2

_MOST_VALUES = 32
"""Columns of the state in one program: with 128 rows they are 32 registers of each thread."""


@triton.jit(do_not_specialize=["num_steps", "padding_slot"])
def _state_space_step(
    mixed,
    mixed_stride,
    time_steps,
    time_steps_stride,
    a_log,
    d,
    dt_bias,
    least,
    most,
    states,
    slot_stride,
    steps,
    num_steps,
    padding_slot,
    out,
    heads,
    TOKENS: tl.constexpr,
    REPEATS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Updates some columns of the state of one head with one program per (some steps, head, block of columns)."""
    head = tl.program_id(1)
    ks = tl.arange(0, BLOCK_K)
    vs = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_value = vs < VALUE_DIM
    for number in range(tl.program_id(0), num_steps, tl.num_programs(0)):
        line = steps + number * 4
        token = tl.load(line).to(tl.int64)
        source = tl.load(line + 1).to(tl.int64)
        target = tl.load(line + 2).to(tl.int64)
        checkpoint = tl.load(line + 3).to(tl.int64)
        if target == padding_slot:
            for _ in range(TOKENS):
                place = out + (token * heads + head) * VALUE_DIM + vs
                tl.store(place, tl.zeros((BLOCK_V,), tl.float32).to(out.dtype.element_ty), mask=in_value & (token >= 0))
                token += 1
        else:
            groups = heads // REPEATS
            offs = head * (KEY_DIM * VALUE_DIM) + ks[:, None] * VALUE_DIM + vs[None, :]
            mask = (ks[:, None] < KEY_DIM) & in_value[None, :]
            state = tl.load(states + source * slot_stride + offs, mask=mask & (source >= 0), other=0.0)
            for done in range(1, TOKENS + 1):
                at = mixed + token * mixed_stride
                x = tl.load(at + head * VALUE_DIM + vs, mask=in_value, other=0.0).to(tl.float32)
                key_at = at + heads * VALUE_DIM + (head // REPEATS) * KEY_DIM + ks
                key = tl.load(key_at, mask=ks < KEY_DIM, other=0.0).to(tl.float32)
                query = tl.load(key_at + groups * KEY_DIM, mask=ks < KEY_DIM, other=0.0).to(tl.float32)
                step = tl.load(time_steps + token * time_steps_stride + head)
                step = time_step_of(step, tl.load(dt_bias + head), least, most)
                decay = tl.exp(-tl.exp(tl.load(a_log + head)) * step)
                state = state * decay + key[:, None] * (x * step)[None, :]
                after = tl.where(done == TOKENS, target, checkpoint + done - 1)
                tl.store(states + after * slot_stride + offs, state, mask=mask)
                if TOKENS == 1 and checkpoint >= 0:
                    tl.store(states + checkpoint * slot_stride + offs, state, mask=mask)
                result = tl.sum(state * query[:, None], axis=0) + tl.load(d + head) * x
                place = out + (token * heads + head) * VALUE_DIM + vs
                tl.store(place, result.to(out.dtype.element_ty), mask=in_value)
                token += 1


def state_space_step(
    mixed: torch.Tensor,
    time_steps: torch.Tensor,
    a_log: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    limits: tuple[float, float],
    states: torch.Tensor,
    tables: PassTables,
    out: torch.Tensor,
) -> None:
    """Writes the outputs of the steps of a pass to `out` [tokens, heads * head_dim], and updates states in place.

    `mixed` [tokens, channels] has inputs, B and C side by side, after the convolution. `time_steps` [tokens, heads] are
    those before their softplus, and rows of a wider tensor; `limits` are the least and the most after it. `a_log`, `d`
    and `dt_bias` [heads] are fp32. `states` [slots, heads, state_size, head_dim] fp32 has dense slots.
    """
    _, heads, key_dim, value_dim = states.shape
    groups = (mixed.shape[1] - heads * value_dim) // (2 * key_dim)
    block = min(next_power_of_2(value_dim), _MOST_VALUES)
    _state_space_step[(min(len(tables.steps), MOST_PROGRAMS), heads, cdiv(value_dim, block))](
        mixed,
        mixed.stride(0),
        time_steps,
        time_steps.stride(0),
        a_log,
        d,
        dt_bias,
        *limits,
        states,
        states.stride(0),
        tables.steps,
        len(tables.steps),
        tables.padding_slot,
        out,
        heads,
        TOKENS=tables.step_tokens,
        REPEATS=heads // groups,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_K=next_power_of_2(key_dim),
        BLOCK_V=block,
        num_warps=4,
    )
