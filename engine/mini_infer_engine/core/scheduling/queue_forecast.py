"""Predicts when waiting prompts get their first tokens, and decides whether one more may join them. Pure."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from mini_infer_engine.core.scheduling.policy import Pending


@dataclass(frozen=True, slots=True)
class Capacity:
    """The speed at which an engine works off its queue."""

    prefill_tokens_per_s: float
    """Prompt tokens computed a second beside the sequences that decode."""
    free_slots: int
    """Sequences that may start at once."""
    ends_per_s: float
    """Sequences that end a second, each of which makes room for another; 0 if that is not known."""


def first_token_waits_s(queue: Sequence[Pending], capacity: Capacity) -> list[float]:
    """Returns the seconds until each prompt of a queue has its first token. They are computed in order, and those
    without a slot also wait for sequences that end.
    """
    waits_s, tokens, num_waiting = list[float](), 0, 0
    for entry in queue:
        tokens += entry.num_tokens
        num_waiting += 0 if entry.is_running else entry.count
        missing = 0 if entry.is_running else max(0, num_waiting - capacity.free_slots)
        slot_s = missing / capacity.ends_per_s if missing and capacity.ends_per_s else 0.0
        own_s = entry.num_tokens / capacity.prefill_tokens_per_s
        waits_s.append(max(tokens / capacity.prefill_tokens_per_s, slot_s + own_s))
    return waits_s


def excess_s(new: Pending, queue: Sequence[Pending], capacity: Capacity, now_s: float, margin: float = 1.0) -> float:
    """Returns by how many seconds a target would be missed if `new` joined `queue`, sorted by order; 0 if none would.

    The target is its own, or else that of an entry behind it that is met without it. An entry of lower priority does
    not keep it out. Waits count `margin` times.
    """
    place = bisect_left(queue, new.order, key=lambda entry: entry.order)
    joined = [*queue[:place], new, *queue[place:]]
    after = [now_s + margin * wait_s for wait_s in first_token_waits_s(joined, capacity)]
    if after[place] > new.due_s:
        return after[place] - new.due_s
    before = [now_s + margin * wait_s for wait_s in first_token_waits_s(queue, capacity)]
    displaced = [
        later_s - entry.due_s
        for entry, earlier_s, later_s in zip(queue[place:], before[place:], after[place + 1 :], strict=True)
        if earlier_s <= entry.due_s < later_s and entry.order[0] <= new.order[0] and entry.due_s < inf
    ]
    return max(displaced, default=0.0)
