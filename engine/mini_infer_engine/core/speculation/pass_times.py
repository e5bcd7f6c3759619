"""Records measured times: the wall time of a few consecutive passes of each kind, and of a draft's reading.

Wall time from commit to commit includes the host's part, which a single pass's own time does not. It knows neither
devices nor the purpose of the times.
"""

from dataclasses import dataclass, field
from functools import lru_cache

_PASSES, _WINDOWS = 3, 4
"""Passes of a window, and windows that are kept."""

_PRIOR_COST = 0.05
"""Assumed cost of one more draft token, as a share of a pass without any, until it is measured: low, so that it is."""


@dataclass(frozen=True, slots=True)
class PassKind:
    """A pass over decodes alone, by the properties that determine its time."""

    rows: int
    drafts: int
    masked: bool = False
    """True if some of its rows have grammars, which takes the host time for each draft token."""
    read: int = 0
    """Tokens that a draft reads before it."""

    size: int = field(init=False)
    """Class of the batch size and of `masked`: one for each power of two, and two halves of each from 32 on."""
    is_plain: bool = field(init=False)
    """True if nothing is drafted, and nothing prepared for it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_plain", not (self.drafts or self.read))
        bits = max(0, self.rows - 1).bit_length()
        is_upper = bits > 4 and self.rows > 3 << (bits - 2)
        object.__setattr__(self, "size", 4 * bits + 2 * is_upper + self.masked)


@lru_cache(maxsize=1024)
def pass_kind(rows: int, drafts: int, masked: bool = False, read: int = 0) -> PassKind:
    """Returns one shared object for equal passes: each pass needs one, and compares it with the one before."""
    return PassKind(rows, drafts, masked, read)


@dataclass(frozen=True, slots=True)
class GuessCosts:
    """A runner's measurements from before the first request."""

    pass_s: dict[tuple[int, int], float] = field(default_factory=dict)
    """Device seconds of passes, by (rows, draft tokens), which are upper bounds of a pass's own: no pass takes less."""
    reading: tuple[tuple[int, float], ...] = ()
    """Pairs of the number of tokens that the draft has read, and the seconds that it took."""

    def least_s(self, rows: int, drafts: int) -> float:
        """Returns the least seconds of a pass, or 0 if they were not measured."""
        fitting = [known for known, guesses in self.pass_s if guesses == drafts and known >= rows]
        return self.pass_s[min(fitting), drafts] if fitting else 0.0


@dataclass(slots=True)
class PassTimes:
    """The measured times of passes of one kind."""

    measured_at: int = 0
    """Number of passes, by the caller's count, at which the last window was closed."""
    windows: list[float] = field(default_factory=list)
    """Mean seconds of a pass in each window, the latest last."""
    seconds: float = 0.0
    """Seconds of a pass that nothing delays: the lower quartile of the windows. The first passes of a process are slow.
    """
    _sum_s: float = 0.0
    _passes: int = 0

    def add(self, seconds: float, now: int, passes: int = 1) -> None:
        """Records one more pass, or a few in a row, all of whose time belongs to this kind."""
        self._sum_s += seconds
        self._passes += passes
        if self._passes >= _PASSES:
            self.close(now)

    def close(self, now: int) -> None:
        """Closes the current window, even if it is not full."""
        if self._passes:
            self.windows = [*self.windows[1 - _WINDOWS :], self._sum_s / self._passes]
            self.seconds = sorted(self.windows)[len(self.windows) // 4]
            self._sum_s, self._passes, self.measured_at = 0.0, 0, now


class ReadingTimes:
    """Seconds that a draft's reading of text adds, by its tokens: a straight line fitted to measurements."""

    _DECAY = 0.9
    """Factor by which each measurement shrinks the weight of all earlier ones."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = self._tokens_2 = self._product = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Records a reading of so many tokens."""
        keep = self._DECAY
        self._weight = keep * self._weight + 1
        self._tokens = keep * self._tokens + tokens
        self._seconds = keep * self._seconds + seconds
        self._tokens_2 = keep * self._tokens_2 + tokens * tokens
        self._product = keep * self._product + tokens * seconds

    def seconds(self, tokens: int) -> float:
        """Returns the expected seconds of a reading, 0 before any was measured."""
        if not tokens or not self._weight:
            return 0.0
        mean_tokens, mean_s = self._tokens / self._weight, self._seconds / self._weight
        variance = self._tokens_2 / self._weight - mean_tokens**2
        slope = (self._product / self._weight - mean_tokens * mean_s) / variance if variance > 1 else 0.0
        slope = max(0.0, min(slope, mean_s / max(1.0, mean_tokens)))
        return mean_s + slope * (tokens - mean_tokens)

    @property
    def mean_s(self) -> float:
        """Mean seconds of a reading."""
        return self._seconds / self._weight if self._weight else 0.0


def assumed_seconds(drafts: int, measured: dict[int, float]) -> float:
    """Estimates the seconds of a pass with so many drafts from those with fewer and more; `measured` must have an entry
    for 0.
    """
    below = max(level for level in measured if level <= drafts)
    above = min((level for level in measured if level > drafts), default=None)
    if above is None:
        return measured[below] * (1 + _PRIOR_COST * drafts) / (1 + _PRIOR_COST * below)
    return measured[below] + (measured[above] - measured[below]) * (drafts - below) / (above - below)
