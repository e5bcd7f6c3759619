"""Each sentence once, counted up when it is said again much later, and nothing fails because of an Event."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from mini_infer_contract.kubernetes_client import ApiError
from mini_infer_operator.controller.events import MOST_PER_OBJECT, REMEMBERED_S, SAME_AGAIN_S, EventRecorder

ABOUT = {"apiVersion": "g/v1", "kind": "K", "metadata": {"name": "demo", "namespace": "ns", "uid": "u1"}}


class MemoryApi:
    """Keeps Events by name, as the API server does."""

    def __init__(self) -> None:
        self.events: dict[str, dict[str, Any]] = {}
        self.requests: list[str] = []
        self.failure: Exception | None = None

    async def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        self.requests.append("create")
        if self.failure is not None:
            raise self.failure
        if manifest["metadata"]["name"] in self.events:
            raise ApiError(409, "AlreadyExists", "exists")
        self.events[manifest["metadata"]["name"]] = manifest
        return manifest

    async def merge(self, kind: str, namespace: str, name: str, change: dict[str, Any]) -> dict[str, Any] | None:
        self.requests.append("merge")
        if name not in self.events:
            return None
        self.events[name] |= change
        return self.events[name]


class World:
    def __init__(self) -> None:
        self.api, self.now_s = MemoryApi(), 0.0
        self.recorder = self.restarted()

    def restarted(self) -> EventRecorder:
        return EventRecorder(self.api, lambda: self.now_s)  # type: ignore[arg-type]  # the two verbs it uses

    @contextlib.asynccontextmanager
    async def running(self, recorder: EventRecorder | None = None) -> AsyncIterator[EventRecorder]:
        recorder = recorder or self.recorder
        task = asyncio.create_task(recorder.run())
        yield recorder
        await asyncio.wait_for(recorder.settle(), 10)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def told(self) -> list[tuple[str, str, str, int]]:
        return [(e["type"], e["reason"], e["message"], e["count"]) for e in self.api.events.values()]


async def test_a_decision_is_told_once() -> None:
    world = World()
    async with world.running() as recorder:
        for _ in range(50):
            recorder.record_event(ABOUT, "ScaledUp", "to 2")
        recorder.record_event(ABOUT, "Refused", "quota", "Warning")
    assert world.told() == [("Normal", "ScaledUp", "to 2", 1), ("Warning", "Refused", "quota", 1)]
    assert world.api.requests == ["create", "create"]
    event = next(iter(world.api.events.values()))
    assert event["involvedObject"] == {
        "apiVersion": "g/v1",
        "kind": "K",
        "name": "demo",
        "namespace": "ns",
        "uid": "u1",
    }
    assert event["metadata"]["namespace"] == "ns"


async def test_much_later_it_is_counted_up_and_after_an_hour_told_anew() -> None:
    world = World()
    async with world.running() as recorder:
        recorder.record_event(ABOUT, "R", "m")
        world.now_s = SAME_AGAIN_S + 1
        recorder.record_event(ABOUT, "R", "m")
    assert world.told() == [("Normal", "R", "m", 2)]
    world.api.events.clear()
    world.now_s += SAME_AGAIN_S + 1
    async with world.running() as recorder:
        recorder.record_event(ABOUT, "R", "m")  # the API server has forgotten it, we have not
    assert world.told() == [("Normal", "R", "m", 3)]
    world.api.events.clear()
    world.now_s += REMEMBERED_S + 1
    async with world.running() as recorder:
        recorder.record_event(ABOUT, "R", "m")
    assert world.told() == [("Normal", "R", "m", 1)]


async def test_a_restarted_operator_does_not_repeat_what_was_told() -> None:
    world = World()
    async with world.running() as recorder:
        recorder.record_event(ABOUT, "R", "m")
    async with world.running(world.restarted()) as recorder:
        recorder.record_event(ABOUT, "R", "m")
    assert world.told() == [("Normal", "R", "m", 1)]


async def test_ever_new_words_about_one_object_end() -> None:
    world = World()
    async with world.running() as recorder:
        for number in range(MOST_PER_OBJECT + 30):
            recorder.record_event(ABOUT, "R", f"attempt {number}")
        other = {**ABOUT, "metadata": {**ABOUT["metadata"], "uid": "u2"}}  # type: ignore[dict-item]
        recorder.record_event(other, "R", "m")
    assert len(world.api.events) == MOST_PER_OBJECT + 1


@pytest.mark.parametrize("failure", [ApiError(403, "Forbidden", "no"), TimeoutError(), OSError("gone")])
async def test_what_cannot_be_posted_is_dropped(failure: Exception) -> None:
    world = World()
    world.api.failure = failure
    async with world.running() as recorder:
        recorder.record_event(ABOUT, "R", "m")
    world.api.failure = None
    async with world.running() as recorder:
        recorder.record_event(ABOUT, "R", "n")
    assert [message for _, _, message, _ in world.told()] == ["n"]
