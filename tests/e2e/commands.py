"""Runs programs and tells what is going on, with the time since the start. Knows nothing of clusters."""

import os
import shutil
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
_started = time.monotonic()


def log_line(text: str) -> None:
    print(f"    {time.monotonic() - _started:6.1f} s  {text}", flush=True)


def run(
    *command: str | Path, env: dict[str, str] | None = None, timeout_s: float = 240, stdin: str | None = None
) -> str:
    """Run to the end and return stdout; a failure carries the end of what was printed."""
    done = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        input=stdin,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        timeout=timeout_s,
    )
    if done.returncode:
        shown = " ".join(str(part) for part in command)
        raise RuntimeError(f"{shown} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    return done.stdout


def program(name: str) -> str:
    """Where kubectl or helm is: among the Kubernetes test programs, else on PATH."""
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    if assets and (Path(assets) / name).exists():
        return str(Path(assets) / name)
    found = shutil.which(name)
    if not found:
        raise RuntimeError(f"{name} is neither in KUBEBUILDER_ASSETS nor on PATH: install it")
    return found
