"""Computes rotary position embeddings: one table for the whole model, looked up once a pass.

Frequencies follow transformers' `modeling_rope_utils` (default, linear, llama3, yarn, longrope, and Gemma 4's
proportional), whose sources are Su
et al. 2021 (arXiv 2104.09864), kaiokendev's linear interpolation, Llama 3.1's model code, Peng et al. 2023 (arXiv
2309.00071) and Ding et al. 2024 (arXiv 2402.13753).
"""

import math

import torch
from torch import Tensor

from mini_infer_engine.config.model.rope import RopeParameters


def inverse_frequencies(rope: RopeParameters, rotary_dim: int, max_positions: int) -> tuple[Tensor, float]:
    """Returns the radians per position of each rotated pair, [rotary_dim / 2] fp32, and the factor of cos and sin."""
    base = 1.0 / rope.theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    if rope.type == "none":
        return torch.zeros_like(base), 1.0
    if rope.type == "proportional":
        angles = int(rope.partial * rotary_dim // 2)
        return torch.cat((base[:angles], torch.zeros_like(base[angles:]))) / rope.factor, 1.0
    if rope.type == "linear":
        return base / rope.factor, 1.0
    if rope.type == "llama3":
        return _llama3(base, rope), 1.0
    if rope.type == "yarn":
        return _yarn(base, rope, rotary_dim), _yarn_attention_factor(rope)
    if rope.type == "longrope":
        return _longrope(base, rope, max_positions), _longrope_attention_factor(rope)
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


def _longrope(base: Tensor, rope: RopeParameters, max_positions: int) -> Tensor:
    """Uses one set of factors for all sequences, by the served context length, as vLLM does.

    Transformers uses each sequence's own length; but keys in a page must not depend on how long a sequence becomes.
    """
    is_long = max_positions > rope.original_max_position_embeddings
    return base / torch.tensor(rope.long_factors if is_long else rope.short_factors)


def _longrope_attention_factor(rope: RopeParameters) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position_embeddings))


class Rotary:
    """A table of cos and sin of every position up to `max_positions`, in the model's dtype.

    If only the first dimensions of a head are rotated, the pairs of the others have cos 1 and sin 0, and come last.
    """

    def __init__(
        self, rope: RopeParameters, head_dim: int, max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        rotary_dim = rope.rotary_dim(head_dim)
        frequencies, factor = inverse_frequencies(rope, rotary_dim, max_positions)
        angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies
        unrotated = torch.zeros(max_positions, (head_dim - rotary_dim) // 2)
        cos, sin = angles.cos() * factor, angles.sin() * factor
        table = torch.cat((cos, unrotated + 1, sin, unrotated), dim=-1)
        self.table = table.to(dtype).to(device)  # [max_positions, head_dim]: cos of each pair, then sin of each
        self._axes = rotary_axes(rope, head_dim // 2).to(device)

    def by_section(self, positions: Tensor) -> Tensor:
        """Returns cos and sin of tokens as in `table`, [tokens, head_dim], for positions [3, tokens] in time, height
        and width: each pair is rotated by the position of its section.
        """
        rows = self.table[positions].view(*positions.shape, 2, -1)  # [3, tokens, 2, head_dim / 2]
        return rows.gather(0, self._axes.expand(1, *rows.shape[1:])).view(positions.shape[1], -1)

    def lookup(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the multipliers for `rotate_`, each [tokens, 1, head_dim]."""
        return multipliers(self.table.index_select(0, positions))


def multipliers(cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the multipliers for `rotate_`, each [tokens, 1, head_dim], from cos and sin [tokens, head_dim]."""
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotary_axes(rope: RopeParameters, num_pairs: int) -> Tensor:
    """Returns the axis of positions by which each pair of dimensions is rotated, [pairs] int64: 0 for time, 1 for
    height, 2 for width.

    Sections stand one after the other in Qwen2-VL (arXiv 2409.12191); in Qwen3-VL height and width take every third
    pair up to their lengths, as its transformers code has it.
    """
    axes = torch.zeros(num_pairs, dtype=torch.int64, device="cpu")
    begin = 0
    for axis, size in enumerate(rope.sections):
        place = slice(axis, 3 * size, 3) if rope.sections_alternate else slice(begin, begin + size)
        if axis or not rope.sections_alternate:
            axes[place] = axis
        begin += size
    return axes


def rotary_order(head_dim: int, rotary_dim: int, *, interleaved: bool = False) -> Tensor:
    """Returns the checkpoint's dimension at each dimension of a head, [head_dim], if only the first ones are rotated.

    Checkpoints have the two halves of the rotated dimensions side by side, or each pair's two dimensions
    (`interleaved`), and `rotate_` half a head apart. Queries and keys in the same new order have the same products.
    """
    half, rest = rotary_dim // 2, (head_dim - rotary_dim) // 2
    dims = torch.arange(head_dim, device="cpu")  # also where a model is built without memory
    first, second, others = dims[:half], dims[half : 2 * half], dims[2 * half :]
    if interleaved:
        first, second = dims[: 2 * half : 2], dims[1 : 2 * half : 2]
    return torch.cat((first, others[:rest], second, others[rest:]))


def rotate_(x: Tensor, cos: Tensor, signed_sin: Tensor) -> None:
    """Rotates each pair (i, i + head_dim / 2) of `x` [tokens, heads, head_dim] in place."""
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    x.mul_(cos).addcmul_(swapped, signed_sin)


def rotate_pairs_(x: Tensor, rotation: tuple[Tensor, Tensor], *, interleaved: bool) -> None:
    """Rotates as `rotate_`; the pairs of `interleaved` are (2i, 2i + 1), and half a head apart afterwards."""
    if interleaved:
        x.copy_(x.reshape(*x.shape[:2], -1, 2).transpose(-1, -2).flatten(-2))
    rotate_(x, *rotation)
