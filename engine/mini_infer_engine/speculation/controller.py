"""How many tokens a pass guesses: from what was accepted of each sequence, and from what passes were measured to take.

Pure arithmetic on what it is told; seconds come from outside. It knows neither sequences nor devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

FIRST_ACCEPTANCE = 0.7
"""Assumed before anything is known: high enough to try."""
TYPICAL_WEIGHT = 0.01
"""Of a sequence's newest outcome in what is assumed of the next sequence."""
_ACCEPTANCE_WEIGHT, _SECONDS_WEIGHT = 0.1, 0.25
"""Of the newest observation in the running means."""
_LEAST_CHANCE = 0.2
"""That a guess is reached and right, for it to be made at all."""
_PRIOR_COST = 0.05
"""Of one more guess, as a share of a pass without any, until it is measured: low, so that it is measured."""
_MEASURED_FOR = 16_384
"""Passes after which a measurement counts as old, and is made again."""
_HOLD = 8
"""Passes for which a choice stands: to choose anew for each would cost the host more than it brings."""
_PROBE_AFTER, _PROBE_AFTER_AT_MOST = 512, 65_536
"""Passes without guesses after which some are made all the same, or it would never be known that texts are easier now.

Twice as many after each time in vain: what a draft has to read first may take as long as many passes of a small model.
"""
_LEAST_GAIN = 1.02
"""Of guessing, as it is expected, for it to be done: measurements are not exact."""
_STEPS = 32
"""Acceptances are told apart by this share of one."""


def draft_levels(most: int) -> tuple[int, ...]:
    """The numbers of guesses that a pass may have; each has CUDA graphs of its own."""
    return tuple(sorted({1, min(3, most), most}))


def with_outcome(acceptance: float, drafted: int, accepted: int, weight: float = _ACCEPTANCE_WEIGHT) -> float:
    """A row's chance that a guess is right, after `accepted` of `drafted` were; those behind a wrong one are moot."""
    for right in [True] * accepted + [False] * (accepted < drafted):
        acceptance += weight * (right - acceptance)
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
    at_pass: int


class DraftController:
    """Chooses the number of guesses of each pass of one engine."""

    def __init__(self, most: int) -> None:
        self.levels = draft_levels(most)
        steps = [step / _STEPS for step in range(_STEPS + 1)]
        self._expected = {
            level: [expected_tokens(step, worthwhile_drafts(step, level)) for step in steps] for level in self.levels
        }
        self._measured: dict[tuple[int, int], _Measured] = {}
        self._passes = 0
        self._level = self._size = self._left = 0
        """The choice in force, the size of batch that it is for, and passes for which it stands."""
        self.is_trial = False
        """Whether the choice in force is to find out what it is worth."""
        self._guessed_at, self._probe_after = 0, _PROBE_AFTER
        self._previous: tuple[int, int] | None = None

    def stays_plain(self, num_rows: int) -> bool:
        """Whether the choice not to guess still stands: then nobody need look at the rows."""
        if self._level or self._left <= 0 or self._size != _size_class(num_rows):
            return False
        self._left -= 1
        self._passes += 1
        return True

    def choose(self, acceptances: Sequence[float], num_rows: int | None = None) -> int:
        """Guesses for a pass over sequences of these acceptances; 0: it is faster without.

        `num_rows`: of the whole pass, where it has sequences for which nothing is guessed.
        """
        rows = len(acceptances) if num_rows is None else num_rows
        size = _size_class(rows)
        self._passes += 1
        if self._left <= 0 or self._size != size:
            self._level, self._size, self._left = self._decide(acceptances, rows, size), size, _HOLD
        self._left -= 1
        if self._level:
            self._guessed_at = self._passes
        return self._level

    def rest(self) -> None:
        """A trial would cost too much now: no guesses for a while."""
        self._level, self._left, self._guessed_at = 0, _PROBE_AFTER, self._passes

    def _decide(self, acceptances: Sequence[float], rows: int, size: int) -> int:
        plain_s = self._known_seconds(size, 0)
        self.is_trial = True
        if plain_s is None:
            return 0  # first what there is to be beaten
        if self._passes - self._guessed_at > self._probe_after:
            self._probe_after = min(2 * self._probe_after, _PROBE_AFTER_AT_MOST)
            return self.levels[0]
        others, steps = rows - len(acceptances), [int(one * _STEPS) for one in acceptances]
        best, best_rate = 0, rows / plain_s * _LEAST_GAIN
        for level in self.levels:
            expected = self._expected[level]
            rate = (sum([expected[step] for step in steps]) + others) / self._seconds(size, level)
            if rate > best_rate:
                best, best_rate = level, rate
        self.is_trial = self._known_seconds(size, best) is None
        if best and not self.is_trial:
            self._probe_after = _PROBE_AFTER
        return best

    def observe(self, num_rows: int, drafts: int, seconds: float) -> None:
        """A pass over so many rows, decodes alone, took so long. Counted only where the pass before was of its kind.

        Else a part of the time may be that one's, for the host plans while the device computes.
        """
        key = _size_class(num_rows), drafts
        if key != self._previous:
            self._previous = key
            return
        known = self._measured.get(key)
        if known is None or self._passes - known.at_pass > _MEASURED_FOR:
            self._measured[key] = _Measured(seconds, self._passes)
            return
        # A pass that was held up tells nothing of the next: one that took far longer counts for little.
        known.seconds += _SECONDS_WEIGHT * (min(seconds, 2 * known.seconds) - known.seconds)
        if self._passes - known.at_pass <= _HOLD:
            known.at_pass = self._passes

    def interrupt(self) -> None:
        """A pass of another kind was made: the next one's time may be that one's in part."""
        self._previous = None

    def _known_seconds(self, size: int, drafts: int) -> float | None:
        own = self._measured.get((size, drafts))
        return own.seconds if own is not None and self._passes - own.at_pass <= _MEASURED_FOR else None

    def _seconds(self, size: int, drafts: int) -> float:
        """Measured, or assumed from the nearest number of guesses that was."""
        own = self._known_seconds(size, drafts)
        if own is not None:
            return own
        known = {level: seconds for level in (0, *self.levels) if (seconds := self._known_seconds(size, level))}
        nearest = min(known, key=lambda level: abs(level - drafts))
        return known[nearest] * (1 + _PRIOR_COST * drafts) / (1 + _PRIOR_COST * nearest)


def _size_class(num_rows: int) -> int:
    """Batches of about one size, by powers of two."""
    return max(0, num_rows - 1).bit_length()
