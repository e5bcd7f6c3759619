"""Takes the highest total; at random among equals, so that gateways that know the same do not march in step."""

from collections.abc import Sequence
from random import Random

from mini_infer_gateway.routing.base import Candidate

EQUAL = 1e-9


class HighestScore:
    """The best candidate."""

    name = "random"
    """The reason where there is no scorer: then all are equal."""

    def pick(self, candidates: Sequence[Candidate], totals: Sequence[float], random: Random) -> int:
        """See base.Picker."""
        best = max(totals)
        equals = [position for position, total in enumerate(totals) if best - total <= EQUAL]
        return equals[0] if len(equals) == 1 else random.choice(equals)
