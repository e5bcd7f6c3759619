"""FlashAttention-2 (Dao, arXiv:2307.08691) over decompressed latents: causal attention of prompt chunks.

Keys and values of all heads are side by side as `kv_b_proj` makes them from latents. Keys lack their rotated part,
which all heads share and which is read beside them. Keys may come in several parts, one call after another: the online
softmax's state of each row is stored in between.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.attention.latent_rope import LatentShape
from mini_infer_engine.kernels.attention.prefill_attention import _find_tile
from mini_infer_engine.kernels.sizes import LOG2_E, cdiv, next_power_of_2


@triton.jit
def _scan(
    query,
    rotated,
    acc,
    l_i,
    m_i,
    kv_head,
    keys,
    first_key,
    last_key,
    end_key,
    positions,
    kv_stride,
    key_stride,
    scale,
    MASKED: tl.constexpr,
    NOPE_DIM: tl.constexpr,
    NOPE_BLOCK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Computes the online softmax over keys [first_key, last_key) of this part. MASKED: not all rows see them all."""
    nope = tl.arange(0, NOPE_BLOCK)[None, :]
    rope = tl.arange(0, ROPE_BLOCK)[None, :]
    value_dims = tl.arange(0, VALUE_BLOCK)[None, :]
    for start in range(first_key, last_key, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        there = (tokens < end_key)[:, None]
        at = kv_head + tokens.to(tl.int64)[:, None] * kv_stride
        if MASKED or NOPE_DIM != NOPE_BLOCK:
            key = tl.load(at + nope, mask=there & (nope < NOPE_DIM), other=0.0)
        else:
            key = tl.load(at + nope)
        shared_at = keys + tokens.to(tl.int64)[:, None] * key_stride + rope
        if MASKED or ROPE_DIM != ROPE_BLOCK:
            shared = tl.load(shared_at, mask=there & (rope < ROPE_DIM), other=0.0)
        else:
            shared = tl.load(shared_at)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        scores = tl.dot(rotated, tl.trans(shared), scores, input_precision=PRECISION)
        if MASKED:
            seen = (tokens[None, :] <= positions[:, None]) & (tokens < end_key)[None, :]
            scores = tl.where(seen, scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, axis=1))
        shift = m_new * scale
        if MASKED:
            shift = tl.where(m_new == float("-inf"), 0.0, shift)
        p = tl.exp2(scores * scale - shift[:, None])
        alpha = tl.exp2(m_i * scale - shift)
        l_i = l_i * alpha + tl.sum(p, axis=1)
        if MASKED or VALUE_DIM != VALUE_BLOCK:
            value = tl.load(at + NOPE_DIM + value_dims, mask=there & (value_dims < VALUE_DIM), other=0.0)
        else:
            value = tl.load(at + NOPE_DIM + value_dims)
        acc = tl.dot(p.to(value.dtype), value, acc * alpha[:, None], input_precision=PRECISION)
        m_i = m_new
    return acc, l_i, m_i


