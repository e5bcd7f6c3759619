"""A `mini-infer-serve` of the tests' own, mostly with `--dry-run`: a real process, real sockets."""

import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from mini_infer_contract.peer_auth import PEER_HEADER
from mini_infer_operator.local.ports import free_ports
from tests.support.checkout import python_path

ROOT = Path(__file__).parents[3]
HANG_S = 200.0
"""Longer than anything takes on a machine that has little time left: it only ends a test that hangs."""


def serve_command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "mini_infer_engine.server.cli", *flags]


def environment() -> dict[str, str]:
    value = os.environ.get("PYTHONPATH")
    path = python_path() + (os.pathsep + value if value else "")
    return os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def children_of(pid: int) -> list[int]:
    """Of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sorted({int(child) for task in tasks for child in (task / "children").read_text().split()})


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def free_port() -> int:
    return free_ports(1)[0]


def wait_until(condition: Callable[[], bool], limit_s: float = HANG_S) -> float:
    """How long it took; fails if it takes longer than the limit."""
    start_s = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - start_s
        assert waited_s < limit_s, "did not happen in time"
        time.sleep(min(0.1, 0.005 + waited_s / 10))  # asking often takes the processor from what is waited for
    return time.monotonic() - start_s


class EngineServer:
    def __init__(
        self,
        *flags: str,
        verify: ssl.SSLContext | bool = True,
        variables: dict[str, str] | None = None,
        limit_s: float = HANG_S,
    ) -> None:
        """`variables`: more of its environment; `limit_s`: for its start."""
        self.process = subprocess.Popen(
            serve_command("--port", "0", *flags),
            stderr=subprocess.PIPE,
            text=True,
            env=environment() | (variables or {}),
        )
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        try:
            self._wait_for_start(limit_s, verify)
        except BaseException:
            self.process.kill()  # nobody will have this object, and end it
            print(self.text_of_log[-4000:])  # what pytest shows beside the error
            raise

    def _wait_for_start(self, limit_s: float, verify: ssl.SSLContext | bool) -> None:
        wait_until(lambda: self._has_ended or any("serves" in line for line in self.log), limit_s)
        assert not self._has_ended, "".join(self.log)
        address = re.search(r"https?://[\w.:\[\]]+", "".join(self.log))
        assert address is not None
        self.url = address[0]
        # The header lets a client on this machine administer an engine without keys (api/admin_guard.py).
        headers = {PEER_HEADER: "tests"}
        self.client = httpx.Client(base_url=self.url, timeout=HANG_S, verify=verify, headers=headers)
        wait_until(lambda: self._has_ended or self._is_ready(), limit_s)
        assert not self._has_ended, self.text_of_log
        self.start_cpu_s = self.cpu_s

    def _is_ready(self) -> bool:
        try:
            return self.client.get("/readyz").status_code == 200
        except httpx.TransportError:  # it is ending, and its log tells why
            return False

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)

    @property
    def _has_ended(self) -> bool:
        """The process is gone, and its log complete."""
        return self.process.poll() is not None and not self._reader.is_alive()

    @property
    def text_of_log(self) -> str:
        return "".join(self.log)

    def metric(self, name: str) -> float:
        """The value of a metric without labels of its own, or with the model's only."""
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if re.match(rf"{re.escape(name)}[ {{]", line))

    @property
    def core_pid(self) -> int:
        (pid,) = self.core_pids
        return pid

    @property
    def core_pids(self) -> list[int]:
        """In the order of their engines."""
        return [child for child in children_of(self.process.pid) if "core_process.entry" in command_of(child)]

    @property
    def prover_pid(self) -> int:
        """The process that workers which check grammars are forked from."""
        (pid,) = (child for child in children_of(self.process.pid) if "proving.process" in command_of(child))
        return pid

    @property
    def cpu_s(self) -> float:
        """Processor time of its processes so far: unlike the clock's, it does not grow beside a busy neighbour."""
        ticks = 0
        for pid in (self.process.pid, *self.core_pids):
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def wait(self, limit_s: float = HANG_S) -> int:
        """Its exit status; its log is complete then."""
        status = self.process.wait(limit_s)
        self._reader.join(limit_s)
        return status

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(HANG_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(HANG_S)
        assert self.process.stderr is not None
        self.process.stderr.close()


class DryServer(EngineServer):
    """Without a model."""

    def __init__(self, *flags: str, verify: ssl.SSLContext | bool = True) -> None:
        super().__init__("--dry-run", *flags, verify=verify)
