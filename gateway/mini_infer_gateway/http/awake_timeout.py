"""A time-out that does not count time in which this process itself was stalled.

After a stall (a machine without CPU time for us, a long computation), the event loop may run timers before it polls
sockets. Everything in progress would then seem late, although its answer is already in the kernel's buffers.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

TICKS = 4
"""Number of ticks in a time-out; a tick that is late by more than its own length is not counted."""


@asynccontextmanager
async def awake_timeout(limit_s: float) -> AsyncIterator[None]:
    """Raises TimeoutError after `limit_s` seconds of this loop's own time, unlike `asyncio.timeout`."""
    async with asyncio.timeout(None) as limit:
        countdown = _Countdown(limit, limit_s / TICKS)
        try:
            yield
        finally:
            countdown.timer.cancel()


class _Countdown:
    def __init__(self, limit: asyncio.Timeout, tick_s: float) -> None:
        self._limit, self._tick_s, self._left = limit, tick_s, TICKS
        self._loop = asyncio.get_running_loop()
        self._wait()

    def _wait(self) -> None:
        self._due_s = time.monotonic() + self._tick_s
        self.timer = self._loop.call_later(self._tick_s, self._tick)

    def _tick(self) -> None:
        self._left -= time.monotonic() < self._due_s + self._tick_s
        if self._left:
            self._wait()
        else:
            self._limit.reschedule(self._loop.time())
