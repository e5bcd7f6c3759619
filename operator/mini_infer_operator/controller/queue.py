"""A work queue by key: one run at a time for each key, with back-off and a resync. Knows nothing of the work itself."""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

Key = TypeVar("Key", bound=Hashable)

SETTLE_S = 0.1
"""Seconds between an event and the run. Events come in bursts (a Deployment's status changes several times a second),
and one run serves a burst.
"""
SPACING_S = 0.5
"""Shortest time in seconds from the end of a key's run to its next one. An engine's start is a dozen events within
seconds, and few of them change what is reported or written.
"""
FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 60.0
WORK_LIMIT_S = 120.0
"""Seconds after which a run is cancelled and tried again: it has lost an answer."""
JITTER = 0.2
"""Share of a resync's period over which resyncs are spread, so that many keys do not run in one burst."""
CONCURRENCY = 8


class WorkQueue(Generic[Key]):
    """Runs `work(key)` after each `add(key)`, one run at a time for each key, and again when its result says so.

    `work` returns the seconds after which it is to run again, or None when the key is done with. An exception is logged
    and tried again after a growing pause; a new event cuts the pause short, but not below the first pause.
    """

    def __init__(
        self,
        work: Callable[[Key], Awaitable[float | None]],
        *,
        resync_s: float,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._work = work
        self._now_s = now_s
        self._unsynced: dict[Key, float] = {}  # keys that changed since their last good run, and since when
        self._tried: dict[Key, float] = {}  # when the last attempt of a key began or failed
        self._resync_s = resync_s
        self._wakes: dict[Key, asyncio.Event] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(CONCURRENCY)

    def add(self, key: Key) -> None:
        """Queues `key`, because something about it changed."""
        self._unsynced.setdefault(key, self._now_s())
        if key not in self._tasks:
            self._wakes[key] = asyncio.Event()
            self._tasks[key] = asyncio.create_task(self._run(key), name=f"work on {key}")
        self._wakes[key].set()

    def depth(self) -> int:
        """Returns the number of keys that changed and were not worked on successfully since."""
        return len(self._unsynced)

    def oldest_unsynced_s(self) -> float:
        """Returns the seconds that the first of those keys has waited, tried or not; 0 if there are none."""
        now_s = self._now_s()
        return now_s - min(self._unsynced.values(), default=now_s)

    def untried_s(self) -> float:
        """Returns the longest that any of those keys was left without an attempt. If it grows, the queue hangs."""
        now_s = self._now_s()
        tried = (max(since, self._tried.get(key, since)) for key, since in self._unsynced.items())
        return now_s - min(tried, default=now_s)

    async def close(self) -> None:
        """Cancels all work and waits for its end."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, key: Key) -> None:
        wake, failures, ended_s = self._wakes[key], 0, float("-inf")
        while True:
            await asyncio.sleep(max(SETTLE_S, ended_s + SPACING_S - self._now_s()))
            started_s = self._now_s()
            try:
                async with self._slots, asyncio.timeout(WORK_LIMIT_S):
                    wake.clear()  # the run sees what changed while it waited for a slot
                    self._tried[key] = started_s = self._now_s()
                    pause_s = await self._work(key)
                failures, ended_s = 0, self._now_s()
                self._succeeded(key, started_s, again=wake.is_set())
            except Exception as error:
                self._unsynced.setdefault(key, started_s)
                self._tried[key] = self._now_s()
                pause_s = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2**failures)
                failures += 1
                level = logging.WARNING if failures < 5 else logging.ERROR
                summary = str(error).split("\n", 1)[0]
                log.log(level, "%s: %s: %s; again in %g s", key, type(error).__name__, summary, pause_s)
                log.debug("traceback", exc_info=error)
                await asyncio.sleep(min(pause_s, FIRST_BACKOFF_S))
                await self._wait(wake, pause_s - FIRST_BACKOFF_S)
                continue
            if pause_s is None and not wake.is_set():
                del self._tasks[key], self._wakes[key]  # no await since the check: nobody can have added meanwhile
                return
            await self._wait(wake, min(pause_s or 0.0, self._resync_s * random.uniform(1 - JITTER, 1)))

    def _succeeded(self, key: Key, started_s: float, *, again: bool) -> None:
        """Records a success. `again`: the key changed during the run, so it stays unsynced."""
        del self._tried[key]
        self._unsynced.pop(key, None)
        if again:
            self._unsynced[key] = started_s

    @staticmethod
    async def _wait(wake: asyncio.Event, limit_s: float) -> None:
        with contextlib.suppress(TimeoutError):  # not wait_for: Python 3.11's can lose a cancellation
            async with asyncio.timeout(max(0.0, limit_s)):
                await wake.wait()
