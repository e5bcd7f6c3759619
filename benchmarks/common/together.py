"""Engines that start at the same time, hold a GPU together and are measured one after another."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from typing import Any

from common.isolation import Figures, Isolated, IsolationError
from common.quiet import measuring
from common.report import say

Start = tuple[Callable[..., Iterator[Figures]], Iterable[Any]]
"""A function and its arguments; the first part that it yields says that it is ready to be measured."""


def measure_in_turn(starts: Mapping[str, Start], timeout_s: float, note: Callable[[str, Figures], None]) -> list[str]:
    """Each in a process of its own; `note` is told a label and each part at once. Returns errors, with their labels."""
    errors: list[str] = []

    def goes_well(label: str, parts: Iterator[Figures]) -> bool:
        try:
            for part in parts:
                note(label, part)
        except IsolationError as error:
            say(f"  {label} failed: {error}")
            errors.append(f"{label}: {error}")
            return False
        return True

    with ExitStack() as stack:
        started = {
            label: stack.enter_context(Isolated(function, *arguments))
            for label, (function, arguments) in starts.items()
        }
        for process in started.values():
            process.ask()
        ready = [label for label, process in started.items() if goes_well(label, islice(process.answers(timeout_s), 1))]
        with measuring():
            for label in ready:
                goes_well(label, started[label].parts(timeout_s))
    return errors
