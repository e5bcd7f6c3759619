"""Maps a checkpoint's tensor to its place in a model's memory, with the conversion on the way."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mini_infer_engine.config.parallelism.tensor_parallel import Shard

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a tensor that a rank has: ranges of one dimension, such as rows (0) or columns (1)."""

    dim: int
    shard: Shard

    def of(self, tensor: Any) -> Tensor:
        """Cuts the part out of a tensor, or out of a file reader that supports slices."""
        lead = (slice(None),) * self.dim
        pieces = [tensor[(*lead, slice(begin, end))] for begin, end in self.shard.ranges]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=self.dim)

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the whole tensor, given the shape of this part."""
        return (*shape[: self.dim], self.shard.total, *shape[self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class Placement:
    """The target of one named tensor of a checkpoint. Loaders call `obstacle`, then `place`."""

    target: Tensor
    """The memory that the tensor fills; a view of a larger weight if several tensors are packed into one."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes that the checkpoint's tensor may have; empty: the target's own, or that of the tensor it is a part of."""
    expand: Callable[[Tensor], Tensor] | None = None
    """Converts the part from the checkpoint's form to the target's; None: they are equal."""
    part: Part | None = None
    """The part of the checkpoint's tensor that is read; None: all of it."""

    @property
    def is_copied(self) -> bool:
        """True if the target gets the numbers that were read; False if others are made of them."""
        return self.expand is None

    @property
    def allowed_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes that the checkpoint's tensor may have, the usual one first."""
        here = tuple(self.target.shape)
        return self.shapes or (here if self.part is None else self.part.whole_shape(here),)

    def obstacle(self, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
        """Returns why a tensor cannot be placed here, as text for users, or None if it can."""
        allowed = self.allowed_shapes
        if shape not in allowed:
            expected = " or ".join(str(list(one)) for one in allowed)
            return f"has shape {list(shape)}, config.json asks for {expected}"
        if (dtype == FP8) != (
            self.target.dtype == FP8
        ) or dtype.is_floating_point > self.target.dtype.is_floating_point:
            return f"is {dtype}, and config.json asks for {self.target.dtype}"
        if not dtype.is_floating_point and dtype != self.target.dtype:
            return f"is {dtype}: this form of quantised checkpoint is not supported; use the original weights"
        return None

    def place(self, tensor: Tensor) -> None:
        """Copies the tensor, or the part of it that was read, cast to the target's dtype."""
        self.target.copy_(tensor if self.expand is None else self.expand(tensor))
