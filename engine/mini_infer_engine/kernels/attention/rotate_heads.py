"""Rotary position embedding (RoFormer, arXiv 2104.09864) of queries and keys in place, by cos and sin of each token.

It serves modules that compute cos and sin themselves; `rope_kv` reads a table and writes pages on the way.
"""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.sizes import next_power_of_2


@triton.jit
def _rotate_heads(
    qkv,
    cos,
    sin,
    q_weight,
    k_weight,
    row_width,
    num_heads,
    eps,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rotates one head of one token in a program, after its norm if there are weights."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pairs = tl.arange(0, BLOCK)
    mask = pairs < HALF
    at = qkv + token * row_width + head * 2 * HALF + pairs
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    if q_weight is not None:
        q_mask, k_mask = mask & (head < num_heads), mask & (head >= num_heads)
        weight = tl.load(q_weight + pairs, mask=q_mask, other=0.0) + tl.load(k_weight + pairs, mask=k_mask, other=0.0)
        more = pairs + HALF
        weight_second = tl.load(q_weight + more, mask=q_mask, other=0.0)
        weight_second += tl.load(k_weight + more, mask=k_mask, other=0.0)
        scale = tl.rsqrt((tl.sum(first * first) + tl.sum(second * second)) / (2 * HALF) + eps)
        first = first * scale * weight.to(tl.float32)
        second = second * scale * weight_second.to(tl.float32)
    angles = token * 2 * HALF + pairs
    cos_first = tl.load(cos + angles, mask=mask, other=0.0).to(tl.float32)
    cos_second = tl.load(cos + angles + HALF, mask=mask, other=0.0).to(tl.float32)
    sin_first = tl.load(sin + angles, mask=mask, other=0.0).to(tl.float32)
    sin_second = tl.load(sin + angles + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, (first * cos_first - second * sin_first).to(qkv.dtype.element_ty), mask=mask)
    tl.store(at + HALF, (second * cos_second + first * sin_second).to(qkv.dtype.element_ty), mask=mask)


def rotate_heads_(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
) -> None:
    """Rotates the first `num_heads` + `num_kv_heads` heads of qkv [tokens, width] by cos and sin [tokens, head_dim].

    `norms` are the weights [head_dim] of an RMS norm over each head of queries and of keys, before the rotation.
    """
    tokens, head_dim = cos.shape
    if not tokens:
        return
    q_weight, k_weight = norms or (None, None)
    half = head_dim // 2
    _rotate_heads[(tokens, num_heads + num_kv_heads)](
        qkv,
        cos.contiguous(),
        sin.contiguous(),
        q_weight,
        k_weight,
        qkv.stride(0),
        num_heads,
        eps,
        HALF=half,
        BLOCK=next_power_of_2(half),
        num_warps=1,
    )
