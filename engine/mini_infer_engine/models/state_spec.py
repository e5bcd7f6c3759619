"""Computes the shape and size of a slot of recurrent state from what a model keeps of each sequence."""

import math
from dataclasses import dataclass

import torch

STATE_DTYPE = torch.float32
"""The dtype of recurrent states: thousands of tokens are added up in one, and each is rounded."""


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The content of one slot: the state of one sequence in all recurrent layers."""

    num_layers: int
    channels: int
    """The channels of a layer's causal convolution."""
    width: int
    """Tokens before the current one that the convolution sees."""
    state_shape: tuple[int, ...]
    """The shape of a layer's recurrent state."""
    dtype: torch.dtype
    """The dtype of the convolution's inputs; recurrent states have `STATE_DTYPE`."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, all layers."""
        convolution = self.channels * self.width * self.dtype.itemsize
        return self.num_layers * (convolution + math.prod(self.state_shape) * STATE_DTYPE.itemsize)
