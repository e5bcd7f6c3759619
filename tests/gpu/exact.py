"""Norm and rotation of heads in fp64: what kernels that do both are held to."""

import torch

from mini_infer_engine.kernels.attention.rope_kv import Rotation


def exact_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm over the last dimension."""
    wide = x.double()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


def exact_rotated(
    heads: torch.Tensor, rotation: Rotation, norm: torch.Tensor | None, positions: torch.Tensor
) -> torch.Tensor:
    """[tokens, heads, head_dim], normed where there is a norm, rotated to their positions [tokens]."""
    x = heads.double() if norm is None else exact_norm(heads, norm, rotation.eps)
    cos, sin = rotation.cos_sin.double().index_select(0, positions)[:, None].chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
