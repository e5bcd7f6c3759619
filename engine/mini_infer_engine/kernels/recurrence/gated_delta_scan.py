"""Carries the states of gated delta nets from chunk to chunk of each row, and computes outputs on the way.

The form is that of Mamba-2 (Dao and Gu 2024, state space duality, arXiv 2405.21060, section 6) with the delta rule
(Yang et al. 2024, Gated DeltaNet, arXiv 2412.06464). A state meets a chunk's queries while it is in registers, so that
states before chunks are not written.
"""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.recurrence.gated_delta_config import ScanConfig
from mini_infer_engine.kernels.recurrence.gated_delta_prepare import PreparedChunks
from mini_infer_engine.kernels.recurrence.gates import gated_norm
from mini_infer_engine.kernels.recurrence.pass_tables import CHUNK_SIZE, PassTables
from mini_infer_engine.kernels.sizes import cdiv, next_power_of_2

_LEAST = 16
"""The least width of a tensor core's tile."""


@triton.jit(do_not_specialize=["num_tokens"])
def _gated_delta_scan(
    queries,
    keys,
    keys_stride,
    values,
    corrections,
    attention,
    kept,
    query_factors,
    chunk_decays,
    rows,
    stores,
    states,
    slot_stride,
    out,
    num_tokens,
    HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Follows some columns of the state of one head through a row with one program per (head and block, row).

    A row's chunks are whole between the places where its state is stored, so that the addresses of the inner loop are
    multiples of its counter, and operands of later chunks are on their way.
    """
    blocks: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(0) // blocks
    row = rows + tl.program_id(1) * 8
    begin = tl.load(row).to(tl.int64)
    source = tl.load(row + 1).to(tl.int64)
    chunk = tl.load(row + 3)
    num_chunks = tl.load(row + 4)
    first_store = tl.load(row + 5)
    num_stores = tl.load(row + 6)
    if num_chunks == 0:
        return
    ts = tl.arange(0, SIZE)
    ks = tl.arange(0, BLOCK_K)
    vs = (tl.program_id(0) % blocks) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_key = ks < KEY_DIM
    in_value = vs < VALUE_DIM
    dtype = keys.dtype.element_ty
    in_state = in_key[:, None] & in_value[None, :]
    offs = head * (KEY_DIM * VALUE_DIM) + ks[:, None] * VALUE_DIM + vs[None, :]
    state = tl.load(states + source * slot_stride + offs, mask=in_state & (source >= 0), other=0.0)
    done = 0
    for place in range(first_store, first_store + num_stores):
        end = tl.load(stores + place * 2)
        slot = tl.load(stores + place * 2 + 1).to(tl.int64)
        for at in tl.range(0, end - done, SIZE, num_stages=STAGES):
            first = begin + done + at
            line = first * HEADS + head
            part = ((chunk + at // SIZE) * HEADS + head).to(tl.int64)
            is_token = ts < end - done - at
            is_key = is_token[:, None] & in_key[None, :]
            is_value = is_token[:, None] & in_value[None, :]
            key_at = first * keys_stride + (head // REPEATS) * KEY_DIM + ts[:, None] * keys_stride + ks[None, :]
            value_at = line * VALUE_DIM + ts[:, None] * (HEADS * VALUE_DIM) + vs[None, :]
            correction_at = line * KEY_DIM + ts[:, None] * (HEADS * KEY_DIM) + ks[None, :]
            correction = tl.load(corrections + correction_at, mask=is_key, other=0.0)
            value = tl.load(values + value_at, mask=is_value, other=0.0)
            key = tl.load(keys + key_at, mask=is_key, other=0.0)
            query = tl.load(queries + key_at, mask=is_key, other=0.0)
            weights = tl.load(attention + part * (SIZE * SIZE) + ts[:, None] * SIZE + ts[None, :])
            factor = tl.load(kept + (head * num_tokens + first) + ts, mask=is_token, other=0.0)
            query_factor = tl.load(query_factors + (head * num_tokens + first) + ts, mask=is_token, other=0.0)
            decay = tl.load(chunk_decays + part)
            narrow = state.to(dtype)
            added = value.to(tl.float32) - tl.dot(correction, narrow, input_precision="tf32x3")
            result = tl.dot(query, narrow, input_precision="tf32x3") * query_factor[:, None]
            scaled = (added * factor[:, None]).to(dtype)
            state = tl.dot(tl.trans(key), scaled, state * decay, input_precision="tf32x3")
            result = tl.dot(weights, added.to(dtype), result, input_precision="tf32x3")
            tl.store(out + value_at, result.to(dtype), mask=is_value)
        chunk += (end - done + SIZE - 1) // SIZE
        done = end
        tl.store(states + slot * slot_stride + offs, state, mask=in_state)


@triton.jit
def _normalise_chunks(
    chunks,
    gates,
    gates_stride,
    norm_weight,
    eps,
    out,
    heads,
    VALUE_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Normalises and gates the outputs of one head of a chunk in place with one program per (head, chunk)."""
    head = tl.program_id(0)
    number = tl.program_id(1)
    first = tl.load(chunks + number * 4).to(tl.int64)
    count = tl.load(chunks + number * 4 + 1)
    ts = tl.arange(0, SIZE)[:, None]
    vs = tl.arange(0, BLOCK_V)[None, :]
    in_value = vs < VALUE_DIM
    mask = (ts < count) & in_value
    gate_at = gates + first * gates_stride + head * VALUE_DIM + ts * gates_stride + vs
    place = out + (first * heads + head) * VALUE_DIM + ts * (heads * VALUE_DIM) + vs
    gate = tl.load(gate_at, mask=mask, other=0.0)
    result = tl.load(place, mask=mask, other=0.0)
    weight = tl.load(norm_weight + vs, mask=in_value, other=0.0)
    tl.store(place, gated_norm(result, gate, weight, eps, VALUE_DIM, out.dtype.element_ty), mask=mask)


def gated_delta_scan(
    queries: torch.Tensor,
    keys: torch.Tensor,
    prepared: PreparedChunks,
    gates: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    states: torch.Tensor,
    tables: PassTables,
    out: torch.Tensor,
    config: ScanConfig,
) -> None:
    """Writes the normed and gated outputs of all chunks to `out` [tokens, heads * value_dim], and updates states in
    place.

    `queries` and `keys` [tokens, key_heads * key_dim] are parts of the rows of one tensor, and not normalised. `gates`
    are like `out`, in rows of a wider tensor. `states` [slots, heads, key_dim, value_dim] fp32 has dense slots.
    """
    _, heads, key_dim, value_dim = states.shape
    all_values = max(_LEAST, next_power_of_2(value_dim))
    block = min(all_values, config.block_values)
    _gated_delta_scan[(heads * cdiv(value_dim, block), len(tables.rows))](
        queries,
        keys,
        keys.stride(0),
        prepared.values,
        prepared.corrections,
        prepared.attention,
        prepared.kept,
        prepared.query_factors,
        prepared.decays,
        tables.rows,
        tables.stores,
        states,
        states.stride(0),
        out,
        prepared.kept.shape[1],
        HEADS=heads,
        REPEATS=heads * key_dim // keys.shape[1],
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        SIZE=CHUNK_SIZE,
        BLOCK_K=max(_LEAST, next_power_of_2(key_dim)),
        BLOCK_V=block,
        STAGES=config.stages,
        num_warps=config.warps,
    )
    _normalise_chunks[(heads, len(tables.chunks))](
        tables.chunks,
        gates,
        gates.stride(0),
        norm_weight,
        eps,
        out,
        heads,
        VALUE_DIM=value_dim,
        SIZE=CHUNK_SIZE,
        BLOCK_V=all_values,
        num_warps=4,
    )
