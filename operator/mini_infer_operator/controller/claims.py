"""Decides which of several installations of the operator reconciles a service. Pure; sends no requests.

`status.operator` names that installation. An installation that finds another one's name there writes its own name into
`status.challenger`; the other one removes it if it is alive. If it does not within ANSWER_S, the challenger takes the
service over. So two installations never both write, an idle cluster sees no writes, and no installation needs rights in
the other's namespace.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

ANSWER_S = 15.0
BELIEVED_S = 60.0
"""Seconds for which an answer, or the lack of one, counts for all services of that installation. So a challenge is sent
once a minute at most, and an installation that was removed for good has a successor within BELIEVED_S + ANSWER_S.
"""


class Step(Enum):
    """A step that ownership requires before a service is reconciled."""

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
    """The last challenge to each other installation, and whether it was answered."""

    def __init__(self, me: str) -> None:
        self.me = me
        self._asked: dict[str, _Asked] = {}

    def step(self, key: tuple[str, str], status: Mapping[str, Any], now_s: float) -> tuple[Step, float]:
        """Returns the next step for a service with this stored status, and after how many seconds to check again."""
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
        """Drops the challenge to `owner`, because it could not be written."""
        self._asked.pop(owner, None)
