"""Describes layers that keep a recurrent state of constant size instead of keys and values. Plain data, without torch.

The state of one layer and sequence has two parts: the last inputs of a causal convolution, and the matrix of a linear
recurrence in fp32, which some kinds do not have.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.parallelism.tensor_parallel import TensorParallel

Mixer = Literal["attention", "recurrent", "none"]
"""The part of a layer that mixes tokens: attention with keys and values, a recurrence with a state, or none."""


@dataclass(frozen=True, slots=True)
class GatedDeltaSpec:
    """The shape of a gated delta net (Yang et al. 2024, arXiv 2412.06464)."""

    num_key_heads: int
    num_value_heads: int
    """A multiple of `num_key_heads`: several value heads share the queries and keys of one head."""
    key_dim: int
    """The width of a head's queries and keys."""
    value_dim: int
    """The width of a head's values."""
    kernel_size: int
    """Tokens that the convolution sees, the current one among them."""

    @property
    def key_width(self) -> int:
        """The width of the keys of all heads."""
        return self.num_key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """The width of the values of all heads."""
        return self.num_value_heads * self.value_dim

    @property
    def convolution_channels(self) -> int:
        """The channels of the convolution: queries, keys and values."""
        return 2 * self.key_width + self.value_width

    @property
    def state_shape(self) -> tuple[int, ...]:
        """The shape of the recurrent state: a matrix from keys to values for each value head."""
        return self.num_value_heads, self.key_dim, self.value_dim

    def on_rank(self, parallel: TensorParallel) -> "GatedDeltaSpec":
        """Returns the shape of a rank's share: some key heads, with the value heads that share them."""
        heads = self.num_key_heads // parallel.size, self.num_value_heads // parallel.size
        return replace(self, num_key_heads=heads[0], num_value_heads=heads[1])

    def obstacle(self, parallel: TensorParallel) -> str | None:
        """Returns why ranks cannot share such a block, or None if they can."""
        return parallel.obstacle("linear_num_key_heads", self.num_key_heads)


@dataclass(frozen=True, slots=True)
class Mamba2Spec:
    """The shape of a Mamba-2 block (Dao and Gu 2024, arXiv 2405.21060)."""

    num_heads: int
    head_dim: int
    state_size: int
    """The width of the vectors B and C, by which inputs enter the state and are read from it."""
    num_groups: int
    """Groups of heads that share these vectors; divides `num_heads`."""
    kernel_size: int
    """Tokens that the convolution sees, the current one among them."""
    norm_eps: float
    norm_groups: int
    """The number of equal parts of the output that are normalised each by itself."""
    time_step_limits: tuple[float, float]
    """The smallest and the largest time step."""
    convolution_bias: bool
    projection_bias: bool

    @property
    def width(self) -> int:
        """The width of the inputs of all heads."""
        return self.num_heads * self.head_dim

    @property
    def group_width(self) -> int:
        """The width of the vectors B, or C, of all groups."""
        return self.num_groups * self.state_size

    @property
    def convolution_channels(self) -> int:
        """The channels of the convolution: inputs, B and C."""
        return self.width + 2 * self.group_width

    @property
    def state_shape(self) -> tuple[int, ...]:
        """The shape of the recurrent state: a matrix from B to inputs for each head."""
        return self.num_heads, self.state_size, self.head_dim

    def on_rank(self, parallel: TensorParallel) -> "Mamba2Spec":
        """Returns the shape of a rank's share: some heads, and their groups or the one to which they belong."""
        groups = parallel.num_heads(self.num_groups)
        return replace(self, num_heads=self.num_heads // parallel.size, num_groups=groups)

    def obstacle(self, parallel: TensorParallel) -> str | None:
        """Returns why ranks cannot share such a block, or None if they can."""
        heads = parallel.obstacle("the number of Mamba heads", self.num_heads)
        groups = parallel.obstacle("the number of Mamba groups", self.num_groups, copies=True)
        norms = None
        if self.norm_groups > 1:  # a single one is computed by all ranks together
            norms = parallel.obstacle("the number of Mamba groups", self.norm_groups)
        return heads or groups or norms


@dataclass(frozen=True, slots=True)
class ShortConvolutionSpec:
    """The shape of a gated short convolution, whose only state is the last inputs (LFM2, arXiv 2511.23404)."""

    convolution_channels: int
    kernel_size: int
    bias: bool
    """True if the products and the convolution have biases."""

    @property
    def state_shape(self) -> tuple[int, ...]:
        """The shape of an empty recurrent state."""
        return (0,)

    def on_rank(self, parallel: TensorParallel) -> "ShortConvolutionSpec":
        """Returns the shape of a rank's share: some channels."""
        return replace(self, convolution_channels=self.convolution_channels // parallel.size)

    def obstacle(self, parallel: TensorParallel) -> str | None:
        """Returns why ranks cannot share such a block, or None if they can."""
        return parallel.obstacle("the channels of the convolution", self.convolution_channels)


Recurrence = GatedDeltaSpec | Mamba2Spec | ShortConvolutionSpec


def time_step_limits(fields: Fields) -> tuple[float, float]:
    """Returns the smallest and the largest time step of Mamba-2 blocks, of which the latter may be infinite."""
    limits = fields.values.get("time_step_limit")
    if limits is None:
        return 0.0, math.inf
    if isinstance(limits, list):  # transformers 5 writes infinity as an object
        limits = [math.inf if limit == {"__float__": "Infinity"} else limit for limit in limits]
    are_numbers = isinstance(limits, list) and all(type(limit) in (int, float) for limit in limits)
    if not are_numbers or len(limits) != 2 or not 0 <= limits[0] <= limits[1]:
        raise fields.refuse("time_step_limit", "must be two numbers from 0 on, the larger one last.")
    return float(limits[0]), float(limits[1])


def mixers_by_layer(
    fields: Fields, num_layers: int, kinds: dict[str, Mixer], otherwise: list[str]
) -> tuple[Mixer, ...]:
    """Returns the mixer of each layer by `layer_types`, whose values are the keys of `kinds`; `otherwise` if the file
    has none.

    Raises ModelError if the list has another length or other values, or no layer has keys and values.
    """
    named = fields.values.get("layer_types")
    layer_types = otherwise if named is None else named
    is_valid = isinstance(layer_types, list) and all(isinstance(kind, str) and kind in kinds for kind in layer_types)
    if not is_valid or len(layer_types) != num_layers:
        raise fields.refuse("layer_types", f"must list {num_layers} times {' or '.join(kinds)}.")
    mixers = tuple(kinds[layer_type] for layer_type in layer_types)
    if "attention" not in mixers:
        raise fields.refuse("layer_types", "models without a layer of attention are not supported.")
    return mixers
