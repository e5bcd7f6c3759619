"""Where a checkpoint's tensor goes in a model's memory, and what becomes of it on its way there."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mini_infer_engine.config.parallelism.tensor_parallel import Shard

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Part:
    """What of a tensor a rank holds: some of its rows (dimension 0) or columns (dimension 1)."""

    dim: int
    shard: Shard

    def of(self, tensor: Any) -> Tensor:
        """Out of a tensor, or out of what reads one slice of a file at a time."""
        lead = (slice(None),) * self.dim
        pieces = [tensor[(*lead, slice(begin, end))] for begin, end in self.shard.ranges]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=self.dim)

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the tensor of which a part has this shape."""
        return (*shape[: self.dim], self.shard.total, *shape[self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class Placement:
    """One named tensor of a checkpoint. Loaders call `obstacle`, then `place`."""

    target: Tensor
    """What it fills; a view of a larger weight where several tensors are packed into one."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes that the checkpoint's tensor may have; empty: the target's own, or the one it is a part of."""
    expand: Callable[[Tensor], Tensor] | None = None
    """From the checkpoint's form to the target's, of the part alone; None: as it is."""
    part: Part | None = None
    """What of the checkpoint's tensor is read; None: all of it."""

    @property
    def allowed_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the checkpoint's tensor, the usual one first."""
        here = tuple(self.target.shape)
        return self.shapes or (here if self.part is None else self.part.whole_shape(here),)

    def obstacle(self, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
        """Why a tensor cannot be placed here, for people; None: it can."""
        allowed = self.allowed_shapes
        if shape not in allowed:
            wanted = " or ".join(str(list(one)) for one in allowed)
            return f"has shape {list(shape)}, config.json asks for {wanted}"
        if (dtype == FP8) != (
            self.target.dtype == FP8
        ) or dtype.is_floating_point > self.target.dtype.is_floating_point:
            return f"is {dtype}, and config.json asks for {self.target.dtype}"
        if not dtype.is_floating_point and dtype != self.target.dtype:
            return f"is {dtype}: this form of quantised checkpoint is not supported; use the original weights"
        return None

    def place(self, tensor: Tensor) -> None:
        """Copy the tensor, or the part that was read of it, cast to the target's dtype."""
        self.target.copy_(tensor if self.expand is None else self.expand(tensor))
