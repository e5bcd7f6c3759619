"""Takes each in turn, whatever the scores: what a plain Service does, to compare with."""

from collections.abc import Sequence
from itertools import count
from random import Random

from mini_infer_gateway.routing.base import Candidate


class RoundRobin:
    """The next one by name."""

    name = "round_robin"

    def __init__(self) -> None:
        self._turns = {False: count(), True: count()}
        """Of those that answer clients, and of those that compute prompts for them."""

    def pick(self, candidates: Sequence[Candidate], totals: Sequence[float], random: Random) -> int:
        """See base.Picker."""
        order = sorted(range(len(candidates)), key=lambda position: candidates[position].endpoint.name)
        return order[next(self._turns[candidates[0].computes_for_others]) % len(order)]
