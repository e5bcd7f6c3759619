"""Several processes that hold a GPU together: all start at once, then one at a time works."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

from common.budget import Budget
from common.isolation import Figures, Isolated, IsolationError
from common.report import Runs, collect, save, say


class Turns:
    """What they measure goes into `runs` by name and is saved with `result` at once; what fails, to its errors."""

    def __init__(self, runs: Runs, result: dict[str, Any], out: Path | None, title: str = "") -> None:
        """`title`: before a name where it is told what failed."""
        self._runs, self._result, self._out, self._title = runs, result, out, title

    def start(self, stack: ExitStack, calls: Mapping[str, tuple[Any, ...]], budget: Budget) -> dict[str, Isolated]:
        """Processes of functions and their arguments, entered in `stack`, that have made their first part."""
        processes = {name: stack.enter_context(Isolated(*call)) for name, call in calls.items()}
        for process in processes.values():
            process.ask()
        return {
            name: process
            for name, process in processes.items()
            if self.take(name, islice(process.answers(budget.left_s), 1))
        }

    def take(self, name: str, parts: Iterator[Figures]) -> bool:
        """Keep what one makes now. False: it has failed."""
        try:
            for part in parts:
                collect(self._runs, name, part)
                say("  " + ", ".join(f"{figure} {value:,.2f}" for figure, value in part.items()))
                save(self._out, self._result)
        except IsolationError as error:
            say(f"  {name} failed: {error}")
            self._result["errors"].append(f"{self._title}{name}: {error}")
            return False
        return True
