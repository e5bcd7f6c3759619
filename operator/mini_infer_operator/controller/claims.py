"""Which installation of the operator looks after a service, where there are several. Pure; knows no requests.

`status.operator` names it. An installation that finds another one's name asks, by writing its own into
`status.challenger`; the other one, if it lives, removes it. Without an answer in ANSWER_S it takes the service over. So
two installations never both write, nothing is written at rest, and neither needs rights in the other's namespace.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

ANSWER_S = 15.0
BELIEVED_S = 60.0
"""For so long an answer, or the lack of one, holds for all services of that installation: one question a minute is what
it costs, and one that is removed for good has a successor within this and ANSWER_S."""


class Step(Enum):
    """What to do before anything else about a service."""

    WORK = "it is ours"
    CLAIM = "nobody's: write our name, unless somebody was quicker"
    ANSWER = "ours, and somebody asks: remove the question, then work"
    ASK = "another's: ask whether it lives"
    TAKE = "another's, which does not answer: write our name over it"
    WAIT = "another's: leave it alone"


@dataclass(slots=True)
class _Asked:
    key: tuple[str, str]
    at_s: float
    lives: bool | None = None


class Claims:
    """What this installation knows of others."""

    def __init__(self, me: str) -> None:
        self.me = me
        self._asked: dict[str, _Asked] = {}

    def step(self, key: tuple[str, str], status: Mapping[str, Any], now_s: float) -> tuple[Step, float]:
        """What to do about the service, given its stored status, and after how many seconds to look again at most."""
        owner, challenger = status.get("operator", ""), status.get("challenger", "")
        if owner == self.me:
            return (Step.ANSWER if challenger not in {"", self.me} else Step.WORK), 0.0
        if not owner:
            return Step.CLAIM, 0.0
        asked = self._asked.get(owner)
        unheard = asked is not None and asked.lives is None and now_s - asked.at_s >= 2 * ANSWER_S
        if asked is None or unheard or now_s - asked.at_s >= BELIEVED_S:
            self._asked[owner] = _Asked(key, now_s)
            return Step.ASK, ANSWER_S
        if asked.lives is None and key == asked.key:
            if challenger != self.me:
                asked.lives = True
            elif now_s - asked.at_s >= ANSWER_S:
                asked.lives = False
        if asked.lives is None:
            return Step.WAIT, max(0.1, asked.at_s + ANSWER_S - now_s)
        if asked.lives:
            return Step.WAIT, max(0.1, asked.at_s + BELIEVED_S - now_s)
        return Step.TAKE, 0.0

    def forget(self, owner: str) -> None:
        """A question to it could not be written."""
        self._asked.pop(owner, None)
