"""What passes take, as measured: of each kind the wall time of a few passes in a row, and of a draft's reading.

Wall time from commit to commit has the host's part in it, which a single pass's own time has not. It knows neither
devices nor what the times are for.
"""

from dataclasses import dataclass, field
from functools import lru_cache

_PASSES, _WINDOWS = 3, 4
"""Passes of a window, and windows that are kept."""

_PRIOR_COST = 0.05
"""Of one more guess, as a share of a pass without any, until it is measured: low, so that it is measured."""


@dataclass(frozen=True, slots=True)
class PassKind:
    """A pass over decodes alone, as far as its time depends on it."""

    rows: int
    drafts: int
    masked: bool = False
    """Some of its rows are held to grammars, which takes the host time for each guess."""
    read: int = 0
    """Tokens that a draft reads before it."""

    size: int = field(init=False)
    """The same number for batches of about one size, two halves of each power of two from 32 on, and of one kind."""
    is_plain: bool = field(init=False)
    """Nothing is guessed, and nothing prepared for it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_plain", not (self.drafts or self.read))
        bits = max(0, self.rows - 1).bit_length()
        is_upper = bits > 4 and self.rows > 3 << (bits - 2)
        object.__setattr__(self, "size", 4 * bits + 2 * is_upper + self.masked)


@lru_cache(maxsize=1024)
def pass_kind(rows: int, drafts: int, masked: bool = False, read: int = 0) -> PassKind:
    """The same object for the same pass: one is asked for with each pass, and compared with the one before."""
    return PassKind(rows, drafts, masked, read)


@dataclass(frozen=True, slots=True)
class GuessCosts:
    """What a runner has measured of its own before the first request."""

    pass_s: dict[tuple[int, int], float] = field(default_factory=dict)
    """Seconds of the device for passes of up to so many rows and so many guesses: no pass takes less."""
    reading: tuple[tuple[int, float], ...] = ()
    """Tokens that the draft has read, and the seconds that it took."""

    def least_s(self, rows: int, drafts: int) -> float:
        """Of a pass; 0: it was not measured."""
        fitting = [known for known, guesses in self.pass_s if guesses == drafts and known >= rows]
        return self.pass_s[min(fitting), drafts] if fitting else 0.0


@dataclass(slots=True)
class PassTimes:
    """Of passes of one kind."""

    measured_at: int = 0
    """By the clock of who measures."""
    windows: list[float] = field(default_factory=list)
    """Seconds of a pass, by the mean of each window, the latest last."""
    seconds: float = 0.0
    """Of a pass that nothing holds up: the lower quartile of these. The first passes of a process are slow ones."""
    _sum_s: float = 0.0
    _passes: int = 0

    def add(self, seconds: float, now: int, passes: int = 1) -> None:
        """One more pass, or a few in a row, all of whose time is their own kind's."""
        self._sum_s += seconds
        self._passes += passes
        if self._passes >= _PASSES:
            self.close(now)

    def close(self, now: int) -> None:
        """The window is as long as it gets."""
        if self._passes:
            self.windows = [*self.windows[1 - _WINDOWS :], self._sum_s / self._passes]
            self.seconds = sorted(self.windows)[len(self.windows) // 4]
            self._sum_s, self._passes, self.measured_at = 0.0, 0, now


class ReadingTimes:
    """Seconds that a draft's reading of text adds, by its tokens: a straight line through what was measured."""

    _FORGETS = 0.9
    """Of the weight of all before, with each measurement."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = self._tokens_2 = self._product = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """So many tokens took so long."""
        keep = self._FORGETS
        self._weight = keep * self._weight + 1
        self._tokens = keep * self._tokens + tokens
        self._seconds = keep * self._seconds + seconds
        self._tokens_2 = keep * self._tokens_2 + tokens * tokens
        self._product = keep * self._product + tokens * seconds

    def seconds(self, tokens: int) -> float:
        """Expected; nothing before anything was measured."""
        if not tokens or not self._weight:
            return 0.0
        mean_tokens, mean_s = self._tokens / self._weight, self._seconds / self._weight
        variance = self._tokens_2 / self._weight - mean_tokens**2
        slope = (self._product / self._weight - mean_tokens * mean_s) / variance if variance > 1 else 0.0
        slope = max(0.0, min(slope, mean_s / max(1.0, mean_tokens)))
        return mean_s + slope * (tokens - mean_tokens)

    @property
    def mean_s(self) -> float:
        """Of a reading."""
        return self._seconds / self._weight if self._weight else 0.0


def assumed_seconds(drafts: int, measured: dict[int, float]) -> float:
    """Of a pass with so many guesses, from those with fewer and more; of none at least it is known."""
    below = max(level for level in measured if level <= drafts)
    above = min((level for level in measured if level > drafts), default=None)
    if above is None:
        return measured[below] * (1 + _PRIOR_COST * drafts) / (1 + _PRIOR_COST * below)
    return measured[below] + (measured[above] - measured[below]) * (drafts - below) / (above - below)
