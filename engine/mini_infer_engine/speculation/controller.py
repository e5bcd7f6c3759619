"""How many tokens a pass guesses: from what was accepted of each sequence, and from what passes were measured to take.

Pure arithmetic on what it is told; seconds come from outside. It knows neither sequences nor devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

FIRST_ACCEPTANCE = 0.7
"""Assumed of a sequence of which nothing is known: high enough to try."""
_ACCEPTANCE_WEIGHT, _SECONDS_WEIGHT = 0.1, 0.25
"""Of the newest observation in the running means."""
_LEAST_CHANCE = 0.2
"""That a guess is reached and right, for it to be made at all."""
_PRIOR_COST = 0.05
"""Of one more guess, as a share of a pass without any, until it is measured: low, so that it is measured."""
_MEASURED_FOR = 512
"""Choices after which a measurement counts as old, and its number of guesses is tried again."""


def draft_levels(most: int) -> tuple[int, ...]:
    """The numbers of guesses that a pass may have; each has CUDA graphs of its own."""
    return tuple(sorted({1, min(3, most), most}))


def with_outcome(acceptance: float, drafted: int, accepted: int) -> float:
    """A row's chance that a guess is right, after `accepted` of `drafted` were; those behind a wrong one are moot."""
    for right in [True] * accepted + [False] * (accepted < drafted):
        acceptance += _ACCEPTANCE_WEIGHT * (right - acceptance)
    return acceptance


def expected_tokens(acceptance: float, drafts: int) -> float:
    """Tokens that a pass makes of a sequence (Leviathan et al., arXiv:2211.17192, equation 1)."""
    if acceptance >= 1.0:
        return drafts + 1.0
    return float((1.0 - acceptance ** (drafts + 1)) / (1.0 - acceptance))


def worthwhile_drafts(acceptance: float, most: int) -> int:
    """Guesses of a sequence that have a chance to count."""
    drafts, chance = 0, acceptance
    while drafts < most and chance >= _LEAST_CHANCE:
        drafts, chance = drafts + 1, chance * acceptance
    return drafts


@dataclass(slots=True)
class _Measured:
    seconds: float
    at_choice: int


class DraftController:
    """Chooses the number of guesses of each pass of one engine."""

    def __init__(self, most: int) -> None:
        self.levels = draft_levels(most)
        self._measured: dict[tuple[int, int], _Measured] = {}
        self._choices = 0

    def choose(self, acceptances: Sequence[float], num_rows: int | None = None) -> int:
        """Guesses for a pass over sequences of these acceptances; 0: it is faster without.

        `num_rows`: of the whole pass, where it has sequences for which nothing is guessed.
        """
        rows = len(acceptances) if num_rows is None else num_rows
        others = rows - len(acceptances)
        self._choices += 1
        rates = {0: rows / self._seconds(rows, 0)}
        for level in self.levels:
            tokens = sum(expected_tokens(one, worthwhile_drafts(one, level)) for one in acceptances)
            rates[level] = (tokens + others) / self._seconds(rows, level)
        return max(rates, key=rates.__getitem__)  # of equals the fewest

    def observe(self, num_rows: int, drafts: int, seconds: float) -> None:
        """A pass over so many rows, decodes alone, took so long."""
        key = _size_class(num_rows), drafts
        known = self._measured.get(key)
        if known is None or self._choices - known.at_choice > _MEASURED_FOR:
            self._measured[key] = _Measured(seconds, self._choices)
            return
        # A pass that was held up tells nothing of the next: one that took far longer counts for little.
        known.seconds += _SECONDS_WEIGHT * (min(seconds, 2 * known.seconds) - known.seconds)
        known.at_choice = self._choices

    def _seconds(self, num_rows: int, drafts: int) -> float:
        size = _size_class(num_rows)
        own = self._measured.get((size, drafts))
        if own is not None and self._choices - own.at_choice <= _MEASURED_FOR:
            return own.seconds
        return self._assumed(size, drafts)

    def _assumed(self, size: int, drafts: int) -> float:
        """From the nearest number of guesses that was measured; nothing is known: a pass without takes 1."""
        others = {
            level: self._measured[(size, level)] for level in (0, *self.levels) if (size, level) in self._measured
        }
        others.pop(drafts, None)
        if not others:
            return 1.0 + _PRIOR_COST * drafts
        nearest = min(others, key=lambda level: abs(level - drafts))
        return others[nearest].seconds * (1 + _PRIOR_COST * drafts) / (1 + _PRIOR_COST * nearest)


def _size_class(num_rows: int) -> int:
    """Batches of about one size, by powers of two."""
    return max(0, num_rows - 1).bit_length()
