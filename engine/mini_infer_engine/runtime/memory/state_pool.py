"""Stores the recurrent state of sequences in slots: of those that run by their slot, then checkpoints of prefixes, then
those before draft tokens. Knows addresses.

All layers of a slot lie together so that a slot can be copied or sent in one piece, as a page can.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from mini_infer_engine.core.batch import Row, Transfers
from mini_infer_engine.kv_transfer.layout import STATE_UNIT_BYTES, KVLayout, KVMemory
from mini_infer_engine.models.state_spec import STATE_DTYPE, StateSpec
from mini_infer_engine.runtime.memory.cache_memory import cache_memory
from mini_infer_engine.runtime.memory.state_slots import StateSlots
from mini_infer_engine.runtime.memory.swap_digests import SwapDigests


class StatePool:
    """The slots of recurrent state of one engine."""

    def __init__(
        self,
        spec: StateSpec,
        slots: StateSlots,
        device: torch.device,
        num_host_states: int = 0,
        *,
        is_shared: bool = False,
    ) -> None:
        """Allocates the slots, and room for `num_host_states` of preempted sequences in main memory.

        With `is_shared`, other processes can map the slots if they are in main memory.
        """
        self.spec, self.slots = spec, slots
        sizes = (slots.num_slots, spec.num_layers, spec.layer_bytes)
        self.storage, self._file = cache_memory(sizes, torch.uint8, device, is_shared=is_shared)
        """The memory of all slots: [slots, layers, bytes]."""
        convolutions = self.storage[:, :, : spec.convolution_bytes].view(spec.dtype)
        self.convolutions = convolutions.view(*sizes[:2], spec.channels, spec.width)
        """The last inputs of each convolution, the latest at the end: [slots, layers, channels, width]."""
        states = self.storage[:, :, spec.state_offset : spec.state_offset + spec.state_bytes].view(STATE_DTYPE)
        self.states = states.view(*sizes[:2], *spec.state_shape)
        """The states: [slots, layers, *state_shape]."""
        self.host_states = torch.empty(
            (num_host_states, *sizes[1:]), dtype=torch.uint8, pin_memory=device.type == "cuda"
        )

    def memory(self) -> KVMemory:
        """Returns the address and layout of the slots of sequences and checkpoints, for KV transfer."""
        device, spec = self.storage.device, self.spec
        layout = KVLayout(
            num_layers=spec.num_layers,
            halves=1,
            page_size=1,
            num_heads=spec.layer_bytes // STATE_UNIT_BYTES,
            head_bytes=STATE_UNIT_BYTES,
            dtype=f"states after {str(spec.dtype).removeprefix('torch.')}",
        )
        return KVMemory(
            address=self.storage.data_ptr(),
            num_pages=self.slots.num_sequences + self.slots.num_checkpoints,
            device="cuda" if device.type == "cuda" else "cpu",
            device_index=device.index or 0,
            layout=layout,
            file=self._file,
        )

    def checkpoint_slot(self, checkpoint: int) -> int:
        """Returns the slot of a checkpoint."""
        return self.slots.num_sequences + checkpoint

    def checkpoint_words(self) -> Tensor:  # [checkpoints, words] int64
        """Returns the memory of the checkpoints of prefixes, for copies to lower tiers."""
        first, count = self.slots.num_sequences, self.slots.num_checkpoints
        return self.storage[first : first + count].flatten(1).view(torch.int64)

    @property
    def first_draft_slot(self) -> int:
        """The slot of the state before the first draft token of a sequence at slot 0."""
        return self.checkpoint_slot(self.slots.num_checkpoints)

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
            self.host_states[swap.host_state].copy_(self.storage[swap.slot], non_blocking=True)
        for swap in transfers.states_in:
            self.storage[swap.slot].copy_(self.host_states[swap.host_state], non_blocking=True)

    @cached_property
    def _swap_digests(self) -> SwapDigests:
        """The digests of states in main memory."""
        return SwapDigests([self.storage.flatten(1).view(torch.int64)], len(self.host_states))

    def prepare_swap(self) -> None:
        """Compiles on a GPU what swapping needs."""
        if len(self.host_states):
            self._swap_digests.prepare()

    def record(self, transfers: Transfers) -> None:
        """Makes digests of the states that have left."""
        out = transfers.states_out
        self._swap_digests.left([swap.slot for swap in out], [swap.host_state for swap in out])

    def check(self, transfers: Transfers) -> Tensor:  # [states_in] int64
        """Returns zero for each state that has come back as it left."""
        back = transfers.states_in
        return self._swap_digests.returned([swap.slot for swap in back], [swap.host_state for swap in back])

    def resume(self, rows: Sequence[Row]) -> None:
        """Brings the states before these rows to the slots of their sequences: checkpoints, or zeros at the begin."""
        for row in rows:
            if not row.start:
                self.storage[row.slot].zero_()
            elif row.state_source is not None:
                self._copy(self.checkpoint_slot(row.state_source), row.slot)

    def keep_checkpoints(self, rows: Sequence[Row]) -> None:
        """Copies the states after these rows of one token to their checkpoints."""
        for row in rows:
            for _, checkpoint in row.checkpoints:
                self._copy(row.slot, self.checkpoint_slot(checkpoint))

    def _copy(self, source: int, target: int) -> None:
        """Copies a whole slot. Slots are large: one copy each is no overhead."""
        self.storage[target].copy_(self.storage[source])
