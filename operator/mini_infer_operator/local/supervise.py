"""Keeps one process running: starts it, polls its ready path, restarts it when it dies, and ends it at last."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import aiohttp

STARTING_POLL_S = 0.2
READY_POLL_S = 1.0
READY_TIMEOUT_S = 2.0
MISSES = 3
"""Failed polls in a row until a ready process counts as not ready: it may be busy. An answer counts at once."""
FIRST_BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 30.0
STEADY_S = 60.0
"""Seconds after which a process that stayed up starts its back-off anew."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command line, its environment, and the URL at which the process reports that it is ready."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    ready_url: str


@dataclass(slots=True)
class SupervisedProcess:
    """A process that `supervise` runs. Only `supervise` writes its fields."""

    name: str
    log: Path
    make_command: Callable[[], Command]
    """Builds the command before every start, so that a restart can take new ports."""
    command: Command | None = None
    ready: bool = False
    changed_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    """The time at which `ready` last changed."""
    worked: bool = False
    """True if the process was ever ready."""
    stopping: bool = False
    """Set by code that ends the process; it is not restarted."""
    pid: int = 0
    last_end: str = ""
    """Says how the process ended the last time, with its last line; empty while it has not ended, or since it is ready
    again.
    """
    restarts: int = 0
    """Times that it ended by itself."""
    crash: str = ""
    """The way in which it ended the last time that it did so by itself; empty if it never did."""
    task: "asyncio.Task[None] | None" = field(default=None, repr=False)


class OrphanReaper:
    """The connection to the reaper process (reaper.py), which is sent our process groups."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, python: str) -> "OrphanReaper":
        """Starts the reaper in a session of its own, so that Ctrl-C does not reach it."""
        script = Path(__file__).with_name("reaper.py")
        process = await asyncio.create_subprocess_exec(
            python, "-I", "-S", str(script), stdin=asyncio.subprocess.PIPE, start_new_session=True
        )
        return cls(process)

    def add(self, group: int) -> None:
        """Asks the reaper to kill this process group when we are gone."""
        self._send(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Removes a process group that has ended."""
        self._send(f"-{group}\n")

    async def close(self) -> None:
        """Lets the reaper kill what is left, and end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode())


async def supervise(
    supervised: SupervisedProcess, reaper: OrphanReaper, session: aiohttp.ClientSession, changed: Callable[[str], None]
) -> None:
    """Runs the process until it is stopped; `changed` is called with a line for people whenever its state changes."""
    failures = 0
    while not supervised.stopping:
        supervised.command = supervised.make_command()
        started = time.monotonic()
        with supervised.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *supervised.command.arguments,
                env=dict(supervised.command.environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        supervised.pid = process.pid
        reaper.add(process.pid)
        poll = asyncio.create_task(_poll_ready(supervised, session, changed), name=f"poll {supervised.name}")
        try:
            code = await process.wait()
        finally:
            poll.cancel()
            await asyncio.gather(poll, return_exceptions=True)
            signal_group(process.pid, signal.SIGKILL)  # whatever it started itself and left behind
            reaper.remove(process.pid)
        _set_ready(supervised, ready=False)
        supervised.pid = 0
        if supervised.stopping:
            break
        failures = 0 if time.monotonic() - started > STEADY_S else failures + 1
        backoff_s = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** max(0, failures - 1))
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        words = supervised.last_end = supervised.crash = f"{how}: {_last_line(supervised.log)}"
        supervised.restarts += 1
        changed(f"{supervised.name} {words}\n  starting it again in {backoff_s:g} s; its log: {supervised.log}")
        await asyncio.sleep(backoff_s)


async def stop(supervised: SupervisedProcess, grace_s: float) -> None:
    """Sends SIGTERM, and SIGKILL to the whole group after `grace_s`. Returns when the process is gone."""
    supervised.stopping = True
    if supervised.task is None:
        return
    if supervised.pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(supervised.pid, signal.SIGTERM)  # not the group: a server tells its own children when they may go
    else:
        supervised.task.cancel()
    _, running = await asyncio.wait([supervised.task], timeout=grace_s)
    if running and supervised.pid:
        signal_group(supervised.pid, signal.SIGKILL)
    await asyncio.wait([supervised.task])


def signal_group(group: int, number: signal.Signals) -> None:
    """Signals a process group, if it still exists."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


async def _poll_ready(
    supervised: SupervisedProcess, session: aiohttp.ClientSession, changed: Callable[[str], None]
) -> None:
    assert supervised.command is not None
    started, misses = time.monotonic(), 0
    while True:
        answer = await _probe(supervised.command.ready_url, session)
        misses = misses + 1 if answer is None else 0
        ready = supervised.ready and misses < MISSES if answer is None else answer
        if ready != supervised.ready:
            _set_ready(supervised, ready=ready)
            took_s = time.monotonic() - started
            if ready:
                changed(f"{supervised.name} is ready after {took_s:.1f} s")
            else:
                changed(f"{supervised.name} is {'draining' if supervised.stopping else 'not ready any more'}")
        await asyncio.sleep(READY_POLL_S if ready else STARTING_POLL_S)


def _set_ready(supervised: SupervisedProcess, *, ready: bool) -> None:
    if ready != supervised.ready:
        supervised.ready, supervised.changed_at = ready, datetime.now(UTC)
        supervised.last_end = "" if ready else supervised.last_end
        supervised.worked |= ready


async def _probe(url: str, session: aiohttp.ClientSession) -> bool | None:
    """Returns True if the process reports that it is ready, False if it reports otherwise, None without an answer."""
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=READY_TIMEOUT_S)) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it wrote nothing"
