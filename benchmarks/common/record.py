"""What a script has found so far: told, and saved at once, for its process may be ended any time."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.report import Runs, collect, log_line, save


class Record:
    """Figures go into `runs` by name, errors to those of `result`, which holds the runs and is saved."""

    def __init__(self, runs: Runs, result: dict[str, Any], out: Path | None, title: str = "") -> None:
        """`title`: before a name where its error is kept."""
        self._runs, self._result, self._out, self._title = runs, result, out, title

    def keep(self, name: str, figures: Mapping[str, float]) -> None:
        """Add what was measured."""
        collect(self._runs, name, figures)
        log_line(f"  {name}: " + ", ".join(f"{figure} {value:,.2f}" for figure, value in figures.items()))
        save(self._out, self._result)

    def fail(self, name: str, error: object) -> None:
        """It has ended."""
        log_line(f"  {name} failed: {error}")
        self._result["errors"].append(f"{self._title}{name}: {error}")
        save(self._out, self._result)
