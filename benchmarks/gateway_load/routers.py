"""The routers under measurement: ours, and its peers from PyPI, each in an environment of its own."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gateway_load.client import Target, request_once

PEERS = {"smg": "smg==1.13.0", "sglang-router": "sglang-router==0.3.2", "vllm-router": "vllm-router==0.1.17"}
START_S = 60.0


@dataclass(frozen=True)
class Running:
    """A process that listens."""

    name: str
    port: int
    pid: int

    def cpu_s(self) -> float:
        """User and system time so far, all threads."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_mb(self, field: str = "VmRSS") -> float:
        """Resident memory now, or at its peak (VmHWM)."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def free_port() -> int:
    """One that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def environment(name: str, cache: Path) -> Path | None:
    """The `bin` of a peer's environment, made where it is missing; None: it cannot be had."""
    folder = cache / PEERS[name].replace("==", "-")
    if not (folder / "installed").exists():
        made = subprocess.run([sys.executable, "-m", "venv", str(folder)], check=False).returncode == 0
        pip = [str(folder / "bin" / "pip"), "install", "--quiet", PEERS[name]]
        if not made or subprocess.run(pip, check=False).returncode:
            return None
        (folder / "installed").touch()
    return folder / "bin"


def our_command(port: int, endpoints: Sequence[str], folder: Path) -> list[str]:
    """The gateway, with endpoints from a file; like its peers it logs warnings, and no line a request."""
    listed = [{"name": f"e{number}", "url": url, "model": "m"} for number, url in enumerate(endpoints)]
    file = folder / f"endpoints-{port}.json"
    file.write_text(json.dumps({"endpoints": listed}))
    command = [sys.executable, "-m", "mini_infer_gateway", "--port", str(port), "--endpoints", str(file)]
    return [*command, "--log-level", "warning"]


def peer_command(name: str, bin_folder: Path) -> Callable[[int, Sequence[str], Path], list[str]]:
    """A peer, aware of caches as ours is."""

    def command(port: int, endpoints: Sequence[str], folder: Path) -> list[str]:
        program = {
            "smg": [str(bin_folder / "smg"), "launch"],
            "sglang-router": [str(bin_folder / "python"), "-m", "sglang_router.launch_router"],
            "vllm-router": [str(bin_folder / "vllm-router")],
        }[name]
        level = "warning" if name == "vllm-router" else "warn"
        flags = ["--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware", "--log-level", level]
        return [*program, *flags, "--prometheus-port", str(free_port()), "--worker-urls", *endpoints]

    return command


@contextlib.asynccontextmanager
async def running(name: str, command: Sequence[str], port: int, log: Path, ready: bytes) -> AsyncIterator[Running]:
    """The process, once it has answered `ready`, a POST of a chat or b"" for a GET of /v1/models."""
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=output)
        try:
            async with asyncio.timeout(START_S):
                while not await _answers(port, ready):
                    if process.returncode is not None:
                        raise RuntimeError(f"{name} ended: see {log}")
                    await asyncio.sleep(0.1)
            yield Running(name, port, process.pid)
        finally:
            if process.returncode is None:
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 10)
            except TimeoutError:
                process.kill()
                await process.wait()


async def _answers(port: int, body: bytes) -> bool:
    try:
        return (await request_once(Target(port), body)).status == 200
    except (OSError, asyncio.IncompleteReadError):
        return False
