"""Rotary position embedding (Su et al., arXiv:2104.09864) between the QKV GEMM and attention, with its neighbours.

Those are RMSNorm of q and k heads (if a model has it), and the write of k and v into their pages.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.attention.quantized_rows import first_scale, rounded_rows, row_scales
from mini_infer_engine.kernels.sizes import cdiv, next_power_of_2


@dataclass(frozen=True, slots=True)
class Rotation:
    """A layer's norm and rotation of q and k heads before attention; k is cached in that form."""

    cos_sin: torch.Tensor  # [max_positions, head_dim], cosines first
    q_norm: torch.Tensor | None = None  # [head_dim]
    k_norm: torch.Tensor | None = None  # [head_dim]
    eps: float = 1e-6


@triton.jit(do_not_specialize_on_alignment=["positions", "kv_index"])
def _rope_kv(
    qkv,
    positions,
    kv_index,
    cos_sin,
    q_norm,
    k_norm,
    pool,
    qkv_stride,
    page_stride,
    kv_stride,
    token_stride,
    eps,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
):
    """RoPE: one program per (token, group) of `HEADS` consecutive heads of one token's packed q, k and v."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    half: tl.constexpr = HEAD_DIM // 2
    dims = tl.arange(0, HALF_BLOCK)
    is_q = heads < Q_HEADS
    is_v = heads >= Q_HEADS + KV_HEADS
    mask = (heads < Q_HEADS + 2 * KV_HEADS)[:, None] & (dims < half)[None, :]
    source = qkv + token * qkv_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=mask, other=0.0).to(tl.float32)

    if NORM:
        scale = tl.rsqrt((tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / HEAD_DIM + eps)
        uses_q_norm = is_q[:, None] & mask
        q_first = tl.load(q_norm + dims, mask=dims < half, other=0.0).to(tl.float32)
        q_second = tl.load(q_norm + half + dims, mask=dims < half, other=0.0).to(tl.float32)
        k_first = tl.load(k_norm + dims, mask=dims < half, other=0.0).to(tl.float32)
        k_second = tl.load(k_norm + half + dims, mask=dims < half, other=0.0).to(tl.float32)
        normed_first = first * scale[:, None] * tl.where(uses_q_norm, q_first[None, :], k_first[None, :])
        normed_second = second * scale[:, None] * tl.where(uses_q_norm, q_second[None, :], k_second[None, :])
        first = tl.where(is_v[:, None], first, normed_first)
        second = tl.where(is_v[:, None], second, normed_second)

    position = tl.load(positions + token).to(tl.int64)
    cos = tl.load(cos_sin + position * HEAD_DIM + dims, mask=dims < half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(cos_sin + position * HEAD_DIM + half + dims, mask=dims < half, other=0.0).to(tl.float32)[None, :]
    rotated_first = tl.where(is_v[:, None], first, first * cos - second * sin).to(qkv.dtype.element_ty)
    rotated_second = tl.where(is_v[:, None], second, second * cos + first * sin).to(qkv.dtype.element_ty)

    index = tl.load(kv_index + token).to(tl.int64)
    mask = mask & (index >= 0)
    q_mask = mask & is_q[:, None]
    tl.store(source, rotated_first, mask=q_mask)
    tl.store(source + half, rotated_second, mask=q_mask)
    kv_head = tl.where(is_v, heads - Q_HEADS - KV_HEADS, heads - Q_HEADS)
    target = (
        pool
        + (index // PAGE_SIZE) * page_stride
        + tl.where(is_v, kv_stride, 0)[:, None]
        + (index % PAGE_SIZE) * token_stride
        + kv_head[:, None] * HEAD_DIM
        + dims[None, :]
    )
    kv_mask = mask & (heads >= Q_HEADS)[:, None]
    dtype: tl.constexpr = pool.dtype.element_ty
    if dtype.primitive_bitwidth == 8:
        largest: tl.constexpr = 127.0 if dtype == tl.int8 else 448.0
        wide_first, wide_second = rotated_first.to(tl.float32), rotated_second.to(tl.float32)
        scales = tl.maximum(row_scales(wide_first, largest), row_scales(wide_second, largest))
        rotated_first = rounded_rows(wide_first, scales, dtype, largest)
        rotated_second = rounded_rows(wide_second, scales, dtype, largest)
        scale_at = first_scale(pool, kv_head, KV_HEADS, HEAD_DIM, PAGE_SIZE) + (index // PAGE_SIZE) * (page_stride // 2)
        scale_at += tl.where(is_v, kv_stride // 2, 0) + index % PAGE_SIZE
        of_kv = (heads >= Q_HEADS) & (heads < Q_HEADS + 2 * KV_HEADS) & (index >= 0)
        tl.store(scale_at, scales.to(tl.bfloat16), mask=of_kv)
    tl.store(target, rotated_first, mask=kv_mask)
    tl.store(target + half, rotated_second, mask=kv_mask)


def rope_kv(
    qkv: torch.Tensor, rotation: Rotation, positions: torch.Tensor, kv_index: torch.Tensor, pool: torch.Tensor
) -> torch.Tensor:
    """Rotates q in place, writes k and v to their pages, and returns q as a view [tokens, q_heads, head_dim].

    qkv [tokens, (q_heads + 2 kv_heads) * head_dim]; positions, kv_index [tokens] (page * page_size + offset, or -1:
    this token is left as it is); pool: one layer's view [pages, 2, page_size, kv_heads, head_dim], of qkv's dtype or of
    one byte an element, with scales after each half of a page (`runtime.quantized_pool`).
    """
    tokens = qkv.shape[0]
    _, _, page_size, kv_heads, head_dim = pool.shape
    q_heads = qkv.shape[1] // head_dim - 2 * kv_heads
    heads = 4 if tokens < 64 else 8
    if tokens:
        _rope_kv[(tokens, cdiv(q_heads + 2 * kv_heads, heads))](
            qkv,
            positions,
            kv_index,
            rotation.cos_sin,
            rotation.q_norm,
            rotation.k_norm,
            pool,
            qkv.stride(0),
            pool.stride(0),
            pool.stride(1),
            pool.stride(2),
            rotation.eps,
            Q_HEADS=q_heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            HALF_BLOCK=next_power_of_2(head_dim // 2),
            PAGE_SIZE=page_size,
            HEADS=heads,
            NORM=rotation.q_norm is not None,
            num_warps=2 if tokens < 64 else 4,
        )
    return qkv[:, : q_heads * head_dim].unflatten(1, (q_heads, head_dim))
