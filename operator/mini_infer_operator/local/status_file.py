"""Reads and writes the status that `mini-infer up` leaves in `.mini-infer/NAME/` for `mini-infer status` and `why`."""

import fcntl
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(".mini-infer")
_NAME = "status.json"


def write_status(folder: Path, stored: Mapping[str, Any], status: Mapping[str, Any]) -> None:
    """Writes the service with its status, so that readers see the old content or the new, never a part."""
    metadata = {"namespace": "(here)", **stored["metadata"]}
    new = folder / f"{_NAME}.new"
    new.write_text(json.dumps({**stored, "metadata": {**metadata, "namespace": "(here)"}, "status": status}))
    new.replace(folder / _NAME)


def read_statuses(root: Path = ROOT) -> list[dict[str, Any]]:
    """Returns the services that run from this folder."""
    return [json.loads(path.read_text()) for path in sorted(root.glob(f"*/{_NAME}")) if is_running(path.parent)]


def log_tails(folder: Path, lines: int) -> dict[str, str]:
    """Returns the last lines of each process' log, by its name."""
    return {
        path.stem: "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) for path in folder.glob("*.log")
    }


def is_running(folder: Path) -> bool:
    """True if a `mini-infer up` has locked the folder."""
    lock = folder / "lock"
    if not lock.exists():
        return False
    with lock.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False
