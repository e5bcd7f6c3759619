"""Forecasts the work of the time at which an engine started now is ready. Pure.

The forecast is the mean of the last seconds, and on top of it the error that earlier forecasts of this kind had at a
percentile: a load that comes in bursts gets a margin of the height of its bursts, an even one next to none. Nothing is
assumed of its shape.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt

SHORT_S, LONG_S = 15.0, 60.0
"""Seconds of the two means: the higher one counts, so a rise is seen soon and a dip late."""
STEADY_S = 60.0
"""Seconds of the mean that engines are kept for."""
HISTORY_S = 3600.0
STEP_S = 5.0
"""Seconds of one kept value: samples that come sooner are averaged."""
SURGE_DEVIATIONS, LENGTHS_VARY = 3.0, 2.0
"""Deviations by which one step must exceed what chance explains, and the mean square of a request's work over the
square of its mean: that of an exponential distribution.
"""
FORECAST_SLACK = 5.0
"""The forecast may be exceeded this many times as often as requests may miss their targets: what exceeds it lasts a
part of a start, and engines are whole and stay for a window. Measured by benchmarks/autoscaling.py.
"""
LEAST_ERRORS = 12
"""Errors below which the margin is that of a Poisson process instead."""


@dataclass(frozen=True, slots=True)
class History:
    """The work of the last hour, by steps, the oldest first."""

    times_s: tuple[float, ...] = ()
    values: tuple[float, ...] = ()
    partial: tuple[float, float] = (0.0, 0.0)
    """Sum of value times seconds, and seconds, of the step that is not over."""
    seen_s: float | None = None
    """The time of the latest sample."""

    def add(self, at_s: float, value: float) -> "History":
        """Returns the history with a value that held since the sample before."""
        if self.seen_s is None or at_s <= self.seen_s:
            return replace(self, seen_s=at_s)
        seconds = at_s - self.seen_s
        total, length = self.partial[0] + value * seconds, self.partial[1] + seconds
        if length < STEP_S:
            return replace(self, partial=(total, length), seen_s=at_s)
        first = 0
        while first < len(self.times_s) and self.times_s[first] < at_s - HISTORY_S:
            first += 1
        times_s, values = (*self.times_s[first:], at_s), (*self.values[first:], total / length)
        return History(times_s, values, seen_s=at_s)


NO_HISTORY = History()


def forecast_percentile(of_targets: float) -> float:
    """Returns the percentile of the forecast for the one of the targets."""
    return max(0.5, 1 - FORECAST_SLACK * (1 - of_targets))


def level(history: History, unit: float) -> float:
    """Returns the work of now: the higher of a short and a long mean, or what the last step alone proves.

    Requests that arrive at random, each with `unit` of work a second, exceed their mean by three deviations about once
    in a thousand steps.
    """
    if not history.values:
        return 0.0
    return max(_levels(history.values[-round(LONG_S / STEP_S) :])[-1], _proved(history, unit))


def recent(history: History, unit: float) -> float:
    """Returns the work of the last seconds, for what can be changed back as soon: unlike `level` it sees a dip, too."""
    if not history.values:
        return 0.0
    values = history.values[-round(SHORT_S / STEP_S) :]
    return max(sum(values) / len(values), _proved(history, unit))


def steady(history: History) -> float:
    """Returns the work of the longest mean: what lasts without short peaks, which the margin covers."""
    values = history.values[-round(STEADY_S / STEP_S) :]
    return sum(values) / len(values) if values else 0.0


def _proved(history: History, unit: float) -> float:
    last = history.values[-1]
    return last - SURGE_DEVIATIONS * sqrt(LENGTHS_VARY * last * unit / STEP_S)


@dataclass(frozen=True, slots=True)
class Margin:
    """Numbers that are added to the level of now for the time of a start."""

    ahead: float = 0.0
    """The number for engines that would be started now."""
    kept: float = 0.0
    """The number for engines that there are: more than `ahead` once some that were removed were needed again."""


NO_MARGIN = Margin()


def margin(history: History, ahead_s: float, percentile: float, unit: float, patience: float) -> Margin:
    """Returns what to add to the level for the next `ahead_s` seconds.

    `unit` is the work of one request a second, by which a first margin is guessed while there is little history. With a
    `patience` of 2, the forecast for which engines are kept is exceeded half as often.
    """
    values = history.values
    if not any(values):
        return NO_MARGIN
    steps = max(1, round(max(ahead_s, SHORT_S) / STEP_S))
    levels, means = _levels(values), _means(values, round(SHORT_S / STEP_S))
    errors = sorted(max(means[index + 1 : index + 1 + steps]) - levels[index] for index in range(len(values) - steps))
    if len(errors) < LEAST_ERRORS:
        now = levels[-1] if levels else 0.0
        guess = sqrt(now * unit / SHORT_S)
        return Margin(guess, guess)
    ahead, kept = (
        max(0.0, errors[min(len(errors) - 1, int(share * len(errors)))])
        for share in (percentile, 1 - (1 - percentile) / patience)
    )
    return Margin(ahead, kept)


def _levels(values: Sequence[float]) -> list[float]:
    short, long = _means(values, round(SHORT_S / STEP_S)), _means(values, round(LONG_S / STEP_S))
    return [max(pair) for pair in zip(short, long, strict=True)]


def _means(values: Sequence[float], count: int) -> list[float]:
    """Returns the mean of each value and the `count` - 1 before it."""
    means, total = [], 0.0
    for index, value in enumerate(values):
        total += value
        if index >= count:
            total -= values[index - count]
        means.append(max(0.0, total) / min(count, index + 1))
    return means
