"""Prefers smaller batches: a request holds a decode slot and KV cache until it ends, and each one slows all others.

`slot_s` is what one request more in a batch is worth in seconds: a few hundred output tokens times the tens of
microseconds by which another row lengthens every decode step. That is what it costs where an endpoint has no time to
spare; as far as the fleet has some, it is worth `idle_slot_s`, less than the prefix of a chat that is left for it.
"""

from collections.abc import Sequence

from mini_infer_gateway.routing.base import QUEUED_TOKENS, RUNNING, WAITING, Facts, RoutingRequest
from mini_infer_gateway.routing.seconds import busy_share, score_of


class DecodeSlots:
    """Seconds for the requests that are there."""

    name = "decode_slots"
    needs = (RUNNING, WAITING, QUEUED_TOKENS)

    def __init__(self, slot_s: float = 0.02, idle_slot_s: float = 0.005) -> None:
        self._slot_s, self._idle_slot_s = slot_s, idle_slot_s

    def score(self, request: RoutingRequest, facts: Facts) -> Sequence[float]:
        """See base.Scorer."""
        slot_s = self._idle_slot_s + busy_share(facts) * (self._slot_s - self._idle_slot_s)
        return score_of([slot_s * (runs + waits) for runs, waits in zip(facts[RUNNING], facts[WAITING], strict=True)])
