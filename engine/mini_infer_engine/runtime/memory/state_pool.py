"""Stores the recurrent state of sequences in slots: of those that run by their slot, then checkpoints of prefixes, then
those before draft tokens. Knows addresses.

All layers of a slot lie together so that a slot can be copied or sent in one piece, as a page can.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mini_infer_engine.core.batch import Row, Transfers
from mini_infer_engine.models.state_spec import STATE_DTYPE, StateSpec
from mini_infer_engine.runtime.memory.state_slots import StateSlots
from mini_infer_engine.runtime.memory.zero_memory import zeros


class StatePool:
    """The slots of recurrent state of one engine."""

    def __init__(self, spec: StateSpec, slots: StateSlots, device: torch.device, num_host_states: int = 0) -> None:
        """Allocates the slots, and room for `num_host_states` of preempted sequences in main memory."""
        self.spec, self.slots = spec, slots
        sizes = (slots.num_slots, spec.num_layers)
        self.convolutions = zeros((*sizes, spec.channels, spec.width), spec.dtype, device)
        """The last inputs of each convolution, the latest at the end: [slots, layers, channels, width]."""
        self.states = zeros((*sizes, *spec.state_shape), STATE_DTYPE, device)
        """The states: [slots, layers, *state_shape]."""
        on_gpu = device.type == "cuda"
        self.host_states = [
            torch.empty((num_host_states, *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=on_gpu)
            for tensor in self.tensors
        ]

    @property
    def tensors(self) -> list[Tensor]:
        """The memory of all slots."""
        return [self.convolutions, self.states]

    def checkpoint_slot(self, checkpoint: int) -> int:
        """Returns the slot of a checkpoint."""
        return self.slots.num_sequences + checkpoint

    def draft_checkpoints(self, slot: int, num_drafts: int) -> list[tuple[int, int]]:
        """Returns pairs (tokens, checkpoint) for a row with so many draft tokens: one before each of them.

        They are behind the checkpoints of prefixes, and each slot has its own.
        """
        first = self.slots.num_checkpoints + slot * self.slots.num_drafts
        return [(place + 1, first + place) for place in range(num_drafts)]

    def roll_back(self, slot: int, num_tokens: int) -> None:
        """Brings the state after the first `num_tokens` of a row with draft tokens to its slot: the others are
        rejected.
        """
        ((_, checkpoint),) = self.draft_checkpoints(slot, num_tokens)[-1:]
        self._copy(self.checkpoint_slot(checkpoint), slot)

    def swap(self, transfers: Transfers) -> None:
        """Queues copies of states to main memory and from there."""
        for swap in transfers.states_out:
            for tensor, host in zip(self.tensors, self.host_states, strict=True):
                host[swap.host_state].copy_(tensor[swap.slot], non_blocking=True)
        for swap in transfers.states_in:
            for tensor, host in zip(self.tensors, self.host_states, strict=True):
                tensor[swap.slot].copy_(host[swap.host_state], non_blocking=True)

    def resume(self, rows: Sequence[Row]) -> None:
        """Brings the states before these rows to the slots of their sequences: checkpoints, or zeros at the begin."""
        for row in rows:
            if not row.start:
                for tensor in self.tensors:
                    tensor[row.slot].zero_()
            elif row.state_source is not None:
                self._copy(self.checkpoint_slot(row.state_source), row.slot)

    def keep_checkpoints(self, rows: Sequence[Row]) -> None:
        """Copies the states after these rows of one token to their checkpoints."""
        for row in rows:
            for _, checkpoint in row.checkpoints:
                self._copy(row.slot, self.checkpoint_slot(checkpoint))

    def _copy(self, source: int, target: int) -> None:
        """Copies a whole slot. Slots are large: one copy each is no overhead."""
        for tensor in self.tensors:
            tensor[target].copy_(tensor[source])
