"""Time-outs of a loop that works and of one that stands still."""

import asyncio
import time

import pytest

from mini_infer_gateway.http.awake_timeout import awake_timeout


async def test_awake_timeout_raises_when_the_time_has_passed() -> None:
    begun_s = time.monotonic()
    with pytest.raises(TimeoutError):
        async with awake_timeout(0.1):
            await asyncio.Event().wait()
    assert time.monotonic() - begun_s >= 0.09


async def test_awake_timeout_does_not_count_time_when_the_event_loop_is_blocked() -> None:
    async with awake_timeout(0.2):
        time.sleep(0.25)  # noqa: ASYNC251 - this is the stall
        await asyncio.sleep(0.02)  # what had come meanwhile is only seen now


async def test_awake_timeout_leaves_no_timer_when_its_body_ends_early() -> None:
    async with awake_timeout(0.02):
        pass
    await asyncio.sleep(0.1)
