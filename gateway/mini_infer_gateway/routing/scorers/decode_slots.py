"""Prefers smaller batches: a request holds a decode slot and KV cache until it ends, and each one slows all others.

`slot_s` is what one request more in a batch is worth in seconds: a few hundred output tokens times the tens of
microseconds by which another row lengthens every decode step.
"""

from collections.abc import Sequence

from mini_infer_gateway.routing.base import AHEAD_REQUESTS, RUNNING, WAITING, Facts, RoutingRequest
from mini_infer_gateway.routing.seconds import score_of


class DecodeSlots:
    """Seconds for the requests that are there, or will be when this one is."""

    name = "decode_slots"
    needs = (RUNNING, WAITING, AHEAD_REQUESTS)

    def __init__(self, slot_s: float = 0.02) -> None:
        self._slot_s = slot_s

    def score(self, request: RoutingRequest, facts: Facts) -> Sequence[float]:
        """See base.Scorer."""
        tables = (facts[RUNNING], facts[WAITING], facts[AHEAD_REQUESTS])
        return score_of([self._slot_s * sum(counts) for counts in zip(*tables, strict=True)])
