"""Picks each candidate in turn, whatever the scores, as a plain Service does: a baseline for comparison."""

from collections.abc import Sequence
from itertools import count
from random import Random

from mini_infer_gateway.routing.base import Candidate


class RoundRobin:
    """Picks the next candidate in order of names."""

    name = "round_robin"

    def __init__(self) -> None:
        self._counters = {False: count(), True: count()}
        """Separate counters for endpoints that answer clients, and for those that compute prompts for them."""

    def pick(self, candidates: Sequence[Candidate], totals: Sequence[float], random: Random) -> int:
        """Returns the position of the next candidate in order of names."""
        order = sorted(range(len(candidates)), key=lambda position: candidates[position].endpoint.name)
        return order[next(self._counters[candidates[0].computes_for_others]) % len(order)]
