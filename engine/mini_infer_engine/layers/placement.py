"""Where a checkpoint's tensor goes in a model's memory, and what becomes of it on its way there."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Placement:
    """One named tensor of a checkpoint. Loaders call `obstacle`, then `place`."""

    target: Tensor
    """What it fills; a view of a larger weight where several tensors are packed into one."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes that the checkpoint's tensor may have; empty: the target's own."""
    expand: Callable[[Tensor], Tensor] | None = None
    """From the checkpoint's form to the target's; None: as it is."""

    def obstacle(self, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
        """Why a tensor cannot be placed here, for people; None: it can."""
        allowed = self.shapes or (tuple(self.target.shape),)
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
        """Copy it, cast to the target's dtype."""
        self.target.copy_(tensor if self.expand is None else self.expand(tensor))
