"""Each sentence once, again when it is said much later, and posted by kopf whatever context decides it."""

import asyncio
import contextvars
from collections.abc import Mapping
from typing import Any

from kopf._cogs.configs.configuration import OperatorSettings
from kopf._core.engines import posting

from mini_infer_operator.objects.events import (
    DEDUPLICATION_S,
    MOST_PER_OBJECT,
    SAME_AGAIN_S,
    EventRecorder,
    KopfPoster,
)
from mini_infer_operator.status import EventType

ABOUT: dict[str, Any] = {
    "apiVersion": "g/v1",
    "kind": "K",
    "metadata": {"name": "demo", "namespace": "ns", "uid": "u1"},
}


class World:
    def __init__(self) -> None:
        self.posted: list[tuple[str, str, str]] = []
        self.now_s = 0.0
        self.recorder = EventRecorder(self._post, lambda: self.now_s)

    def _post(self, about: Mapping[str, Any], event_type: EventType, reason: str, message: str) -> None:
        assert about["metadata"]["name"] == "demo"
        self.posted.append((event_type, reason, message))


def test_a_decision_is_posted_once_when_it_is_recorded_again_and_again() -> None:
    world = World()
    for _ in range(50):
        world.recorder.record_event(ABOUT, "ScaledUp", "to 2")
    world.recorder.record_event(ABOUT, "Refused", "quota", "Warning")
    assert world.posted == [("Normal", "ScaledUp", "to 2"), ("Warning", "Refused", "quota")]


def test_a_decision_is_posted_again_when_it_is_recorded_much_later() -> None:
    world = World()
    for now_s in (0.0, SAME_AGAIN_S - 1, SAME_AGAIN_S + 1, SAME_AGAIN_S + DEDUPLICATION_S + 2):
        world.now_s = now_s
        world.recorder.record_event(ABOUT, "R", "m")
    assert world.posted == [("Normal", "R", "m")] * 3


def test_new_sentences_end_when_there_are_ever_more_about_one_object() -> None:
    world = World()
    for number in range(MOST_PER_OBJECT + 30):
        world.recorder.record_event(ABOUT, "R", f"attempt {number}")
    world.recorder.record_event({**ABOUT, "metadata": {**ABOUT["metadata"], "uid": "u2"}}, "R", "m")
    assert len(world.posted) == MOST_PER_OBJECT + 1


async def test_an_event_is_queued_for_kopf_when_it_was_recorded_before_the_first_handler_and_outside_of_any() -> None:
    poster, queue = KopfPoster(), asyncio.Queue[posting.K8sEvent]()
    poster.post(ABOUT, "Normal", "Early", "before any object was seen")
    assert queue.empty()

    def handler() -> None:  # as kopf calls it
        posting.settings_var.set(OperatorSettings())
        posting.event_queue_var.set(queue)
        posting.event_queue_loop_var.set(asyncio.get_running_loop())
        poster.enter()

    contextvars.copy_context().run(handler)
    poster.post(ABOUT, "Warning", "Late", "from the queue's own task")
    queued = [queue.get_nowait() for _ in range(queue.qsize())]
    assert [(event.type, event.reason) for event in queued] == [("Normal", "Early"), ("Warning", "Late")]
    about = {"apiVersion": "g/v1", "kind": "K", "name": "demo", "namespace": "ns", "uid": "u1"}
    assert [dict(event.ref) for event in queued] == [about, about]
