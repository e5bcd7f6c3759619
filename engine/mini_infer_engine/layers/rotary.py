"""Rotary position embeddings: one table for the whole model, looked up once a pass.

Frequencies follow transformers' `modeling_rope_utils` (default, linear, llama3, yarn), whose sources are Su et al. 2021
(arXiv 2104.09864), kaiokendev's linear interpolation, Llama 3.1's model code and Peng et al. 2023 (arXiv 2309.00071).
"""

import math

import torch
from torch import Tensor

from mini_infer_engine.config.rope import RopeParameters


def inverse_frequencies(rope: RopeParameters, head_dim: int) -> tuple[Tensor, float]:
    """Radians per position for each pair of dimensions, [head_dim / 2] fp32, and the factor on cos and sin."""
    base = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.type == "linear":
        return base / rope.factor, 1.0
    if rope.type == "llama3":
        return _llama3(base, rope), 1.0
    if rope.type == "yarn":
        return _yarn(base, rope, head_dim), _yarn_attention_factor(rope)
    return base, 1.0


def _llama3(base: Tensor, rope: RopeParameters) -> Tensor:
    wavelength = 2 * math.pi / base
    longest_kept = rope.original_max_position_embeddings / rope.high_freq_factor
    shortest_scaled = rope.original_max_position_embeddings / rope.low_freq_factor
    smooth = (rope.original_max_position_embeddings / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * base / rope.factor + smooth * base
    scaled = torch.where(wavelength > shortest_scaled, base / rope.factor, between)
    return torch.where(wavelength < longest_kept, base, scaled)


def _yarn(base: Tensor, rope: RopeParameters, head_dim: int) -> Tensor:
    def dimension_of(rotations: float) -> float:
        length = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    interpolated = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return base / rope.factor * interpolated + base * (1 - interpolated)


def _yarn_attention_factor(rope: RopeParameters) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


class Rotary:
    """cos and sin of every position up to `max_positions`, in the model's dtype."""

    def __init__(
        self, rope: RopeParameters, head_dim: int, max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        frequencies, factor = inverse_frequencies(rope, head_dim)
        angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies
        table = torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1)
        self.table = table.to(dtype).to(device)  # [max_positions, head_dim]: cos of each pair, then sin of each

    def lookup(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Multipliers for `rotate_`, each [tokens, 1, head_dim]."""
        cos, sin = self.table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate_(x: Tensor, cos: Tensor, signed_sin: Tensor) -> None:
    """Rotate each pair (i, i + head_dim / 2) of `x` [tokens, heads, head_dim] in place."""
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    x.mul_(cos).addcmul_(swapped, signed_sin)
