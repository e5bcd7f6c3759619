import asyncio
import itertools
from collections.abc import Callable

import pytest

from mini_infer_operator.controller import queue as queue_module
from mini_infer_operator.controller.queue import WorkQueue


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "SETTLE_S", 0.001)
    monkeypatch.setattr(queue_module, "SPACING_S", 0.002)
    monkeypatch.setattr(queue_module, "FIRST_BACKOFF_S", 0.02)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what is waited for knows no event
            await asyncio.sleep(0.002)


async def test_work_queue_runs_a_key_once_at_a_time_and_loses_no_event() -> None:
    running: set[str] = set()
    expected, done = dict.fromkeys("abc", 0), dict.fromkeys("abc", -1)

    async def work(key: str) -> float:
        assert key not in running
        running.add(key)
        target = expected[key]
        await asyncio.sleep(0.003)
        done[key] = target
        running.discard(key)
        return float("inf")

    queue = WorkQueue(work, resync_s=1000)
    for number in range(200):
        key = "abc"[number % 3]
        expected[key] = number
        queue.add(key)
        if number % 10 == 0:
            await asyncio.sleep(0.002)
    await until(lambda: done == expected)
    await queue.close()


async def test_runs_of_a_key_are_spaced_while_another_key_waits_for_its_burst_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(queue_module, "SPACING_S", 0.05)
    times: dict[str, list[float]] = {"busy": [], "calm": []}

    async def work(key: str) -> float:
        times[key].append(asyncio.get_running_loop().time())
        return float("inf")

    queue = WorkQueue(work, resync_s=1000)
    while len(times["busy"]) < 4:
        queue.add("busy")
        await asyncio.sleep(0.005)
    assert all(later - earlier >= 0.05 for earlier, later in itertools.pairwise(times["busy"]))
    monkeypatch.setattr(queue_module, "SPACING_S", 1000.0)
    queue.add("busy")
    queue.add("calm")
    await until(lambda: bool(times["calm"]))
    await queue.close()
    assert len(times["busy"]) <= 5, "one that was due already"


async def test_work_queue_backs_off_a_failing_key_and_runs_others() -> None:
    times: list[float] = []
    good = 0

    async def work(key: str) -> float:
        nonlocal good
        if key == "good":
            good += 1
            return float("inf")
        times.append(asyncio.get_running_loop().time())
        raise ConnectionError("503")

    queue = WorkQueue(work, resync_s=1000)
    queue.add("bad")
    queue.add("good")
    await until(lambda: len(times) == 4)
    queue.add("good")
    await until(lambda: good == 2)
    await queue.close()
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert all(pause >= 0.02 * 2**number for number, pause in enumerate(pauses))


async def test_work_queue_shortens_a_backoff_when_an_event_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[float] = []

    async def work(_: str) -> float:
        times.append(asyncio.get_running_loop().time())
        raise ConnectionError("503")

    queue = WorkQueue(work, resync_s=1000)
    queue.add("bad")
    await until(lambda: len(times) == 4)
    monkeypatch.setattr(queue_module, "LONGEST_BACKOFF_S", 1000.0)
    monkeypatch.setattr(queue_module, "FIRST_BACKOFF_S", 0.05)
    await until(lambda: len(times) == 5)  # and now it waits for 0.8 s
    for _ in range(20):
        await asyncio.sleep(0.01)
        queue.add("bad")
    await queue.close()
    pauses = [later - earlier for earlier, later in itertools.pairwise(times[4:])]
    assert pauses
    assert all(pause >= 0.05 for pause in pauses)


async def test_what_changes_while_a_key_waits_for_a_slot_needs_no_run_of_its_own() -> None:
    free, runs = asyncio.Event(), list[str]()

    async def work(key: str) -> float:
        runs.append(key)
        if key != "k":
            await free.wait()
        return float("inf")

    queue = WorkQueue(work, resync_s=1000)
    for number in range(queue_module.CONCURRENCY):
        queue.add(f"busy-{number}")
    await until(lambda: len(runs) == queue_module.CONCURRENCY)
    queue.add("k")
    await asyncio.sleep(0.02)  # it waits for a slot
    queue.add("k")
    free.set()
    await until(lambda: "k" in runs)
    await asyncio.sleep(0.03)
    assert runs.count("k") == 1
    assert queue.depth() == 0
    await queue.close()


async def test_the_answer_says_when_to_look_again() -> None:
    calls = 0

    async def work(_: str) -> float:
        nonlocal calls
        calls += 1
        return 0.005 if calls < 3 else float("inf")

    queue = WorkQueue(work, resync_s=1000)
    queue.add("k")
    await until(lambda: calls == 3)
    await asyncio.sleep(0.03)
    assert calls == 3
    await queue.close()


async def test_work_queue_runs_a_key_again_after_the_resync_interval() -> None:
    calls = 0

    async def work(_: str) -> float:
        nonlocal calls
        calls += 1
        return float("inf")

    queue = WorkQueue(work, resync_s=0.01)
    queue.add("k")
    await until(lambda: calls >= 3)
    await queue.close()


async def test_work_queue_forgets_a_key_when_its_object_is_gone() -> None:
    calls = 0

    async def work(_: str) -> None:
        nonlocal calls
        calls += 1

    queue = WorkQueue(work, resync_s=0.001)
    queue.add("k")
    await until(lambda: calls == 1)
    await asyncio.sleep(0.02)
    assert calls == 1
    queue.add("k")
    await until(lambda: calls == 2)
    await queue.close()


async def test_work_queue_cancels_work_when_it_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "WORK_LIMIT_S", 0.02)
    calls = 0

    async def work(_: str) -> float:
        nonlocal calls
        calls += 1
        if calls == 1:
            await asyncio.sleep(1000)
        return float("inf")

    queue = WorkQueue(work, resync_s=1000)
    queue.add("k")
    await until(lambda: calls == 2)
    await queue.close()


async def test_a_key_is_unsynced_until_a_later_run_succeeds() -> None:
    now_s, fail, gate = 0.0, True, asyncio.Event()

    async def work(_: str) -> float:
        await gate.wait()
        if fail:
            raise ConnectionError("503")
        return float("inf")

    queue = WorkQueue(work, resync_s=1000, now_s=lambda: now_s)
    assert (queue.depth(), queue.oldest_unsynced_s(), queue.untried_s()) == (0, 0, 0)
    queue.add("a")
    now_s = 10.0
    assert (queue.depth(), queue.oldest_unsynced_s(), queue.untried_s()) == (1, 10, 10)
    await until(lambda: queue.untried_s() == 0)  # an attempt has begun
    assert queue.oldest_unsynced_s() == 10
    now_s = 15.0
    assert queue.untried_s() == 5  # it hangs
    gate.set()
    await until(lambda: queue.untried_s() == 0)  # it failed: an attempt all the same
    assert (queue.depth(), queue.oldest_unsynced_s()) == (1, 15)
    fail = False
    await until(lambda: queue.depth() == 0)
    assert (queue.oldest_unsynced_s(), queue.untried_s()) == (0, 0)
    await queue.close()


async def test_a_key_stays_unsynced_when_it_changes_during_a_run() -> None:
    runs, gate = 0, asyncio.Event()

    async def work(_: str) -> float:
        nonlocal runs
        runs += 1
        queue.add("a") if runs == 1 else await gate.wait()
        return float("inf")

    queue = WorkQueue(work, resync_s=1000)
    queue.add("a")
    await until(lambda: runs == 2)
    assert queue.depth() == 1
    gate.set()
    await until(lambda: queue.depth() == 0)
    await queue.close()
