"""Adds up what gateways report of a canary: for the present step, and for the canary as a whole. No I/O.

Gateways report counters, so this keeps the last report of each and adds differences. A gateway that was not seen before
begins at its present counters: what it has counted may belong to another canary.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from mini_infer_contract.rollouts import GatewayRollouts, RevisionFigures
from mini_infer_operator.observe import ObservedCanary, RevisionWindow

GROWTH_WINDOW_S = 60.0
GROWTH_PARTS = 4
"""Parts of that minute in each of which memory must have grown: a leak does not pause, and a cache that fills does."""
LEAST_PART_SHARE = 0.1
"""Share of the whole growth that each part must have."""
UNHEARD_S = 15.0
"""Seconds without a report after which figures count as none."""
_SUMS = ("requests", "errors", "rejected", "copies", "replays", "unscored", "divergence_sum")
_COUNTS = ("ttft_counts", "itl_counts", "whole_counts")


@dataclass(slots=True)
class _Sums:
    numbers: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_SUMS, 0.0))
    counts: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in _COUNTS})

    def add(self, before: RevisionFigures, after: RevisionFigures) -> None:
        """Adds what was counted between two reports of a gateway."""
        if after.requests < before.requests or after.replays < before.replays:  # counted anew
            before = RevisionFigures()
        for name in _SUMS:
            self.numbers[name] += max(0.0, getattr(after, name) - getattr(before, name))
        for name in _COUNTS:
            old, new = getattr(before, name), getattr(after, name)
            more = [count - (old[index] if index < len(old) else 0) for index, count in enumerate(new)]
            mine = self.counts[name]
            mine += [0] * (len(more) - len(mine))
            for index, count in enumerate(more):
                mine[index] += max(0, count)


class CanaryWindow:
    """The figures of one service's canary. `name` is namespace/name."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._key: tuple[str, str] | None = None
        self._step = -1
        self._last: dict[str, tuple[float, Mapping[str, RevisionFigures]]] = {}
        self._of_step: dict[str, _Sums] = {}
        self._of_all: dict[str, _Sums] = {}
        self._memory: dict[tuple[str, str], deque[tuple[float, int]]] = {}
        self._heard_s = float("-inf")
        self._now_s = 0.0

    def take(self, reports: Mapping[str, GatewayRollouts], revision: str, stable: str, step: int, now_s: float) -> None:
        """Takes the reports of all gateways while `revision` is at `step` (an index)."""
        self._now_s = now_s
        if self._key != (revision, stable):
            self._key, self._step, self._last, self._of_all, self._memory = (revision, stable), -1, {}, {}, {}
            self._heard_s = float("-inf")
        if self._step != step:
            self._step, self._of_step = step, {}
        for url, report in reports.items():
            figures = report.services.get(self._name)
            if figures is None:
                continue
            self._heard_s = now_s
            started_s, before = self._last.get(url, (report.started_s, figures))
            before = before if started_s == report.started_s else {}
            self._last[url] = report.started_s, figures
            for each in (revision, stable):
                if each in figures:
                    change = before.get(each, RevisionFigures()), figures[each]
                    self._of_step.setdefault(each, _Sums()).add(*change)
                    self._of_all.setdefault(each, _Sums()).add(*change)
                    for engine, size in figures[each].memory_bytes.items():
                        self._remember(each, engine, size, now_s)

    def observed(self) -> ObservedCanary:
        """Returns both revisions side by side."""
        if self._key is None:
            return ObservedCanary()
        new, stable = (self._window(each) for each in self._key)
        is_reported = self._now_s - self._heard_s < UNHEARD_S
        return ObservedCanary(new, stable, is_reported, self._key[0], self._step)

    def _window(self, revision: str) -> RevisionWindow:
        step, whole = self._of_step.get(revision, _Sums()), self._of_all.get(revision, _Sums())
        growths = [growth_bytes(list(series)) for (of, _), series in self._memory.items() if of == revision]
        return RevisionWindow(
            requests=int(step.numbers["requests"]),
            errors=int(step.numbers["errors"]),
            rejected=int(step.numbers["rejected"]),
            copies=int(step.numbers["copies"]),
            ttft=step.counts["ttft_counts"],
            itl=step.counts["itl_counts"],
            whole=step.counts["whole_counts"],
            replays=int(whole.numbers["replays"]),
            unscored=int(whole.numbers["unscored"]),
            divergence_sum=whole.numbers["divergence_sum"],
            memory_growth_bytes=max(growths, default=0),
        )

    def _remember(self, revision: str, engine: str, size: int, now_s: float) -> None:
        series = self._memory.setdefault((revision, engine), deque())
        if not series or series[-1][0] < now_s:  # several gateways report the same engine
            series.append((now_s, size))
        while len(series) > 1 and series[1][0] <= now_s - GROWTH_WINDOW_S:
            series.popleft()


def growth_bytes(series: Sequence[tuple[float, int]]) -> int:
    """Returns the growth over a whole window if it never paused, else 0. `series` are (seconds, bytes), by time."""
    if not series or series[-1][0] - series[0][0] < GROWTH_WINDOW_S:
        return 0
    end_s, part_s = series[-1][0], GROWTH_WINDOW_S / GROWTH_PARTS
    bounds = [end_s - part_s * part for part in range(GROWTH_PARTS, -1, -1)]
    sizes = [max((point for point in series if point[0] <= bound), key=lambda point: point[0])[1] for bound in bounds]
    growth = sizes[-1] - sizes[0]
    parts = [after - before for before, after in pairwise(sizes)]
    return growth if growth > 0 and min(parts) >= LEAST_PART_SHARE * growth else 0
