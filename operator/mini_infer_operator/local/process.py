"""One process that is kept running: started, watched by its ready path, started again when it dies, ended at last."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

STARTING_POLL_S = 0.2
READY_POLL_S = 1.0
READY_TIMEOUT_S = 2.0
MISSES = 3
"""So often in a row may a ready process leave us without an answer: it may be busy. What it says counts at once."""
FIRST_BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 30.0
STEADY_S = 60.0
"""A process that was up this long starts its back-off anew."""


@dataclass(frozen=True, slots=True)
class Command:
    """What to run, and where it says that it is ready."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    ready_url: str


@dataclass(slots=True)
class Kept:
    """A process that `keep` looks after. Fields are written by `keep` only."""

    name: str
    log: Path
    make_command: Callable[[], Command]
    """Called before every start, so that a restart can take new ports."""
    command: Command | None = None
    ready: bool = False
    stopping: bool = False
    """Set by who wants it to end; it is not started again."""
    pid: int = 0
    task: "asyncio.Task[None] | None" = field(default=None, repr=False)


class Keeper:
    """Tells the keeper process (keeper.py) which groups are ours."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, python: str) -> "Keeper":
        """Start it in a session of its own, so that Ctrl-C does not reach it."""
        script = Path(__file__).with_name("keeper.py")
        process = await asyncio.create_subprocess_exec(
            python, "-I", "-S", str(script), stdin=asyncio.subprocess.PIPE, start_new_session=True
        )
        return cls(process)

    def add(self, group: int) -> None:
        """Kill this process group when we are gone."""
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        """It is gone already."""
        self._tell(f"-{group}\n")

    async def close(self) -> None:
        """Let it kill what is left, and end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode())


async def keep(kept: Kept, keeper: Keeper, session: aiohttp.ClientSession, changed: Callable[[str], None]) -> None:
    """Run `kept` until it is told to stop; `changed` is called with a line for people whenever its state changes."""
    failures = 0
    while not kept.stopping:
        kept.command = kept.make_command()
        started = time.monotonic()
        with kept.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *kept.command.arguments,
                env=dict(kept.command.environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        kept.pid = process.pid
        keeper.add(process.pid)
        poll = asyncio.create_task(_poll_ready(kept, session, changed), name=f"poll {kept.name}")
        try:
            code = await process.wait()
        finally:
            poll.cancel()
            await asyncio.gather(poll, return_exceptions=True)
            signal_group(process.pid, signal.SIGKILL)  # whatever it started itself and left behind
            keeper.remove(process.pid)
        kept.ready, kept.pid = False, 0
        if kept.stopping:
            break
        failures = 0 if time.monotonic() - started > STEADY_S else failures + 1
        backoff_s = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** max(0, failures - 1))
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        words = f"{how}: {_last_line(kept.log)}"
        changed(f"{kept.name} {words}\n  starting it again in {backoff_s:g} s; its log: {kept.log}")
        await asyncio.sleep(backoff_s)


async def stop(kept: Kept, grace_s: float) -> None:
    """SIGTERM, and SIGKILL to its whole group after `grace_s`. Returns when it is gone."""
    kept.stopping = True
    if kept.task is None:
        return
    if kept.pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(kept.pid, signal.SIGTERM)  # not the group: a server tells its own children when they may go
    else:
        kept.task.cancel()
    _, running = await asyncio.wait([kept.task], timeout=grace_s)
    if running and kept.pid:
        signal_group(kept.pid, signal.SIGKILL)
    await asyncio.wait([kept.task])


def signal_group(group: int, number: signal.Signals) -> None:
    """Signal a process group, if it is still there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


async def _poll_ready(kept: Kept, session: aiohttp.ClientSession, changed: Callable[[str], None]) -> None:
    assert kept.command is not None
    started, misses = time.monotonic(), 0
    while True:
        answer = await _ask(kept.command.ready_url, session)
        misses = misses + 1 if answer is None else 0
        ready = kept.ready and misses < MISSES if answer is None else answer
        if ready != kept.ready:
            kept.ready = ready
            took_s = time.monotonic() - started
            if ready:
                changed(f"{kept.name} is ready after {took_s:.1f} s")
            else:
                changed(f"{kept.name} is {'draining' if kept.stopping else 'not ready any more'}")
        await asyncio.sleep(READY_POLL_S if ready else STARTING_POLL_S)


async def _ask(url: str, session: aiohttp.ClientSession) -> bool | None:
    """What the process says of itself; None: nothing."""
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
