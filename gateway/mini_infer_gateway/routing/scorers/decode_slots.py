"""Prefers smaller batches: a request occupies a decode slot and KV cache until it ends, and each one slows all others.

`slot_s` is the cost of one more request in a batch, in seconds: a few hundred output tokens times the tens of
microseconds by which another row lengthens every decode step. That is the cost on an endpoint without spare time. As
far as the fleet has spare time, the cost is `idle_slot_s`, which is less than the chat prefix that would be given up
for it.
"""

from collections.abc import Sequence

from mini_infer_gateway.routing.base import QUEUED_TOKENS, RUNNING, WAITING, Features, RoutingRequest
from mini_infer_gateway.routing.seconds import busy_share, score_of


class DecodeSlots:
    """Scores the seconds that the present requests cost."""

    name = "decode_slots"
    needs = (RUNNING, WAITING, QUEUED_TOKENS)

    def __init__(self, slot_s: float = 0.02, idle_slot_s: float = 0.005) -> None:
        self._slot_s, self._idle_slot_s = slot_s, idle_slot_s

    def score(self, request: RoutingRequest, features: Features) -> Sequence[float]:
        """Scores each candidate by its running and waiting requests."""
        slot_s = self._idle_slot_s + busy_share(features) * (self._slot_s - self._idle_slot_s)
        return score_of(
            [slot_s * (runs + waits) for runs, waits in zip(features[RUNNING], features[WAITING], strict=True)]
        )
