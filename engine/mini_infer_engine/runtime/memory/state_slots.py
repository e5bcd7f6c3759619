"""Computes the slots of recurrent state: one for each running sequence, and checkpoints for the prefix cache."""

import logging
import math
from dataclasses import dataclass

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.options.settings import ResolvedSettings
from mini_infer_engine.config.options.speculation import speculation_of

log = logging.getLogger(__name__)

_CHECKPOINTS_PER_SEQUENCE = 4
"""Most checkpoints for each running sequence: its last page, and some prompts that may come again."""

_LEAST_SHARE, _MOST_SHARE = 0.25, 0.8
"""The share of the memory for states of running sequences is between these."""
_USUAL_TOKENS = 2048
"""The tokens of a sequence whose pages and state should run out together."""


@dataclass(frozen=True, slots=True)
class StateSlots:
    """Slots of recurrent state, and their sizes in bytes."""

    slot_bytes: int
    num_sequences: int
    """Sequences that run at once: each has a slot."""
    num_checkpoints: int
    num_drafts: int = 0
    """Most draft tokens of a running sequence: it has a slot more for each, so that the state can go back behind those
    that are rejected.
    """

    @property
    def num_slots(self) -> int:
        """All slots."""
        return self.num_sequences * (1 + self.num_drafts) + self.num_checkpoints

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return self.slot_bytes * self.num_slots


NO_SLOTS = StateSlots(0, 0, 0)


def running_share(slot_bytes: int, token_bytes: float) -> float:
    """Returns the share of the memory for pages and states that states of running sequences may take.

    It is the state's share of what a sequence of usual length takes, so that states and pages run out together, within
    limits: keys and values of long sequences, and checkpoints, keep a fifth, and short sequences run side by side.
    """
    return max(_LEAST_SHARE, min(_MOST_SHARE, slot_bytes / (slot_bytes + _USUAL_TOKENS * token_bytes)))


def state_slots(slot_bytes: int, token_bytes: float, kv_bytes: int, settings: ResolvedSettings) -> StateSlots:
    """Returns the slots of a model with recurrent state, out of the memory for its pages and states.

    Running sequences get up to their share, and checkpoints up to a quarter, or half of what is left: fewer sequences
    run at once than `max_num_seqs` where that is too little. A token's keys and values take `token_bytes`. Raises
    ModelError if the share is too little for one state.
    """
    speculation = speculation_of(settings)
    num_drafts = 0 if speculation is None else speculation.num_tokens
    running_bytes = slot_bytes * (1 + num_drafts)
    share = running_share(running_bytes, token_bytes)
    num_sequences = min(settings.max_num_seqs, int(kv_bytes * share) // running_bytes)
    if not num_sequences:
        raise ModelError(
            f"kv_cache_memory = {kv_bytes:,} bytes: the recurrent state of one sequence takes {running_bytes:,} bytes, "
            f"and states get {share:.0%} of this memory: set at least {math.ceil(running_bytes / share):,}."
        )
    if num_sequences < settings.max_num_seqs:
        log.warning(
            "max_num_seqs limited from %d to %d: the recurrent state of a sequence takes %d bytes (kv_cache_memory)",
            settings.max_num_seqs,
            num_sequences,
            running_bytes,
        )
    if not settings.enable_prefix_caching:
        return StateSlots(slot_bytes, num_sequences, 0, num_drafts)
    left = min(kv_bytes // 4, (kv_bytes - num_sequences * running_bytes) // 2)
    num_checkpoints = min(_CHECKPOINTS_PER_SEQUENCE * num_sequences, left // slot_bytes)
    if not num_checkpoints:
        log.warning("prefix caching is off: kv_cache_memory has no room for a checkpoint of recurrent state")
    return StateSlots(slot_bytes, num_sequences, num_checkpoints, num_drafts)


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
