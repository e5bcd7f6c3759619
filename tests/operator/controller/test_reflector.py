"""List and watch against a small API server that misbehaves as real ones do."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web

from mini_infer_contract.kubernetes_access import AccessError, ClusterAccess
from mini_infer_contract.kubernetes_client import KubernetesClient
from mini_infer_operator.controller import reflector as reflector_module
from mini_infer_operator.controller.reflector import Reflector
from mini_infer_operator.objects.cache import ObjectCache, ServiceKey
from mini_infer_operator.objects.kinds import BY_NAME

BOOKMARK = {"metadata": {"resourceVersion": "90"}, "spec": {"containers": None}, "status": {}}


def pod(name: str, version: int) -> dict[str, Any]:
    labels = {"serving.mini-infer.io/service": f"service-{name}"}
    metadata = {"name": name, "namespace": "n", "uid": name, "resourceVersion": str(version), "labels": labels}
    return {"metadata": metadata, "spec": {"containers": []}, "status": {}}


class ApiServer:
    """Answers lists with `pods` and watches with the next of `watches`; an empty one stays open, silent."""

    def __init__(self) -> None:
        self.pods: list[dict[str, Any]] = []
        self.watches: list[list[tuple[str, Any]]] = []
        self.lists = 0
        self.watched_from: list[str] = []
        self.refusals = 0
        self.pods_after_a_watch: list[dict[str, Any]] | None = None

    async def serve(self, request: web.Request) -> web.StreamResponse:
        if self.refusals:
            self.refusals -= 1
            return web.json_response({"message": "not now", "code": 503}, status=503)
        if "watch" not in request.query:
            self.lists += 1
            start = int(request.query.get("continue", "0"))
            end = start + int(request.query["limit"])
            more = {"continue": str(end)} if end < len(self.pods) else {}
            return web.json_response({"metadata": {"resourceVersion": "50", **more}, "items": self.pods[start:end]})
        self.watched_from.append(request.query["resourceVersion"])
        self.pods = self.pods if self.pods_after_a_watch is None else self.pods_after_a_watch
        response = web.StreamResponse()
        await response.prepare(request)
        if not self.watches:
            await asyncio.sleep(60)
        for kind, item in self.watches.pop(0) if self.watches else ():
            await response.write(json.dumps({"type": kind, "object": item}).encode() + b"\n")
        return response


class World:
    def __init__(self, server: ApiServer, cache: ObjectCache, reflector: Reflector, changed: list[ServiceKey]) -> None:
        self.server, self.cache, self.reflector, self.changed = server, cache, reflector, changed
        self.failing_credentials = 0
        """Requests that still find no credentials."""

    def authorization(self) -> None:
        if self.failing_credentials:
            self.failing_credentials -= 1
            raise AccessError("credential plugin: no session")

    def names(self) -> set[str]:
        return {name for _, name in self.cache.keys("Pod")}


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(reflector_module, "FIRST_BACKOFF_S", 0.01)
    server = ApiServer()
    app = web.Application()
    app.router.add_get("/api/v1/pods", server.serve)
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    changed: list[ServiceKey] = []
    access = ClusterAccess(f"http://127.0.0.1:{port}", lambda: world.authorization(), None)
    async with KubernetesClient(access) as client:
        cache = ObjectCache()
        reflector = Reflector(client, cache, BY_NAME["Pod"], None, "label", changed.append)
        world = World(server, cache, reflector, changed)
        yield world
    await runner.cleanup()


async def run_until(world: World, condition: Callable[[], bool]) -> None:
    task = asyncio.create_task(world.reflector.run())
    try:
        async with asyncio.timeout(5):
            while not condition():  # noqa: ASYNC110 - what is waited for knows no event
                await asyncio.sleep(0.005)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_lists_in_pages_then_watches_from_there(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reflector_module, "PAGE", 2)
    world.server.pods = [pod(name, 10) for name in "abcde"]
    world.server.watches = [[("ADDED", pod("f", 60)), ("DELETED", pod("a", 61)), ("MODIFIED", pod("b", 62))]]
    await run_until(world, lambda: len(world.server.watched_from) == 2)
    assert world.names() == set("bcdef")
    assert world.reflector.synced.is_set()
    assert world.changed[-3:] == [("n", "service-f"), ("n", "service-a"), ("n", "service-b")]
    assert world.server.watched_from == ["50", "62"]
    assert world.server.lists == 3


async def test_a_bookmark_moves_on_without_an_object_in_it(world: World) -> None:
    world.server.watches = [[("BOOKMARK", BOOKMARK)]]
    await run_until(world, lambda: len(world.server.watched_from) == 2)
    assert world.server.watched_from == ["50", "90"]
    assert world.names() == set()


async def test_an_expired_version_lists_anew_and_finds_what_went_meanwhile(world: World) -> None:
    world.server.pods = [pod("a", 10), pod("b", 11)]
    gone = {"code": 410, "reason": "Expired", "message": "too old"}

    world.server.watches = [[("ERROR", gone)]]
    world.server.pods_after_a_watch = [pod("b", 11)]
    await run_until(world, lambda: len(world.server.watched_from) == 2)
    assert world.server.lists == 2
    assert world.names() == {"b"}
    assert ("n", "service-a") in world.changed[2:]


async def test_what_was_seen_stays_while_the_api_server_is_away(world: World) -> None:
    world.server.pods = [pod("a", 10)]
    await run_until(world, lambda: len(world.server.watched_from) == 1)
    world.server.refusals = 4
    world.server.watches = [[("ADDED", pod("b", 60))]]
    await run_until(world, lambda: world.server.refusals == 2)
    assert world.names() == {"a"}
    world.server.pods.append(pod("b", 60))
    await run_until(world, lambda: "b" in world.names())


async def test_a_silent_connection_is_dead(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reflector_module, "SILENCE_S", 0.05)
    await run_until(world, lambda: len(world.server.watched_from) >= 2)


async def test_a_list_removes_what_the_watch_never_reported_when_it_is_due(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reflector_module, "RELIST_S", 0.0)
    world.server.pods = [pod("a", 10), pod("b", 11)]
    world.server.pods_after_a_watch = [pod("b", 11)]
    world.server.watches = [[("BOOKMARK", BOOKMARK)]]
    await run_until(world, lambda: len(world.server.watched_from) == 2)
    assert world.server.lists == 2
    assert world.names() == {"b"}
    assert ("n", "service-a") in world.changed[2:]


async def test_a_late_answer_is_no_news_when_the_watch_reported_the_deletion(world: World) -> None:
    world.server.watches = [[("ADDED", pod("a", 60)), ("DELETED", pod("a", 62))]]
    await run_until(world, lambda: len(world.server.watched_from) == 2)
    assert world.cache.written("Pod", pod("a", 61)) is None
    assert world.names() == set()


async def test_the_watch_goes_on_when_credentials_fail_for_a_while(world: World) -> None:
    world.server.pods = [pod("a", 10)]
    world.failing_credentials = 3
    await run_until(world, lambda: len(world.server.watched_from) == 1)
    assert world.failing_credentials == 0
    assert world.names() == {"a"}
