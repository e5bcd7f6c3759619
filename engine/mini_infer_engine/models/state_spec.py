"""Computes the shape and size of a slot of recurrent state from what a model keeps of each sequence."""

import math
from dataclasses import dataclass

import torch

from mini_infer_engine.kv_transfer.layout import STATE_UNIT_BYTES

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
    def convolution_bytes(self) -> int:
        """Bytes of the inputs of one layer's convolution."""
        return self.channels * self.width * self.dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes of one layer's recurrent state."""
        return math.prod(self.state_shape) * STATE_DTYPE.itemsize

    @property
    def state_offset(self) -> int:
        """Bytes from the begin of a layer of a slot to its recurrent state, which follows the convolution's inputs."""
        return _padded(self.convolution_bytes)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of a slot, a multiple of `STATE_UNIT_BYTES`, and not 0 even if nothing is kept."""
        return max(STATE_UNIT_BYTES, self.state_offset + _padded(self.state_bytes))

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, all layers."""
        return self.num_layers * self.layer_bytes


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // STATE_UNIT_BYTES) * STATE_UNIT_BYTES
