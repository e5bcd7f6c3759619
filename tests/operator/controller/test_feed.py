"""What kopf's watch reports and what lists find, in the order in which they can meet."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from mini_infer_operator.controller import feed as feed_module
from mini_infer_operator.controller.feed import Feed
from mini_infer_operator.objects.api import KubernetesApi
from mini_infer_operator.objects.cache import ObjectCache, ServiceKey
from mini_infer_operator.objects.kinds import BY_NAME, Kind
from mini_infer_web.kubernetes_api import ApiError


def pod(name: str, version: int) -> dict[str, Any]:
    labels = {"serving.mini-infer.io/service": f"service-{name}"}
    metadata = {"name": name, "namespace": "n", "uid": name, "resourceVersion": str(version), "labels": labels}
    return {"metadata": metadata, "spec": {"containers": []}, "status": {}}


class Api(KubernetesApi):
    """Answers lists with `pods` at `version`, after `failures`, and once `may_answer` is set."""

    def __init__(self) -> None:
        self.pods: list[dict[str, Any]] = []
        self.version = 50
        self.lists = 0
        self.failures: list[Exception] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def list(self, kind: str, namespace: str | None, selector: str | None = None) -> tuple[list[Any], int]:
        self.lists += 1
        if self.failures:
            raise self.failures.pop(0)
        listed, version = list(self.pods), self.version
        await self.may_answer.wait()
        return listed, version


class World:
    def __init__(self, kind: str) -> None:
        self.api, self.cache = Api(), ObjectCache()
        self.changed: list[ServiceKey] = []
        self.appeared: list[Kind] = []
        self.feed = Feed(self.api, self.cache, BY_NAME[kind], None, self.changed.append, self.appeared.append)
        self.task = asyncio.create_task(self.feed.run())

    def names(self) -> set[str]:
        return {name for _, name in self.cache.keys("Pod")}

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110 - what is waited for knows no event
                await asyncio.sleep(0.002)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@pytest.fixture
async def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(feed_module, "FIRST_BACKOFF_S", 0.01)
    worlds: list[World] = []

    def made(kind: str = "Pod") -> World:
        worlds.append(World(kind))
        return worlds[-1]

    yield made
    for world in worlds:
        await world.stop()


Make = Callable[..., World]


async def test_a_kind_is_synced_when_kopf_and_then_we_have_listed_it(make: Make) -> None:
    world = make()
    world.api.pods = [pod("a", 10)]
    world.feed.requested(listed=False)
    await asyncio.sleep(0.01)
    assert (world.api.lists, world.feed.synced.is_set()) == (0, False)
    world.feed.requested(listed=True)
    await world.until(world.feed.synced.is_set)
    assert world.names() == {"a"}
    assert world.changed == [("n", "service-a")]


async def test_an_object_leaves_the_cache_when_kopf_lists_anew_after_a_broken_watch(make: Make) -> None:
    world = make()
    world.feed.take(None, pod("a", 10))
    world.feed.take("ADDED", pod("b", 11))
    assert world.names() == {"a", "b"}
    world.changed.clear()
    world.api.pods = [pod("b", 11)]  # the deletion of a was never reported, nor does kopf yield anything for it
    world.feed.requested(listed=True)
    await world.until(lambda: world.names() == {"b"})
    assert world.changed == [("n", "service-a")]


async def test_an_object_leaves_the_cache_when_a_list_is_due(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "RELIST_S", 0.02)
    world = make()
    world.feed.take("ADDED", pod("a", 10))
    await world.until(lambda: world.names() == set())


async def test_what_the_watch_reports_stays_when_a_list_that_began_earlier_ends_later(make: Make) -> None:
    world = make()
    for name in "ab":
        world.feed.take("ADDED", pod(name, 10))
    world.api.pods, world.api.version = [pod("a", 10), pod("b", 10)], 20
    world.api.may_answer.clear()
    world.feed.requested(listed=True)
    await world.until(lambda: world.api.lists == 1)
    world.feed.take("MODIFIED", pod("a", 21))
    world.feed.take("DELETED", pod("b", 22))
    world.feed.take("ADDED", pod("new", 23))
    world.changed.clear()
    world.api.may_answer.set()
    await world.until(world.feed.synced.is_set)
    assert world.names() == {"a", "new"}
    assert world.changed == []


async def test_an_answer_is_no_news_when_it_arrives_after_the_watch_reported_the_deletion(make: Make) -> None:
    world = make()
    world.feed.take("ADDED", pod("a", 60))
    world.feed.take("DELETED", pod("a", 62))
    assert world.cache.written("Pod", pod("a", 61)) is None
    assert world.names() == set()


async def test_what_was_seen_stays_when_lists_fail_for_a_while(make: Make) -> None:
    world = make()
    world.feed.take(None, pod("a", 10))
    world.api.pods = [pod("a", 10), pod("b", 11)]
    world.api.failures = [ApiError(503, "", "not now"), TimeoutError(), OSError("away")]
    world.feed.requested(listed=True)
    await world.until(lambda: len(world.api.failures) == 1)
    assert world.names() == {"a"}
    await world.until(lambda: world.names() == {"a", "b"})
    assert world.api.lists == 4


async def test_an_optional_kind_is_synced_and_reported_later_when_the_cluster_does_not_know_it_at_first(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "SERVED_POLL_S", 0.02)
    monkeypatch.setattr(feed_module, "MISSED_POLL_S", 0.01)
    world = make("LeaderWorkerSet")
    world.api.failures = [ApiError(404, "NotFound", "no such kind") for _ in range(3)]
    await world.until(world.feed.synced.is_set)
    assert world.cache.unserved == {"LeaderWorkerSet"}
    assert world.appeared == []
    await world.until(lambda: [kind.name for kind in world.appeared] == ["LeaderWorkerSet"])


async def test_services_are_looked_at_again_when_a_kind_that_was_missing_is_listed(make: Make) -> None:
    world = make("LeaderWorkerSet")
    world.cache.unserved.add("LeaderWorkerSet")
    world.cache.put("InferenceService", {**pod("s", 3), "spec": {}})
    world.feed.requested(listed=True)
    await world.until(lambda: world.changed == [("n", "s")])
    assert world.cache.unserved == set()


async def test_an_optional_kind_is_looked_for_more_often_when_a_service_needs_it(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "SERVED_POLL_S", 1000.0)
    monkeypatch.setattr(feed_module, "MISSED_POLL_S", 0.01)
    world = make("LeaderWorkerSet")
    world.api.failures = [ApiError(404, "NotFound", "no such kind") for _ in range(2)]
    await world.until(world.feed.synced.is_set)
    await asyncio.sleep(0.05)
    assert world.api.lists == 1
    world.cache.missed.add("LeaderWorkerSet")
    await world.until(lambda: bool(world.appeared))
