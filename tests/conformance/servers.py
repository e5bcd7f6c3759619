"""Engines and a gateway on free ports of this machine, for as long as a suite runs."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mini_infer_operator.local.ports import free_ports
from tests.conformance.environments import FOLDER
from tests.support.checkout import python_path

START_LIMIT_S = 180.0
SCRIPTED = "scripted"
"""The model whose tokens are given by a file."""
DEMO = "demo"


@dataclass(frozen=True, slots=True)
class Platform:
    """Addresses without a path."""

    gateway: str
    demo_engine: str
    scripted_engine: str


@contextlib.contextmanager
def running_platform(script: Path, gateway_flags: Sequence[str] = ()) -> Iterator[Platform]:
    """A gateway before an engine with the demo model and one whose answers are those of the script."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that servers are ended, too
    with contextlib.ExitStack() as stack:
        demo = stack.enter_context(running_engine(DEMO, f"--served-model-name={DEMO}"))
        scripted_flags = (f"--dry-run-script={script}", f"--served-model-name={SCRIPTED}", "--max-model-len=1000000")
        scripted = stack.enter_context(
            running_engine("--dry-run", "--kv-cache-memory=32GB", "--dry-run-step-ms=0", *scripted_flags)
        )
        table = FOLDER / "endpoints.json"
        endpoints = [{"name": "a", "url": demo, "model": DEMO}, {"name": "b", "url": scripted, "model": SCRIPTED}]
        table.write_text(json.dumps({"endpoints": endpoints}))
        gateway = stack.enter_context(running_gateway(f"--endpoints={table}", *gateway_flags))
        yield Platform(gateway, demo, scripted)


@contextlib.contextmanager
def running_engine(*flags: str) -> Iterator[str]:
    """The address of a `mini-infer-serve` with these flags, ready."""
    with _running("mini_infer_engine.server.cli", flags) as url:
        yield url


@contextlib.contextmanager
def running_gateway(*flags: str) -> Iterator[str]:
    """The address of a `mini-infer-gateway` with these flags, ready."""
    with _running("mini_infer_gateway.cli", flags) as url:
        yield url


@contextlib.contextmanager
def _running(module: str, flags: Sequence[str]) -> Iterator[str]:
    port = free_ports(1)[0]
    log_path = FOLDER / "logs" / f"{module.partition('.')[0]}-{port}.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    with log_path.open("w") as log:
        run = f"import sys; from {module} import main; sys.exit(main())"  # as the console scripts do
        command = [sys.executable, "-c", run, f"--port={port}", *flags]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(f"{url}/readyz", process, log_path)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(url: str, process: "subprocess.Popen[bytes]", log_path: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.1)
    raise RuntimeError(f"{url} did not become ready:\n{log_path.read_text()[-3000:]}")
