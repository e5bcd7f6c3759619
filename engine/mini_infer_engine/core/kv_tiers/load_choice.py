"""Decides whether cached pages are loaded from a lower tier or computed again, by learned costs. Pure arithmetic."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_OLDER_COUNT = 0.9
"""Factor by which each measurement shrinks the weight of earlier ones."""
_DECLINED_COUNT = 0.98
"""Factor by which each load that is declined shrinks it: after a slow phase the first estimate comes back, so that
loads are tried again.
"""
_FIRST_WEIGHT = 0.05
"""Weight of the first estimate beside the measurements, which have 1 each and 10 together at most."""
_LONG_TOKENS = 4096
MOST_DELAY_S = 0.001
"""Expected seconds by which a load may make other sequences late that run beside its pass."""


class CopyCost:
    """The cost of copying cached tokens from a tier: a latency and seconds a token, fitted to what copies took.

    The fit is a weighted least-squares line; the first estimate counts as two measurements of little weight.
    """

    def __init__(self, latency_s: float, s_per_token: float) -> None:
        """Takes the estimate that holds before any measurement."""
        self._first = (0, latency_s), (_LONG_TOKENS, latency_s + _LONG_TOKENS * s_per_token)
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._fit()

    @property
    def tokens_per_s(self) -> float:
        """The measured rate, latencies included; 0 before the first measurement."""
        return self._x / self._y if self._y else 0.0

    def seconds(self, num_tokens: int) -> float:
        """Returns the expected seconds for so many tokens."""
        return self._latency_s + num_tokens * self._s_per_token

    def measured(self, num_tokens: int, seconds: float) -> None:
        """Records a copy that has ended."""
        self._shrink(_OLDER_COUNT)
        self._n += 1
        self._x += num_tokens
        self._y += seconds
        self._xx += num_tokens * num_tokens
        self._xy += num_tokens * seconds
        self._fit()

    def declined(self) -> None:
        """Records that a load was not worth its cost, so that nothing was measured."""
        self._shrink(_DECLINED_COUNT)
        self._fit()

    def _shrink(self, factor: float) -> None:
        self._n, self._x, self._y = self._n * factor, self._x * factor, self._y * factor
        self._xx, self._xy = self._xx * factor, self._xy * factor

    def _fit(self) -> None:
        n, x, y, xx, xy = self._n, self._x, self._y, self._xx, self._xy
        for tokens, seconds in self._first:
            n, x, y = n + _FIRST_WEIGHT, x + _FIRST_WEIGHT * tokens, y + _FIRST_WEIGHT * seconds
            xx, xy = xx + _FIRST_WEIGHT * tokens * tokens, xy + _FIRST_WEIGHT * tokens * seconds
        slope = max(0.0, (n * xy - x * y) / (n * xx - x * x))  # two different token counts are always among them
        latency = (y - slope * x) / n
        if latency < 0:
            slope, latency = xy / xx, 0.0
        self._s_per_token, self._latency_s = slope, latency


def pages_to_load(
    media: Sequence[str], page_size: int, costs: Mapping[str, CopyCost], compute_tokens_per_s: float
) -> int:
    """Returns how many of the pages that continue a prompt's prefix, which are in these media, are worth loading.

    It is the number that saves the most time against computing them; 0 if none saves any.
    """
    best, most_saved, counts = 0, 0.0, dict.fromkeys(costs, 0)
    for count, medium in enumerate(media, start=1):
        counts[medium] += 1
        if count < len(media) and media[count] == medium:
            continue  # costs are lines: the best number is at an end of a run
        load_s = sum(costs[name].seconds(number * page_size) for name, number in counts.items() if number)
        saved = count * page_size / compute_tokens_per_s - load_s
        if saved > most_saved:
            best, most_saved = count, saved
    return best


@dataclass(frozen=True, slots=True)
class FirstPass:
    """The pass in which the first tokens behind a load could be computed, as far as it is planned."""

    num_tokens: int
    """Tokens that the pass computes, those behind the load included."""
    num_running: int
    """Other sequences that run, with rows in this pass or in one that is not committed yet."""
    num_waiting: int
    """Other sequences that wait."""


def loads_with_pass(load_s: float, least_s: float, first_pass: FirstPass, compute_tokens_per_s: float) -> bool:
    """Returns True if a load of so many seconds goes with the pass of the tokens behind it; False if it comes first, as
    one of less than `least_s` always does.

    The pass waits for each layer, so that together they take little more than the longer of both. Where the load takes
    longer, others that run wait too; a load that comes first delays nobody. It comes first as well while others are in
    line: they may need the same blocks, which nobody hits before the pass is committed.
    """
    if first_pass.num_waiting or load_s < least_s:
        return False
    return not first_pass.num_running or load_s <= first_pass.num_tokens / compute_tokens_per_s + MOST_DELAY_S


def pages_to_resume_after(
    num_resumable: int,
    num_on_device: int,
    media: Sequence[str],
    states: Mapping[int, Sequence[str]],
    page_size: int,
    costs: Mapping[str, CopyCost],
    compute_tokens_per_s: float,
) -> int:
    """Returns after how many pages of its prefix a sequence with recurrent state should resume.

    It can after `num_resumable` pages without any load. `num_on_device` pages of its prefix are on the device, and
    those that follow are in `media`. `states` has the media of the parts of each state by the number of pages that it
    follows: none if it is on the device. A part is as large as a page, so that a state costs what its bytes do. The
    number is the one that saves the most time against computing, or `num_resumable` if none saves any.
    """
    best, most_saved = num_resumable, 0.0
    for end, parts in states.items():
        counts = Counter(media[: max(0, end - num_on_device)]) + Counter(parts)
        load_s = sum(costs[name].seconds(number * page_size) for name, number in counts.items())
        saved = (end - num_resumable) * page_size / compute_tokens_per_s - load_s
        if saved > most_saved:
            best, most_saved = end, saved
    return best
