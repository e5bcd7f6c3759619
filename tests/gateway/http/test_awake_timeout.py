"""Time-outs of a loop that works and of one that stands still."""

import asyncio
import time

import pytest

from mini_infer_gateway.http.awake_timeout import awake_timeout


async def test_what_does_not_come_in_time_is_late() -> None:
    begun_s = time.monotonic()
    with pytest.raises(TimeoutError):
        async with awake_timeout(0.1):
            await asyncio.Event().wait()
    assert time.monotonic() - begun_s >= 0.09


async def test_time_in_which_the_loop_stands_still_does_not_count() -> None:
    async with awake_timeout(0.2):
        time.sleep(0.25)  # noqa: ASYNC251 - this is the stall
        await asyncio.sleep(0.02)  # what had come meanwhile is only seen now


async def test_nothing_is_left_behind() -> None:
    async with awake_timeout(0.02):
        pass
    await asyncio.sleep(0.1)
