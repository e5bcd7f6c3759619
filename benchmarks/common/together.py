"""Engines that start at the same time, hold a GPU together and are measured one after another."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from threading import Lock
from typing import Any

from common.isolation import Figures, Isolated, IsolationError
from common.quiet import measuring
from common.report import log_line

Start = tuple[Callable[..., Iterator[Figures]], Iterable[Any]]
"""A function and its arguments; the first part that it yields says that it is ready to be measured."""
_LONGEST_START_S = 330.0
"""After which the others are measured without those that are not ready: together, they take two minutes or three."""


class Together:
    """Engines by label; `note` is told a label and each part at once, by one thread at a time."""

    def __init__(self, stack: ExitStack, timeout_s: Callable[[], float], note: Callable[[str, Figures], None]) -> None:
        """`stack` ends the engines; `timeout_s`: of whatever is asked for now."""
        self._stack, self._timeout_s, self._note = stack, timeout_s, note
        self._started: dict[str, Isolated] = {}
        self._noting = Lock()
        self.errors: list[str] = []
        """With their labels."""

    def start(self, label: str, start: Start) -> None:
        """In a process of its own."""
        function, arguments = start
        process = self._started[label] = self._stack.enter_context(Isolated(function, *arguments))
        process.start_step()

    def ready(self) -> list[str]:
        """Wait for the first part of each; the labels of those that made it."""
        end = time.monotonic() + min(self._timeout_s(), _LONGEST_START_S)
        return [
            label
            for label, process in self._started.items()
            if self._goes_well(label, islice(process.answers(max(1.0, end - time.monotonic())), 1))
        ]

    def measure(self, labels: Iterable[str]) -> None:
        """One after another. Several threads may measure labels of their own."""
        for label in labels:
            self._goes_well(label, self._started[label].parts(self._timeout_s()))

    def _goes_well(self, label: str, parts: Iterator[Figures]) -> bool:
        try:
            for part in parts:
                with self._noting:
                    self._note(label, part)
        except IsolationError as error:
            log_line(f"  {label} failed: {error}")
            self.errors.append(f"{label}: {error}")
            return False
        return True


def measure_alternately(
    starts: Mapping[str, Start], timeout_s: float, note: Callable[[str, Figures], None]
) -> list[str]:
    """All start; then one at a time is measured. Returns errors, with their labels."""
    with ExitStack() as stack:
        together = Together(stack, lambda: timeout_s, note)
        for label, start in starts.items():
            together.start(label, start)
        ready = together.ready()
        with measuring():
            together.measure(ready)
        return together.errors
