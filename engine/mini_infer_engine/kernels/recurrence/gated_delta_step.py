"""Updates the states of gated delta nets by one token, or a few, in each of several sequences, in their slots.

A head's state S maps keys to values: S <- a S + b k (v - (a S)^T k)^T (Yang et al. 2024, Gated DeltaNet, arXiv
2412.06464); the output S^T q is normalised and gated in the same kernel.
"""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.recurrence.gates import decay_of, normalised_rows
from mini_infer_engine.kernels.recurrence.pass_tables import MOST_PROGRAMS, PassTables
from mini_infer_engine.kernels.sizes import next_power_of_2


@triton.jit(do_not_specialize=["num_steps", "padding_slot"])
def _gated_delta_step(
    mixed,
    mixed_stride,
    gates,
    gates_stride,
    strengths,
    decays,
    weights_stride,
    a_log,
    dt_bias,
    norm_weight,
    eps,
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
    """Updates the state of one head with one program per (some steps, head)."""
    head = tl.program_id(1)
    ks = tl.arange(0, BLOCK_K)
    vs = tl.arange(0, BLOCK_V)
    in_value = vs < VALUE_DIM
    for number in range(tl.program_id(0), num_steps, tl.num_programs(0)):
        line = steps + number * 4
        token = tl.load(line).to(tl.int64)
        source = tl.load(line + 1).to(tl.int64)
        target = tl.load(line + 2).to(tl.int64)
        checkpoint = tl.load(line + 3).to(tl.int64)
        dtype = out.dtype.element_ty
        if target == padding_slot:
            for _ in range(TOKENS):
                place = out + (token * heads + head) * VALUE_DIM + vs
                tl.store(place, tl.zeros((BLOCK_V,), tl.float32).to(dtype), mask=in_value & (token >= 0))
                token += 1
        else:
            key_width = (heads // REPEATS) * KEY_DIM
            offs = head * (KEY_DIM * VALUE_DIM) + ks[:, None] * VALUE_DIM + vs[None, :]
            mask = (ks[:, None] < KEY_DIM) & (vs[None, :] < VALUE_DIM)
            state = tl.load(states + source * slot_stride + offs, mask=mask & (source >= 0), other=0.0)
            for done in range(1, TOKENS + 1):
                at = mixed + token * mixed_stride
                key_at = at + (head // REPEATS) * KEY_DIM + ks
                query = normalised_rows(tl.load(key_at, mask=ks < KEY_DIM, other=0.0).to(tl.float32), 0)
                query = query * (KEY_DIM**-0.5)
                key = normalised_rows(tl.load(key_at + key_width, mask=ks < KEY_DIM, other=0.0).to(tl.float32), 0)
                value = tl.load(at + 2 * key_width + head * VALUE_DIM + vs, mask=in_value, other=0.0).to(tl.float32)
                at = token * weights_stride + head
                decay = tl.exp(decay_of(tl.load(decays + at), tl.load(a_log + head), tl.load(dt_bias + head)))
                strength = tl.sigmoid(tl.load(strengths + at).to(tl.float32))
                state = state * decay
                added = (value - tl.sum(state * key[:, None], axis=0)) * strength
                state = state + key[:, None] * added[None, :]
                after = tl.where(done == TOKENS, target, checkpoint + done - 1)
                tl.store(states + after * slot_stride + offs, state, mask=mask)
                if TOKENS == 1 and checkpoint >= 0:
                    tl.store(states + checkpoint * slot_stride + offs, state, mask=mask)
                result = tl.sum(state * query[:, None], axis=0).to(dtype).to(tl.float32)
                normed = result * tl.rsqrt(tl.sum(result * result, axis=0) / VALUE_DIM + eps)
                weight = tl.load(norm_weight + vs, mask=in_value, other=0.0).to(tl.float32)
                gate_at = gates + token * gates_stride + head * VALUE_DIM + vs
                gate = tl.load(gate_at, mask=in_value, other=0.0).to(tl.float32)
                normed = (normed.to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
                place = out + (token * heads + head) * VALUE_DIM + vs
                tl.store(place, (normed * gate / (1.0 + tl.exp(-gate))).to(dtype), mask=in_value)
                token += 1


def gated_delta_step(
    mixed: torch.Tensor,
    gates: torch.Tensor,
    strengths: torch.Tensor,
    decays: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    states: torch.Tensor,
    tables: PassTables,
    out: torch.Tensor,
) -> None:
    """Writes the normed and gated outputs of the steps of a pass to `out`, and updates states in place.

    `mixed` [tokens, channels] has queries, keys and values side by side, after the convolution. `gates` [tokens, heads
    * value_dim], and strengths and decays [tokens, heads] before their sigmoid and softplus, are parts of wider rows,
    the latter two of the same ones. `a_log` and `dt_bias` [heads] are fp32. `states` [slots, heads, key_dim, value_dim]
    fp32 has dense slots. `out` [tokens, heads * value_dim] is dense.
    """
    _, heads, key_dim, value_dim = states.shape
    key_heads = (mixed.shape[1] - heads * value_dim) // (2 * key_dim)
    _gated_delta_step[(min(len(tables.steps), MOST_PROGRAMS), heads)](
        mixed,
        mixed.stride(0),
        gates,
        gates.stride(0),
        strengths,
        decays,
        decays.stride(0),
        a_log,
        dt_bias,
        norm_weight,
        eps,
        states,
        states.stride(0),
        tables.steps,
        len(tables.steps),
        tables.padding_slot,
        out,
        heads,
        TOKENS=tables.step_tokens,
        REPEATS=heads // key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_K=next_power_of_2(key_dim),
        BLOCK_V=next_power_of_2(value_dim),
        num_warps=8,
    )
