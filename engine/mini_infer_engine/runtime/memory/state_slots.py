"""Computes the slots of recurrent state: one for each running sequence, and checkpoints for the prefix cache."""

import logging
from dataclasses import dataclass

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.options.settings import ResolvedSettings

log = logging.getLogger(__name__)

_CHECKPOINTS_PER_SEQUENCE = 4
"""Most checkpoints for each running sequence: its last page, and some prompts that may come again."""


@dataclass(frozen=True, slots=True)
class StateSlots:
    """Slots of recurrent state, and their sizes in bytes."""

    slot_bytes: int
    num_sequences: int
    """Sequences that run at once: each has a slot."""
    num_checkpoints: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return self.slot_bytes * (self.num_sequences + self.num_checkpoints)


NO_SLOTS = StateSlots(0, 0, 0)


def state_slots(slot_bytes: int, kv_bytes: int, settings: ResolvedSettings) -> StateSlots:
    """Returns the slots of a model with recurrent state, out of the memory for its pages and states.

    Running sequences get up to half of it, and checkpoints up to a quarter: fewer sequences run at once than
    `max_num_seqs` where that is too little. Raises ModelError if it is too little for one.
    """
    num_sequences = min(settings.max_num_seqs, kv_bytes // 2 // slot_bytes)
    if not num_sequences:
        raise ModelError(
            f"kv_cache_memory = {kv_bytes:,} bytes: the recurrent state of one sequence takes {slot_bytes:,} bytes, "
            f"and states get half of this memory: set at least {2 * slot_bytes:,}."
        )
    if num_sequences < settings.max_num_seqs:
        log.warning(
            "max_num_seqs limited from %d to %d: the recurrent state of a sequence takes %d bytes (kv_cache_memory)",
            settings.max_num_seqs,
            num_sequences,
            slot_bytes,
        )
    if not settings.enable_prefix_caching:
        return StateSlots(slot_bytes, num_sequences, 0)
    num_checkpoints = min(_CHECKPOINTS_PER_SEQUENCE * num_sequences, kv_bytes // 4 // slot_bytes)
    if not num_checkpoints:
        log.warning("prefix caching is off: kv_cache_memory has no room for a checkpoint of recurrent state")
    return StateSlots(slot_bytes, num_sequences, num_checkpoints)


def host_states_in(swap_bytes: int, slot_bytes: int) -> int:
    """Returns the states of preempted sequences that half of the main memory for swapping has; pages get the rest.

    Raises ModelError if it is too little for one.
    """
    if not swap_bytes or not slot_bytes:
        return 0
    if not (count := swap_bytes // 2 // slot_bytes):
        raise ModelError(
            f"kv_swap_memory = {swap_bytes:,} bytes on each rank: the recurrent state of one sequence takes "
            f"{slot_bytes:,} bytes, and states get half of this memory: set at least {2 * slot_bytes:,}."
        )
    return count
