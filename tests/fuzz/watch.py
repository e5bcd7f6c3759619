"""Watches the fleet from outside: which processes end, how much memory each has, which faults its log tells of."""

import asyncio
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import psutil

from tests.fuzz.fleet import Fleet
from tests.fuzz.hostile.load import Findings

LOOK_EVERY_S = 1.0
GROWTH_LIMIT = 0.05
"""Memory may grow by this share between the second quarter of a run and its end."""
_SETTLING_S = 600.0
"""Runs that are shorter than this do not judge growth: pools are still being touched for the first time."""
_SLACK_BYTES = 8 << 20
"""Growth below this is a heap that settles, whatever its share."""
_FATAL = re.compile(r"Fatal Python error|Segmentation fault|AssertionError|MemoryError|core dumped|Traceback \(most")
_LIMITED = re.compile(r"worker|spawn|forkserver|resource_tracker")
"""Command lines of processes that are meant to be killed at a limit, and started again."""
_FORKS = re.compile(r"structured\.proving")
"""A process with such a command line lasts, and its children, which have the same one, are workers under limits."""


@dataclass(slots=True)
class Watch:
    """Samples of a run."""

    fleet: Fleet
    found: Findings
    samples: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    """Resident bytes of each part's lasting processes, by seconds since the start."""
    replaced_workers: int = 0
    _lasting: dict[str, set[int]] = field(default_factory=dict)
    _workers: set[int] = field(default_factory=set)
    _read: dict[str, int] = field(default_factory=dict)
    _ended: set[str] = field(default_factory=set)

    async def run(self) -> None:
        """Looks again and again until cancelled."""
        began_s = time.monotonic()
        for name, processes in self.fleet.members().items():
            self._lasting[name] = {process.pid for process in processes if not is_limited(process)}
        while True:
            self._look(time.monotonic() - began_s)
            await asyncio.sleep(LOOK_EVERY_S)

    def _look(self, now_s: float) -> None:
        members = self.fleet.members()
        for name, process in self.fleet.processes.items():
            if process.poll() is not None and name not in self._ended:
                self._ended.add(name)
                self.found.note(f"{name} ended with {process.returncode}: {self.fleet.log(name)[-1500:]}")
        workers: set[int] = set()
        for name, processes in members.items():
            alive = {process.pid: process for process in processes}
            for pid in self._lasting.get(name, set()) - set(alive):
                self.found.note(f"a process of {name} ended (pid {pid}): {self.fleet.log(name)[-1500:]}")
                self._lasting[name].discard(pid)
            lasting = [alive[pid] for pid in self._lasting[name] if pid in alive]
            self.samples.setdefault(name, []).append((now_s, _resident(lasting)))
            workers |= set(alive) - self._lasting[name]
        self.replaced_workers += len(self._workers - workers)
        self._workers = workers
        for name in self.fleet.processes:
            self._read_log(name)

    def _read_log(self, name: str) -> None:
        log = self.fleet.log(name)
        news = log[self._read.get(name, 0) :]
        if match := _FATAL.search(news):
            self.found.note(f"{name} logged: {news[match.start() : match.start() + 1500]}")
        self._read[name] = len(log)

    def growth(self, name: str) -> tuple[int, int]:
        """Returns the medians of a part's resident bytes in the second and in the last quarter of the run."""
        samples = self.samples.get(name, [])
        end_s = samples[-1][0] if samples else 0.0
        early = _median(bytes_ for at_s, bytes_ in samples if end_s / 4 <= at_s < end_s / 2)
        late = _median(bytes_ for at_s, bytes_ in samples if at_s >= end_s * 3 / 4)
        return early, late

    def grew(self, name: str) -> bool:
        """Returns True if a part's memory grew by more than is allowed, in a run that is long enough to tell."""
        samples = self.samples.get(name, [])
        if not samples or samples[-1][0] < _SETTLING_S:
            return False
        early, late = self.growth(name)
        return late > early * (1 + GROWTH_LIMIT) and late - early > _SLACK_BYTES


def is_limited(process: psutil.Process) -> bool:
    """Returns True if the process is a worker under limits, whose end costs one request."""
    try:
        if _LIMITED.search(" ".join(process.cmdline())):
            return True
        parent = process.parent()
        return parent is not None and bool(_FORKS.search(" ".join(parent.cmdline())))
    except psutil.Error:
        return False


def _resident(processes: list[psutil.Process]) -> int:
    total = 0
    for process in processes:
        try:
            total += process.memory_info().rss
        except psutil.Error:
            continue
    return total


def _median(values: Iterable[int]) -> int:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0
