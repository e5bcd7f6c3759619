"""Results: where they were measured, as JSON, as a table."""

import json
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "triton", "flash-attn", "vllm", "transformers")


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of them do not exceed; NaN of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else float("nan")


def say(text: str) -> None:
    """A line of progress, at once."""
    print(text, file=sys.stderr, flush=True)


def surroundings() -> dict[str, Any]:
    """Date, command, commit, machine and versions, for the log."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": " ".join(sys.argv),
        "commit": _output("git", "rev-parse", "--short", "HEAD"),
        "machine": _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or platform.machine(),
        "python": platform.python_version(),
        **{name: found for name in _PACKAGES if (found := _version(name))},
    }


def save(path: Path | None, result: dict[str, Any]) -> None:
    """Write `result` with its surroundings; called after every part, so that what was measured is kept."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(surroundings() | result, indent=1))


def print_table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Columns side by side; floats with three digits that say something."""
    cells = [[_cell(value) for value in row] for row in (head, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    for row in cells:
        first, *rest = (cell.ljust(width) if not at else cell.rjust(width)
                        for at, (cell, width) in enumerate(zip(row, widths, strict=True)))  # fmt: skip
        print("  ".join((first, *rest)), flush=True)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
