"""Stores the recurrent state of sequences in slots: of those that run by their slot, then checkpoints. Knows addresses.

All layers of a slot lie together so that a slot can be copied or sent in one piece, as a page can.
"""

import torch
from torch import Tensor

from mini_infer_engine.models.state_spec import STATE_DTYPE, StateSpec
from mini_infer_engine.runtime.memory.state_slots import StateSlots
from mini_infer_engine.runtime.memory.zero_memory import zeros


class StatePool:
    """The slots of recurrent state of one engine."""

    def __init__(self, spec: StateSpec, slots: StateSlots, device: torch.device) -> None:
        self.spec, self.slots = spec, slots
        num_slots = slots.num_sequences + slots.num_checkpoints
        sizes = (num_slots, spec.num_layers)
        self.convolutions = zeros((*sizes, spec.channels, spec.width), spec.dtype, device)
        """The last inputs of each convolution, the latest at the end: [slots, layers, channels, width]."""
        self.states = zeros((*sizes, *spec.state_shape), STATE_DTYPE, device)
        """The states: [slots, layers, *state_shape]."""

    @property
    def tensors(self) -> list[Tensor]:
        """The memory of all slots."""
        return [self.convolutions, self.states]

    def checkpoint_slot(self, checkpoint: int) -> int:
        """Returns the slot of a checkpoint."""
        return self.slots.num_sequences + checkpoint
