"""How many tokens a pass guesses: from what was accepted of each sequence, and from what passes were measured to take.

Pure arithmetic on what it is told; seconds come from outside. It knows neither sequences nor devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

FIRST_ACCEPTANCE = 0.7
"""Assumed before anything is known: high enough to try."""
TYPICAL_WEIGHT = 0.01
"""Of a sequence's newest outcome in what is assumed of the next sequence."""
_ACCEPTANCE_WEIGHT, _SECONDS_WEIGHT, _YIELD_WEIGHT = 0.05, 0.25, 0.02
"""Of the newest observation in the running means."""
_LEAST_CHANCE = 0.1
"""That a guess is reached and right, for it to be made at all."""
_PRIOR_COST = 0.05
"""Of one more guess, as a share of a pass without any, until it is measured: low, so that it is measured."""
_MEASURED_FOR = 16_384
"""Passes after which a measurement counts as old, and is made again."""
_HOLD = 8
"""Passes for which a choice stands: to choose anew for each would cost the host more than it brings."""
_HOLD_PLAIN = 32
"""The same where nothing is guessed: until something is, acceptances stay as they are."""
_PROBE_AFTER, _PROBE_AFTER_AT_MOST = 64, 65_536
"""Passes without guesses after which some are made all the same, or it would never be known that texts are easier now.

Twice as many after each time in vain: what a draft has to read first may take as long as many passes of a small model.
"""
_REST = 512
"""Passes without guesses after a trial that would have taken too long."""
_LEAST_GAIN = 1.02
"""Of guessing, as it is expected, for it to be done: measurements are not exact."""
_STEPS = 32
"""Acceptances are told apart by this share of one."""
_ALLOWANCE = 0.01
"""Of all time, what guessing may lose."""
_CREDIT_PASSES = 32
"""Passes without guesses whose time it may lose ahead of the allowance: to find out what it is worth at all."""


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
    """Chooses the number of guesses of each pass of one engine.

    Beside what it expects it keeps an account of what guessing has won and lost against passes without, in seconds:
    however wrong expectations are, it never loses more than its allowance.
    """

    def __init__(self, most: int) -> None:
        self.levels = draft_levels(most)
        steps = [step / _STEPS for step in range(_STEPS + 1)]
        self._expected = {
            level: [expected_tokens(step, worthwhile_drafts(step, level)) for step in steps] for level in self.levels
        }
        self._measured: dict[tuple[int, int], _Measured] = {}
        self._yield = dict.fromkeys(self.levels, 1.0)
        """Tokens that passes have made, as a share of those that were expected."""
        self._foreseen = 0.0
        """Tokens of a pass that the choice in force should make."""
        self._passes = 0
        self._level = self._size = self._left = 0
        """The choice in force, the size of batch that it is for, and passes for which it stands."""
        self.is_trial = False
        """Whether the choice in force is to find out what it is worth."""
        self._guessed_at, self._probe_after = 0, _PROBE_AFTER
        self._previous: tuple[int, int] | None = None
        self._account_s = 0.0
        """Won by guessing and allowed, less what was lost; never above nothing, or what was won would be lost again."""
        self._is_in_debt = False
        """The credit is used up: no guesses before the account is even."""

    def stays_plain(self, num_rows: int, *, masked: bool = False) -> bool:
        """Whether the choice not to guess still stands: then nobody need look at the rows."""
        if self._level or self._left <= 0 or self._size != _size_class(num_rows, masked):
            return False
        self._left -= 1
        self._passes += 1
        return True

    def choose(self, acceptances: Sequence[float], num_rows: int | None = None, *, masked: bool = False) -> int:
        """Guesses for a pass over sequences of these acceptances; 0: it is faster without.

        `num_rows`: of the whole pass, where it has sequences for which nothing is guessed. `masked`: some of its rows
        are held to grammars, which takes the host time for each guess.
        """
        rows = len(acceptances) if num_rows is None else num_rows
        size = _size_class(rows, masked)
        self._passes += 1
        if self._left <= 0 or self._size != size:
            self._level, self._size = self._decide(acceptances, rows, size), size
            is_settled = not self._level and self._known_seconds(size, 0) is not None
            self._left = _HOLD_PLAIN if is_settled else _HOLD
        self._left -= 1
        if self._level:
            self._guessed_at = self._passes
        return self._level

    def rest(self) -> None:
        """A trial would cost too much now: no guesses for a while."""
        self._level, self._left, self._guessed_at = 0, _REST, self._passes

    def _decide(self, acceptances: Sequence[float], rows: int, size: int) -> int:
        plain_s = self._known_seconds(size, 0)
        self.is_trial = True
        if plain_s is None or self._is_in_debt:
            return 0  # first what there is to be beaten
        others, steps = rows - len(acceptances), [int(one * _STEPS) for one in acceptances]
        foreseen = {level: self._foreseen_tokens(level, steps) + others for level in self.levels}
        if self._passes - self._guessed_at > self._probe_after:
            self._probe_after = min(2 * self._probe_after, _PROBE_AFTER_AT_MOST)
            self._yield = {level: (1 + share) / 2 for level, share in self._yield.items()}
            self._foreseen = foreseen[self.levels[0]]
            return self.levels[0]
        best, best_rate = 0, rows / plain_s * _LEAST_GAIN
        for level in self.levels:
            rate = foreseen[level] / self._seconds(size, level)
            if rate > best_rate:
                best, best_rate, self._foreseen = level, rate, foreseen[level]
        self.is_trial = self._known_seconds(size, best) is None
        if best and not self.is_trial:
            self._probe_after = _PROBE_AFTER
        return best

    def _foreseen_tokens(self, level: int, steps: list[int]) -> float:
        expected = self._expected[level]
        return sum([expected[step] for step in steps]) * self._yield[level]

    def observe(
        self,
        num_rows: int,
        drafts: int,
        seconds: float,
        num_tokens: int | None = None,
        *,
        masked: bool = False,
        caught_up: bool = False,
    ) -> None:
        """A pass over so many rows, decodes alone, took so long and made so many tokens (None: one of each row).

        `caught_up`: a draft has read text before it. What a pass takes is counted only where the pass before was of its
        kind: else a part of the time may be that one's, for the host plans while the device computes.
        """
        size = _size_class(num_rows, masked)
        key = size, drafts
        if drafts:
            usual = self._measured.get(key)
            # What held a pass up is not the guesses' fault; a draft's reading is.
            most_s = seconds if usual is None or caught_up else 2 * usual.seconds
            self._charge(size, drafts, num_rows, min(seconds, most_s), num_rows if num_tokens is None else num_tokens)
        self._account_s += _ALLOWANCE * seconds
        if self._account_s >= 0:
            self._account_s, self._is_in_debt = 0.0, False
        if key != self._previous or caught_up:
            self._previous = None if caught_up else key
            return
        known = self._measured.get(key)
        if known is None or self._passes - known.at_pass > _MEASURED_FOR:
            self._measured[key] = _Measured(seconds, self._passes)
            return
        # A pass that was held up tells nothing of the next: one that took far longer counts for little.
        known.seconds += _SECONDS_WEIGHT * (min(seconds, 2 * known.seconds) - known.seconds)
        if self._passes - known.at_pass <= _HOLD:
            known.at_pass = self._passes

    def _charge(self, size: int, drafts: int, num_rows: int, seconds: float, num_tokens: int) -> None:
        """What a pass with guesses has won or lost against passes without that make as many tokens."""
        plain = self._measured.get((size, 0))
        if plain is None:
            return
        self._account_s += num_tokens / num_rows * plain.seconds - seconds
        if drafts == self._level and self._foreseen:
            share = num_tokens / self._foreseen * self._yield[drafts]
            self._yield[drafts] += _YIELD_WEIGHT * (min(share, 2.0) - self._yield[drafts])
        if self._account_s < -_CREDIT_PASSES * plain.seconds:
            self._is_in_debt, self._left, self._level = True, 0, 0

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


def _size_class(num_rows: int, masked: bool) -> int:
    """Batches of about one size, of two halves of each power of two, and of one kind."""
    bits = max(0, num_rows - 1).bit_length()
    is_upper = bits > 4 and num_rows > 3 << (bits - 2)
    return 4 * bits + 2 * is_upper + masked