@triton.jit(
    do_not_specialize=["sequences", "first_position", "is_first", "is_last"],
    do_not_specialize_on_alignment=["query_starts", "key_starts", "ends", "maxima", "sums"],
)
def _latent_prefill(
    q,
    kv,
    keys,
    query_starts,
    key_starts,
    ends,
    out,
    accs,
    maxima,
    sums,
    sequences,
    first_position,
    is_first,
    is_last,
    q_stride,
    kv_stride,
    key_stride,
    out_stride,
    scale,
    HEADS: tl.constexpr,
    NOPE_DIM: tl.constexpr,
    NOPE_BLOCK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """FlashAttention-2: one program per (tile of queries, head). Positions count from `first_position`."""
    sequence, tile = _find_tile(query_starts, sequences, tl.program_id(0), 1, ROWS)
    if tile < 0:
        return
    head = tl.program_id(1)
    begin = tl.load(query_starts + sequence).to(tl.int32)
    count = tl.load(query_starts + sequence + 1).to(tl.int32) - begin
    key_begin = tl.load(key_starts + sequence).to(tl.int64)
    num_keys = (tl.load(key_starts + sequence + 1) - tl.load(key_starts + sequence)).to(tl.int32)
    first_query = tl.load(ends + sequence).to(tl.int32) - count - first_position
    rows = tile * ROWS + tl.arange(0, ROWS)
    inside = (rows < count)[:, None]
    positions = first_query + rows
    nope = tl.arange(0, NOPE_BLOCK)[None, :]
    rope = tl.arange(0, ROPE_BLOCK)[None, :]
    value_dims = tl.arange(0, VALUE_BLOCK)[None, :]
    row_index = (begin + rows).to(tl.int64)
    query_at = q + row_index[:, None] * q_stride + head * (NOPE_DIM + ROPE_DIM)
    query = tl.load(query_at + nope, mask=inside & (nope < NOPE_DIM), other=0.0)
    rotated = tl.load(query_at + NOPE_DIM + rope, mask=inside & (rope < ROPE_DIM), other=0.0)
    state = row_index * HEADS + head
    valid = (rows < count) & (is_first == 0)
    m_i = tl.load(maxima + state, mask=valid, other=float("-inf"))
    l_i = tl.load(sums + state, mask=valid, other=0.0)
    value_mask = (value_dims < VALUE_DIM) & inside
    acc = tl.load(accs + state[:, None] * VALUE_DIM + value_dims, mask=value_mask & (is_first == 0), other=0.0)

    last_query = first_query + tl.minimum(tile * ROWS + ROWS, count) - 1
    last_key = tl.maximum(tl.minimum(num_keys, last_query + 1), 0)
    # Up to here every row sees every key.
    first_masked = tl.minimum(tl.maximum(first_query + tile * ROWS + 1, 0), num_keys) // BLOCK * BLOCK
    first_masked = tl.minimum(first_masked, last_key)
    kv_head = kv + key_begin * kv_stride + head * (NOPE_DIM + VALUE_DIM)
    own_keys = keys + key_begin * key_stride
    acc, l_i, m_i = _scan(
        query, rotated, acc, l_i, m_i, kv_head, own_keys, 0, first_masked, num_keys, positions, kv_stride, key_stride,
        scale, False, NOPE_DIM, NOPE_BLOCK, ROPE_DIM, ROPE_BLOCK, VALUE_DIM, VALUE_BLOCK, BLOCK, PRECISION,
    )  # fmt: skip
    acc, l_i, m_i = _scan(
        query, rotated, acc, l_i, m_i, kv_head, own_keys, first_masked, last_key, num_keys, positions, kv_stride,
        key_stride, scale, True, NOPE_DIM, NOPE_BLOCK, ROPE_DIM, ROPE_BLOCK, VALUE_DIM, VALUE_BLOCK, BLOCK, PRECISION,
    )  # fmt: skip
    if is_last == 0:
        tl.store(maxima + state, m_i, mask=rows < count)
        tl.store(sums + state, l_i, mask=rows < count)
        tl.store(accs + state[:, None] * VALUE_DIM + value_dims, acc, mask=value_mask)
    else:
        result = (acc / l_i[:, None]).to(out.dtype.element_ty)
        out_at = out + row_index[:, None] * out_stride + head * VALUE_DIM + value_dims
        tl.store(out_at, result, mask=value_mask)


@dataclass(frozen=True, slots=True)
class KeyPart:
    """The keys of one call: tokens of each sequence from `first_position` on."""

    key_starts: torch.Tensor  # [sequences + 1] int32, where each sequence's begin among the part's
    first_position: int
    is_first: bool
    is_last: bool


def latent_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    keys: torch.Tensor,
    shape: LatentShape,
    query_starts: torch.Tensor,
    ends: torch.Tensor,
    part: KeyPart,
    *,
    scale: float,
    state: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Attends from each sequence's new tokens over the part's keys; the last one writes `out` [tokens, heads *
    value_dim].

    q [tokens, heads, qk_dim], rotated, its rows may be strided; kv [keys, heads, nope_dim + value_dim]; keys [keys,
    rope_dim], rotated, strided; query_starts [sequences + 1] and ends [sequences] int32: tokens of each with its new
    ones. state: at least tokens * heads * (value_dim + 2) fp32 if there are several parts, else any fp32 tensor.
    """
    tokens, heads, _ = q.shape
    sequences = ends.shape[0]
    if not tokens:
        return
    wide = q.dtype == torch.float32
    rows, block = (32, 32) if wide else (128, 64)
    maxima, sums = (state[min(tokens * heads * (shape.value_dim + at), state.numel() - 1) :] for at in (0, 1))
    _latent_prefill[(cdiv(tokens, rows) + sequences, heads)](
        q,
        kv,
        keys,
        query_starts,
        part.key_starts,
        ends,
        out,
        state,
        maxima,
        sums,
        sequences,
        part.first_position,
        int(part.is_first),
        int(part.is_last),
        q.stride(0),
        kv.stride(0),
        keys.stride(0),
        out.stride(0),
        scale * LOG2_E,
        HEADS=heads,
        NOPE_DIM=shape.nope_dim,
        NOPE_BLOCK=max(16, next_power_of_2(shape.nope_dim)),
        ROPE_DIM=shape.rope_dim,
        ROPE_BLOCK=max(16, next_power_of_2(shape.rope_dim)),
        VALUE_DIM=shape.value_dim,
        VALUE_BLOCK=max(16, next_power_of_2(shape.value_dim)),
        ROWS=rows,
        BLOCK=block,
        PRECISION="ieee" if wide else "tf32",
        num_warps=4 if wide else 8,
        num_stages=2 if wide else 3,
    )
