"""Updates the states of gated delta nets by one token, or a few, in each of several sequences, in their slots.

A head's state S maps keys to values: S <- a S + b k (v - (a S)^T k)^T (Yang et al. 2024, Gated DeltaNet, arXiv
2412.06464); the output S^T q is normalised and gated in the same kernel. Columns of S do not depend on each other, so
several programs share a head: the one that arrives last normalises it.
"""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.recurrence.gated_delta_config import StepConfig
from mini_infer_engine.kernels.recurrence.gates import decay_of, gated_norm
from mini_infer_engine.kernels.recurrence.pass_tables import PassTables
from mini_infer_engine.kernels.sizes import cdiv, next_power_of_2
from mini_infer_engine.kernels.workspace import Workspace


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _add_triples(a, b, c, d, e, f):
    return a + d, b + e, c + f


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
    counters,
    out,
    heads,
    TOKENS: tl.constexpr,
    REPEATS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ALL_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """Updates some columns of the state of one head with one program per (head and block of columns, some steps).

    All loads of a token come before its sums, for which the threads of a program wait for each other. Sums over the
    state before the token give both what the key retrieves and the output: S^T q is a S^T q + (k^T q) u for the new
    value u. Keys and queries are normalised by factors of these sums.
    """
    blocks: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(0) // blocks
    ks = tl.arange(0, BLOCK_K)
    vs = (tl.program_id(0) % blocks) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_key = ks < KEY_DIM
    in_value = vs < VALUE_DIM
    dtype: tl.constexpr = out.dtype.element_ty
    rate = tl.load(a_log + head)
    bias = tl.load(dt_bias + head)
    weight = tl.load(norm_weight + vs, mask=in_value, other=0.0)
    for number in range(tl.program_id(1), num_steps, tl.num_programs(1)):
        line = steps + number * 4
        token = tl.load(line).to(tl.int64)
        source = tl.load(line + 1).to(tl.int64)
        target = tl.load(line + 2).to(tl.int64)
        checkpoint = tl.load(line + 3).to(tl.int64)
        if target == padding_slot:
            if PDL:
                tl.extra.cuda.gdc_wait()
            for _ in range(TOKENS):
                place = out + (token * heads + head) * VALUE_DIM + vs
                tl.store(place, tl.zeros((BLOCK_V,), tl.float32).to(dtype), mask=in_value & (token >= 0))
                token += 1
        else:
            first = token
            key_width = (heads // REPEATS) * KEY_DIM
            offs = head * (KEY_DIM * VALUE_DIM) + ks[:, None] * VALUE_DIM + vs[None, :]
            mask = in_key[:, None] & in_value[None, :]
            state = tl.load(states + source * slot_stride + offs, mask=mask & (source >= 0), other=0.0)
            if PDL:
                tl.extra.cuda.gdc_wait()
            for done in range(1, TOKENS + 1):
                at = mixed + token * mixed_stride
                key_at = at + (head // REPEATS) * KEY_DIM + ks
                query = tl.load(key_at, mask=in_key, other=0.0).to(tl.float32)
                key = tl.load(key_at + key_width, mask=in_key, other=0.0).to(tl.float32)
                value = tl.load(at + 2 * key_width + head * VALUE_DIM + vs, mask=in_value, other=0.0).to(tl.float32)
                gate_at = gates + token * gates_stride + head * VALUE_DIM + vs
                gate = tl.load(gate_at, mask=in_value & (blocks == 1), other=0.0)
                weights_at = token * weights_stride + head
                decay = tl.exp(decay_of(tl.load(decays + weights_at), rate, bias))
                strength = tl.sigmoid(tl.load(strengths + weights_at).to(tl.float32))
                of_key, of_query, of_both = tl.reduce((key * key, query * query, key * query), 0, _add_triples)
                by_key, by_query = tl.reduce((state * key[:, None], state * query[:, None]), 0, _add_pairs)
                key_scale = tl.rsqrt(of_key + 1e-6)
                query_scale = tl.rsqrt(of_query + 1e-6) * (KEY_DIM**-0.5)
                added = (value - by_key * (decay * key_scale)) * strength
                state = state * decay + (key * key_scale)[:, None] * added[None, :]
                after = tl.where(done == TOKENS, target, checkpoint + done - 1)
                tl.store(states + after * slot_stride + offs, state, mask=mask)
                if TOKENS == 1 and checkpoint >= 0:
                    tl.store(states + checkpoint * slot_stride + offs, state, mask=mask)
                result = (by_query * decay + added * (of_both * key_scale)) * query_scale
                if blocks == 1:
                    result = gated_norm(result[None, :], gate[None, :], weight[None, :], eps, VALUE_DIM, dtype)
                    result = tl.reshape(result, (BLOCK_V,))
                tl.store(out + (token * heads + head) * VALUE_DIM + vs, result.to(dtype), mask=in_value)
                token += 1
            if blocks > 1:
                tl.debug_barrier()
                counter = counters + number * heads + head
                if tl.atomic_add(counter, 1, sem="acq_rel") == blocks - 1:
                    every_v = tl.arange(0, ALL_V)[None, :]
                    inside = every_v < VALUE_DIM
                    whole_weight = tl.load(norm_weight + every_v, mask=inside, other=0.0)
                    for _ in range(TOKENS):
                        gate_at = gates + first * gates_stride + head * VALUE_DIM + every_v
                        whole_gate = tl.load(gate_at, mask=inside, other=0.0)
                        place = out + (first * heads + head) * VALUE_DIM + every_v
                        whole = tl.load(place, mask=inside, other=0.0, cache_modifier=".cg")
                        whole = gated_norm(whole, whole_gate, whole_weight, eps, VALUE_DIM, dtype)
                        tl.store(place, whole, mask=inside)
                        first += 1
                    tl.store(counter, 0)


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
    config: StepConfig,
    workspace: Workspace,
) -> None:
    """Writes the normed and gated outputs of the steps of a pass to `out`, and updates states in place.

    `mixed` [tokens, channels] has queries, keys and values side by side, after the convolution. `gates` [tokens, heads
    * value_dim], and strengths and decays [tokens, heads] before their sigmoid and softplus, are parts of wider rows,
    the latter two of the same ones. `a_log` and `dt_bias` [heads] are fp32. `states` [slots, heads, key_dim, value_dim]
    fp32 has dense slots. `out` [tokens, heads * value_dim] is dense. With `config.pdl` the kernel before must neither
    write states nor launch this one before all kernels ahead of it have ended.
    """
    _, heads, key_dim, value_dim = states.shape
    key_heads = (mixed.shape[1] - heads * value_dim) // (2 * key_dim)
    all_values = next_power_of_2(value_dim)
    block = min(config.block_values, all_values)
    _gated_delta_step[(cdiv(value_dim, block) * heads, min(len(tables.steps), config.programs))](
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
        workspace.counters,
        out,
        heads,
        TOKENS=tables.step_tokens,
        REPEATS=heads // key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_K=next_power_of_2(key_dim),
        BLOCK_V=block,
        ALL_V=all_values,
        PDL=config.pdl,
        num_warps=config.warps,
        launch_pdl=config.pdl,
    )
