"""A time-out that does not count time in which this process itself stood still.

After a stall (a machine without time for us, a long computation) the event loop may run timers before it looks at
sockets: then everything that was under way seems late, although its answer lies in the kernel's buffers.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

TICKS = 4
"""A limit is so many ticks; one that comes later than by its own length is not counted."""


@asynccontextmanager
async def awake_timeout(limit_s: float) -> AsyncIterator[None]:
    """As asyncio.timeout: TimeoutError after `limit_s` seconds of this loop's own time."""
    loop, tick_s = asyncio.get_running_loop(), limit_s / TICKS
    async with asyncio.timeout(None) as limit:

        def tick(left: int, due_s: float) -> None:
            nonlocal timer
            left -= time.monotonic() < due_s + tick_s
            if left:
                timer = loop.call_later(tick_s, tick, left, time.monotonic() + tick_s)
            else:
                limit.reschedule(loop.time())

        timer = loop.call_later(tick_s, tick, TICKS, time.monotonic() + tick_s)
        try:
            yield
        finally:
            timer.cancel()
