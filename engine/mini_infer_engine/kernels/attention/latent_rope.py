"""Rotary embedding (Su et al., arXiv:2104.09864) of latent attention (DeepSeek-V2, arXiv 2405.04434), fused with its
neighbours.

It rotates the shared key and the queries' rotated parts. The neighbours are RMSNorm of the latent, and the write of
latent and key into their page.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.sizes import cdiv, next_power_of_2


@dataclass(frozen=True, slots=True)
class LatentShape:
    """The widths of one layer, and the form of its rotation and norm."""

    heads: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool
    """True if a rotated pair is (2i, 2i + 1) instead of (i, i + rope_dim / 2); in the cache it is always the latter."""
    eps: float

    @property
    def qk_dim(self) -> int:
        """The width of a head's queries."""
        return self.nope_dim + self.rope_dim

    @property
    def q_width(self) -> int:
        """The columns before the latent."""
        return self.heads * self.qk_dim

    @property
    def latent_width(self) -> int:
        """The width of a token's cache entry."""
        return self.kv_rank + self.rope_dim


@triton.jit
def rotated_halves(at, row_mask, cos_sin, positions, ROPE_DIM: tl.constexpr, HALF_BLOCK: tl.constexpr,
                   INTERLEAVED: tl.constexpr):  # fmt: skip
    """Rotates the parts at pointers [rows, 1] by positions [rows]. Returns both halves, [rows, HALF_BLOCK] fp32."""
    half: tl.constexpr = ROPE_DIM // 2
    dims = tl.arange(0, HALF_BLOCK)
    mask = row_mask[:, None] & (dims < half)[None, :]
    if INTERLEAVED:
        first = tl.load(at + 2 * dims[None, :], mask=mask, other=0.0).to(tl.float32)
        second = tl.load(at + 2 * dims[None, :] + 1, mask=mask, other=0.0).to(tl.float32)
    else:
        first = tl.load(at + dims[None, :], mask=mask, other=0.0).to(tl.float32)
        second = tl.load(at + half + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    angle = cos_sin + positions.to(tl.int64)[:, None] * ROPE_DIM + dims[None, :]
    cos = tl.load(angle, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(angle + half, mask=mask, other=0.0).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def normed_latents(at, norm, row_mask, eps, KV_RANK: tl.constexpr, RANK_BLOCK: tl.constexpr):
    """Computes RMSNorm of the latents at pointers [rows, 1]: [rows, RANK_BLOCK] fp32."""
    dims = tl.arange(0, RANK_BLOCK)
    inside = row_mask[:, None] & (dims < KV_RANK)[None, :]
    x = tl.load(at + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(norm + dims, mask=dims < KV_RANK, other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, axis=1) / KV_RANK + eps)[:, None] * weight[None, :]


@triton.jit(do_not_specialize_on_alignment=["positions", "kv_index"])
def _latent_rope(
    packed,
    positions,
    kv_index,
    cos_sin,
    norm,
    pool,
    packed_stride,
    page_stride,
    token_stride,
    eps,
    HEADS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    NOPE_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    KV_RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Rotates and writes: one program per (token, part). Part 0 is latent and key, others `HEADS_BLOCK` query heads."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    index = tl.load(kv_index + token).to(tl.int64)
    if index < 0:
        return
    position = tl.load(positions + token)
    half: tl.constexpr = ROPE_DIM // 2
    dims = tl.arange(0, HALF_BLOCK)
    row = packed + token * packed_stride
    if part == 0:
        one = tl.zeros((1,), dtype=tl.int32)
        latent_at = row + HEADS * (NOPE_DIM + ROPE_DIM) + one[:, None]
        latent = normed_latents(latent_at, norm, one == 0, eps, KV_RANK, RANK_BLOCK).to(packed.dtype.element_ty)
        key_at = latent_at + KV_RANK
        first, second = rotated_halves(
            key_at, one == 0, cos_sin, position + one, ROPE_DIM, HALF_BLOCK, INTERLEAVED
        )  # fmt: skip
        tl.debug_barrier()
        target = pool + (index // PAGE_SIZE) * page_stride + (index % PAGE_SIZE) * token_stride + one[:, None]
        rank = tl.arange(0, RANK_BLOCK)[None, :]
        tl.store(latent_at + rank, latent, mask=rank < KV_RANK)
        tl.store(target + rank, latent, mask=rank < KV_RANK)
        key_mask = (dims < half)[None, :]
        tl.store(key_at + dims[None, :], first.to(packed.dtype.element_ty), mask=key_mask)
        tl.store(key_at + half + dims[None, :], second.to(packed.dtype.element_ty), mask=key_mask)
        tl.store(target + KV_RANK + dims[None, :], first.to(packed.dtype.element_ty), mask=key_mask)
        tl.store(target + KV_RANK + half + dims[None, :], second.to(packed.dtype.element_ty), mask=key_mask)
    else:  # names of its own: Triton wants one type of a name that both branches have
        heads = (part - 1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
        inside = heads < HEADS
        at = row + (heads * (NOPE_DIM + ROPE_DIM) + NOPE_DIM)[:, None]
        q_first, q_second = rotated_halves(
            at, inside, cos_sin, position + tl.zeros_like(heads), ROPE_DIM, HALF_BLOCK, INTERLEAVED
        )
        tl.debug_barrier()  # all of a pair is read before any is written
        mask = inside[:, None] & (dims < half)[None, :]
        tl.store(at + dims[None, :], q_first.to(packed.dtype.element_ty), mask=mask)
        tl.store(at + half + dims[None, :], q_second.to(packed.dtype.element_ty), mask=mask)


def latent_rope(
    packed: torch.Tensor,
    shape: LatentShape,
    cos_sin: torch.Tensor,
    norm: torch.Tensor,
    positions: torch.Tensor,
    kv_index: torch.Tensor,
    pool: torch.Tensor,
    *,
    rotates_queries: bool = True,
) -> None:
    """Normalises and rotates in place, and writes latents and keys to their pages.

    packed [tokens, q_width + latent_width], its rows may be strided; cos_sin [max_positions, rope_dim], cosines first;
    norm [kv_rank]; positions, kv_index [tokens] (page * page_size + offset, or -1: this token is left as it is); pool:
    one layer's view [pages, 1, page_size, 1, latent_width]. Without `rotates_queries` queries are left as they are.
    """
    tokens = packed.shape[0]
    if not tokens:
        return
    heads_block = next_power_of_2(min(16, shape.heads))
    parts = cdiv(shape.heads, heads_block) if rotates_queries else 0
    _latent_rope[(tokens, 1 + parts)](
        packed,
        positions,
        kv_index,
        cos_sin,
        norm,
        pool,
        packed.stride(0),
        pool.stride(0),
        pool.stride(2),
        shape.eps,
        HEADS=shape.heads,
        HEADS_BLOCK=heads_block,
        NOPE_DIM=shape.nope_dim,
        ROPE_DIM=shape.rope_dim,
        HALF_BLOCK=next_power_of_2(shape.rope_dim // 2),
        KV_RANK=shape.kv_rank,
        RANK_BLOCK=next_power_of_2(shape.kv_rank),
        PAGE_SIZE=pool.shape[2],
        INTERLEAVED=shape.interleaved,
        num_warps=4,
    )
