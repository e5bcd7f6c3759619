"""Picks the highest total, at random among equals, so that gateways with equal knowledge do not choose in step."""

from collections.abc import Sequence
from random import Random

from mini_infer_gateway.routing.base import Candidate

EQUAL = 1e-9


class HighestScore:
    """Picks the best candidate."""

    name = "random"
    """The reason if there is no scorer: all candidates are equal then."""

    def pick(self, candidates: Sequence[Candidate], totals: Sequence[float], random: Random) -> int:
        """Returns the position of the highest total, a random one of equals."""
        best = max(totals)
        equals = [position for position, total in enumerate(totals) if best - total <= EQUAL]
        return equals[0] if len(equals) == 1 else random.choice(equals)
