"""`mini-infer up` with real engines of the demo model, as a process of a test."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from mini_infer_operator.local.ports import free_ports
from tests.engine.server.dry_server import HANG_S, children_of, command_of, environment, wait_until
from tests.support.services import changed

PROGRAM = "import sys; from mini_infer_operator import cli; sys.exit(cli.main())"


@dataclass(frozen=True)
class LocalUp:
    """One run, in a folder of its own."""

    url: str
    folder: Path
    process: "subprocess.Popen[bytes]"

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()

    @property
    def state(self) -> Path:
        """Where the service's endpoints and peer key lie."""
        return self.folder / ".mini-infer" / "demo"

    def edit(self, max_tokens: int, replicas: int = 2) -> None:
        """Writes the service; another number of tokens is another revision."""
        write_service(self.folder, max_tokens, replicas)

    def engines(self) -> list[dict[str, Any]]:
        """The engines that are ready, as the console has them."""
        found = httpx.get(self.url + "/console/api/fleet", timeout=60).json()["engines"]
        return [engine for engine in found if engine["state"] == "ready"]

    def kill(self, engine: str) -> None:
        """Ends an engine's process at once."""
        port = next(one["url"] for one in self.engines() if one["name"] == engine).rpartition(":")[2]
        (pid,) = (child for child in children_of(self.process.pid) if f"--port={port} " in command_of(child))
        os.kill(pid, signal.SIGKILL)


def write_service(folder: Path, max_tokens: int, replicas: int = 2, **more: Any) -> None:
    engine = {"kvCacheMemory": "64Mi", "maxModelLen": max_tokens}
    spec = {"unified": {"replicas": replicas, "engine": engine}, "rollout": {"maxSurge": 2, "minReadySeconds": 0}}
    spec |= more
    (folder / "cr.new").write_text(yaml.safe_dump(changed({"spec": spec})))
    (folder / "cr.new").replace(folder / "cr.yaml")


@contextmanager
def local_up(folder: Path, replicas: int = 2, **more: Any) -> Iterator[LocalUp]:
    """Some engines and a gateway, once all are ready; all are killed at the end, since nobody waits for an answer.

    `more` are fields of the service's spec.
    """
    (port,) = free_ports(1)
    write_service(folder, 4096, replicas, **more)
    command = [sys.executable, "-c", PROGRAM, "up", "-f", "cr.yaml", "--port", str(port)]
    with (folder / "output").open("wb") as output:
        variables = environment() | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, cwd=folder, env=variables, stdout=output, stderr=subprocess.STDOUT)
    run = LocalUp(f"http://127.0.0.1:{port}", folder, process)
    try:
        wait_until(lambda: process.poll() is not None or "Ctrl-C ends everything" in run.output)
        assert process.poll() is None, run.output
        yield run
    finally:
        left = descendants_of(process.pid) if process.poll() is None else []
        process.kill()  # its reaper kills all that it started
        process.wait(HANG_S)
        wait_until(lambda: not any(map(is_running, left)))


def descendants_of(pid: int) -> list[int]:
    return [found for child in children_of(pid) for found in (child, *descendants_of(child))]


def is_running(pid: int) -> bool:
    """False also for a process that has ended and that nobody has waited for: it has no command."""
    try:
        return bool(command_of(pid))
    except (FileNotFoundError, ProcessLookupError):
        return False
