"""Results: where they were measured, as JSON, as a table."""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

_PACKAGES = ("torch", "triton", "flash-attn", "vllm", "transformers")
_BEGIN = float(os.environ.setdefault("BENCHMARK_BEGIN", str(time.monotonic())))  # processes of one script share it


Runs = dict[str, dict[str, list[float]]]
"""Values by contender and figure, one a round and start."""
_PEER_START_S = 180.0
"""On a cold H200 machine vLLM was ready after 102 s; its loads come after that."""


def make_parser(description: str | None, *, starts_peers: bool = False) -> argparse.ArgumentParser:
    """With the flags that every benchmark of the engine has, or every one that starts peers."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON, written again after every part")
    parser.add_argument("--time-limit-s", type=float, default=86_400, metavar="S", help="begin nothing new after that")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on a CPU, tiny loads: does it run?")
    if starts_peers:
        help_text = f"with less left a peer is not started for the first time (default: {_PEER_START_S:.0f})"
        parser.add_argument("--peer-start-s", type=float, default=_PEER_START_S, metavar="S", help=help_text)
    return parser


def words(text: str) -> list[str]:
    """Of a flag: "a,b"."""
    return [part for part in text.split(",") if part]


def integers(text: str) -> list[int]:
    """Of a flag: "1,2"."""
    return [int(part) for part in words(text)]


def collect(runs: Runs, label: str, part: Mapping[str, float]) -> None:
    """Add what was measured to a contender's values."""
    for name, value in part.items():
        runs.setdefault(label, {}).setdefault(name, []).append(value)


def medians_of(runs: Runs) -> dict[str, dict[str, float]]:
    """By contender and figure, of those that have some."""
    return {label: {name: median(values) for name, values in found.items()} for label, found in runs.items() if found}


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of them do not exceed; NaN of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else float("nan")


def log_line(text: str) -> None:
    """A line of progress with the seconds since the script began, at once."""
    print(f"{time.monotonic() - _BEGIN:6.1f} s  {text}", file=sys.stderr, flush=True)


def surroundings() -> dict[str, Any]:
    """Date, command, commit, machine and versions, for the log."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": " ".join(sys.argv),
        "commit": os.environ.get("COMMIT") or _output("git", "rev-parse", "--short", "HEAD"),
        "machine": _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or platform.machine(),
        "boot": boot_id(),
        "python": platform.python_version(),
        **{name: found for name in _PACKAGES if (found := _version(name))},
    }


def boot_id() -> str:
    """One machine's, between two boots: figures of different ones are not to be compared."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else platform.node()


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
