"""Long jobs take turns, jobs nobody waits for are dropped, and errors come back."""

import asyncio
import os
import threading
import time
from collections.abc import Generator

import pytest

from mini_infer_gateway.prompts.worker_threads import SLICE_S, AbandonedError, WorkerThreads
from mini_infer_process.interpreter import NICENESS
from tests.support.running_gateway import until


def steps(count: int, log: list[str], name: str, step_s: float = 0.0) -> Generator[int, None, str]:
    for number in range(count):
        log.append(name)
        time.sleep(step_s)
        yield number
    return name


async def test_a_short_job_overtakes_long_ones_when_threads_are_busy() -> None:
    pool, log = WorkerThreads(1), list[str]()
    long = [asyncio.ensure_future(pool.run(steps(60, log, name, SLICE_S / 2), lambda: False)) for name in "ab"]
    await asyncio.sleep(0)
    assert await pool.run(steps(2, log, "short"), lambda: False) == "short"
    assert not any(job.done() for job in long)
    assert await asyncio.gather(*long) == ["a", "b"]
    assert {"a", "b"} == {*log[:20]} - {"short"}, "the long ones take turns"
    pool.close()


async def test_a_job_ends_between_two_steps_when_it_is_abandoned() -> None:
    pool, log, is_abandoned = WorkerThreads(1), list[str](), threading.Event()
    running = asyncio.ensure_future(pool.run(steps(10_000, log, "gone", 0.001), is_abandoned.is_set))
    queued = asyncio.ensure_future(pool.run(steps(10_000, log, "never", 0.001), lambda: True))
    await until(lambda: "gone" in log)
    is_abandoned.set()
    with pytest.raises(AbandonedError):
        await running
    with pytest.raises(AbandonedError):
        await queued
    assert "never" not in log
    assert log.count("gone") < 10_000
    assert pool.queued == 0
    pool.close()


async def test_worker_threads_go_on_when_a_job_raises() -> None:
    def fails() -> Generator[int, None, str]:
        yield 1
        raise ValueError("no")

    pool = WorkerThreads(2)
    with pytest.raises(ValueError, match="no"):
        await pool.run(fails(), lambda: False)
    assert await pool.run(steps(1, [], "fine"), lambda: False) == "fine"
    pool.close()


async def test_worker_threads_have_lower_priority_than_the_event_loop() -> None:
    def niceness() -> Generator[int, None, int]:
        yield 0
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    pool = WorkerThreads(1)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert await pool.run(niceness(), lambda: False) == min(19, own + NICENESS)
    assert os.getpriority(os.PRIO_PROCESS, 0) == own
    pool.close()
