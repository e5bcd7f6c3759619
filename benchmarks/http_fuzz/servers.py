"""A dry-run engine and a gateway before it as processes, and what they hold when nobody asks anything."""

import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from mini_infer_operator.local.ports import free_ports

START_LIMIT_S = 60.0
SETTLE_LIMIT_S = 20.0
SPARE_DESCRIPTORS = 20
"""Connections that are kept for the next request, between gateway and engine."""


class Servers:
    """Both, from `with` to its end."""

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            ports = {name: free_ports(1)[0] for name in ("engine", "gateway")}
            self.urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
            endpoints = folder / "endpoints.json"
            endpoints.write_text(json.dumps({"endpoints": [{"name": "a", "url": self.urls["engine"], "model": "dry"}]}))
            self._logs = {name: folder / f"{name}.log" for name in ports}
            engine = ["-m", "mini_infer_engine.server.cli", "--dry-run", "--dry-run-step-ms", "0.2"]
            gateway = ["-m", "mini_infer_gateway", f"--endpoints={endpoints}"]
            self._read = dict.fromkeys(ports, 0)
            self._processes = {}
            for name, command in (("engine", engine), ("gateway", gateway)):
                arguments = [*command, f"--port={ports[name]}", "--no-access-log"]
                self._processes[name] = stack.enter_context(_process(self._logs[name], arguments))
            for url in self.urls.values():
                _wait(partial(_is_ready, url), START_LIMIT_S, f"{url} is not ready")
            self._stack = stack.pop_all()
        self._descriptors = self._count()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def left_over(self) -> list[str]:
        """What is there though nobody asks for anything; logged tracebacks."""
        problems = []
        for name, url in self.urls.items():
            with contextlib.suppress(TimeoutError):
                _wait(partial(_is_idle, url), SETTLE_LIMIT_S, "")
            if load := _load(url):
                problems.append(f"{name}: {load} requests are still being answered")
            log = self._logs[name].read_text(errors="replace")
            news, self._read[name] = log[self._read[name] :], len(log)
            if "Traceback" in news:
                last = news[news.rindex("Traceback") :].strip().splitlines()
                problems.append(f"{name}: {last[-1]}, by {last[-3].strip()}")
        metrics = _get(f"{self.urls['engine']}/metrics")
        busy = re.findall(r"^(vllm:num_requests_(?:running|waiting)){.*} ([1-9].*)$", metrics, re.MULTILINE)
        problems += [f"engine: {gauge} is {value}" for gauge, value in busy]
        return problems + [
            f"{name}: {count} open descriptors, {self._descriptors[name]} at the start"
            for name, count in self._count().items()
            if count > self._descriptors[name] + SPARE_DESCRIPTORS
        ]

    def sizes(self) -> str:
        """Memory of the processes."""
        return ", ".join(f"{name} {_resident_mb(process.pid)} MB" for name, process in self._processes.items())

    def _count(self) -> dict[str, int]:
        return {name: len(list(Path(f"/proc/{process.pid}/fd").iterdir())) for name, process in self._processes.items()}


@contextlib.contextmanager
def _process(log: Path, arguments: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as file:
        process = subprocess.Popen([sys.executable, *arguments], stdout=file, stderr=file)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        return str(response.read().decode())


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def _is_ready(url: str) -> bool:
    return _status(f"{url}/readyz") == 200


def _is_idle(url: str) -> bool:
    return _load(url) == 0


def _load(url: str) -> int:
    return int(json.loads(_get(f"{url}/load"))["server_load"])


def _wait(condition: Callable[[], bool], limit_s: float, what: str) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(what)
        time.sleep(0.1)


def _resident_mb(pid: int) -> int:
    found = re.search(r"^VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(found[1]) // 1024 if found else 0
