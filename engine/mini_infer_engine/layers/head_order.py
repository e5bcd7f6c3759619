"""Brings the dimensions of heads into the order of `Rotary` while a checkpoint is read.

`rotate_` and the kernels rotate pairs that are half a head apart. Checkpoints whose heads are rotated in part, or in
neighbouring pairs, have the dimensions in another order. Rows of weights move, so that attention knows one order alone.
"""

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from mini_infer_engine.config.model.rope import RopeParameters
from mini_infer_engine.config.parallelism.tensor_parallel import Shard
from mini_infer_engine.layers.linear import PackedLinear
from mini_infer_engine.layers.rotary import rotary_order

ROTATED = ("q_proj", "k_proj")


def head_order(rope: RopeParameters, head_dim: int) -> Tensor | None:
    """Returns the checkpoint's dimension at each dimension of a head, or None if the orders are equal."""
    if not rope.reorders_heads(head_dim):
        return None
    return rotary_order(head_dim, rope.rotary_dim(head_dim), interleaved=rope.interleaved)


def reordered(order: Tensor, weight: Tensor) -> Tensor:
    """Returns rows of whole heads with the dimensions of each head in another order."""
    return weight.reshape(-1, len(order), *weight.shape[1:])[:, order].flatten(0, 1)


class RotatedProjection(PackedLinear):
    """The product of q, k and v whose rows of q and k are reordered."""

    def __init__(
        self, in_features: int, parts: Mapping[str, int | Shard], order: Tensor, *, bias: bool = False
    ) -> None:
        super().__init__(in_features, parts, bias=bias)
        self._order = order
        self._values = sum(count for name, count in self.parts.items() if name in ROTATED)
        """The first row that is not rotated."""

    def row_order(self, rows: slice) -> Callable[[Tensor], Tensor] | None:
        """Returns the function that reorders rows of queries or keys; None for values."""
        return partial(reordered, self._order) if rows.start < self._values else None
