"""Tests which code computes a model, as the newest engine says, whatever it answers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from mini_infer_operator.objects import backend
from mini_infer_operator.objects.backend import ClusterBackend
from mini_infer_operator.objects.engine_answers import LONGEST_ANSWER_BYTES
from mini_infer_operator.objects.model_implementations import RETRY_S, ModelImplementations
from mini_infer_operator.objects.observed_workloads import newest_ready
from mini_infer_operator.reconcile import reconcile
from mini_infer_operator.resource import KIND, LABEL_SERVICE
from tests.operator.test_backend_conformance import SETTINGS, OnMemoryApi
from tests.support.services import changed

SERVICE = ("default", "demo")
ANSWERS: dict[str, tuple[bytes, str | None]] = {
    "ours": (b'{"object": "list", "data": [{"id": "m", "model_impl": "transformers"}]}', "transformers"),
    "several names": (b'{"data": [{"id": "a"}, {"id": "b", "model_impl": "native"}]}', "native"),
    "an older engine's": (b'{"data": [{"id": "m"}]}', None),
    "another server's": (b"<html>", None),
    "a number": (b'{"data": [{"model_impl": 1}]}', None),
    "control sequences": (b'{"data": [{"model_impl": "\\u001b[31m"}]}', None),
    "a long name": (b'{"data": [{"model_impl": "' + b"x" * 40 + b'"}]}', None),
    "a long answer": (b'{"data": [{"model_impl": "native"}], "more": "' + b"x" * LONGEST_ANSWER_BYTES + b'"}', None),
}


@asynccontextmanager
async def server_of(answer: Callable[[], bytes]) -> AsyncIterator[tuple[str, list[str]]]:
    """Yields a URL that answers with these bytes, and the paths that are requested."""
    paths: list[str] = []

    async def respond(request: web.BaseRequest) -> web.Response:
        paths.append(request.path)
        return web.Response(body=answer())

    runner = web.ServerRunner(web.Server(respond))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}", paths
    await runner.cleanup()


@pytest.mark.parametrize("name", ANSWERS)
async def test_an_implementation_is_read_or_left_out_when_an_engine_answers_anything(name: str) -> None:
    answer, expected = ANSWERS[name]
    changed: list[tuple[str, str]] = []
    async with server_of(lambda: answer) as (url, paths), aiohttp.ClientSession(auto_decompress=False) as session:
        implementations = ModelImplementations(session, changed.append)
        assert implementations.of_service(SERVICE, "pod", url) is None, "nobody waits for the answer"
        await answered(implementations)
        assert implementations.of_service(SERVICE, "pod", url) == expected
        await implementations.close()
    assert changed == ([] if expected is None else [SERVICE])
    assert paths == ["/v1/models"]


async def answered(implementations: ModelImplementations) -> None:
    """Waits until each engine has answered, or has failed to."""
    await asyncio.gather(*(query.task for query in implementations._queries.values()))


async def test_an_engine_is_asked_once_and_again_later_when_it_did_not_answer() -> None:
    answers = [ANSWERS["another server's"][0], ANSWERS["ours"][0], ANSWERS["several names"][0]]
    now = [0.0]
    async with server_of(lambda: answers[0]) as (url, paths), aiohttp.ClientSession(auto_decompress=False) as session:
        implementations = ModelImplementations(session, lambda _: None, lambda: now[0])

        async def of_service(engine: str) -> str | None:
            implementations.of_service(SERVICE, engine, url)
            await answered(implementations)
            return implementations.of_service(SERVICE, engine, url)

        assert [await of_service("one"), await of_service("one"), len(paths)] == [None, None, 1]
        answers.pop(0)
        now[0] = RETRY_S
        assert [await of_service("one"), await of_service("one"), len(paths)] == ["transformers", "transformers", 2]
        answers.pop(0)
        assert await of_service("two") == "native", "another engine may run other code"
        implementations.forget(SERVICE)
        assert [await of_service("two"), len(paths)] == ["native", 4]
        await implementations.close()


async def test_queries_end_when_they_are_closed() -> None:
    never = asyncio.Event()

    async def hang(request: web.BaseRequest) -> web.Response:
        await never.wait()
        return web.Response()

    runner = web.ServerRunner(web.Server(hang), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession(auto_decompress=False) as session, asyncio.timeout(10):
        implementations = ModelImplementations(session, lambda _: None)
        assert implementations.of_service(SERVICE, "pod", f"http://127.0.0.1:{runner.addresses[0][1]}") is None
        (query,) = implementations._queries.values()
        await implementations.close()
        assert query.task.cancelled()
    never.set()
    await runner.cleanup()


def pod(name: str, created: str, *, ready: bool = True, **metadata: Any) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": str(ready)}]
    return {
        "metadata": {"name": name, "creationTimestamp": created, **metadata},
        "spec": {},
        "status": {"conditions": conditions, "podIP": "10.0.0.1"},
    }


def test_the_newest_engine_that_stays_is_chosen_when_several_are_ready() -> None:
    worker = pod("worker", "2026-01-05", labels={"leaderworkerset.sigs.k8s.io/worker-index": "1"})
    leaving = pod("leaving", "2026-01-04", deletionTimestamp="2026-01-06")
    pods = [pod("old", "2026-01-01"), pod("new", "2026-01-02"), pod("loading", "2026-01-03", ready=False)]
    assert newest_ready([*pods, leaving, worker]) == pods[1]
    assert newest_ready(pods[2:]) is None


async def test_the_status_names_the_implementation_when_the_newest_engine_has_reported_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = OnMemoryApi()
    await place.store(changed({"metadata": {"name": place.name}}))
    cache = await place.cache()
    own = {
        "namespace": "default",
        "uid": "u",
        "resourceVersion": "1",
        "labels": {LABEL_SERVICE: place.name},
        "annotations": {},
    }
    engine = pod("engine", "2026-01-01", **own)
    engine["status"]["podIP"] = "127.0.0.1"
    cache.put("Pod", engine)

    async with (
        server_of(lambda: ANSWERS["ours"][0]) as (url, _),
        aiohttp.ClientSession(auto_decompress=False) as session,
    ):
        monkeypatch.setattr(backend, "HTTP_PORT", int(url.rpartition(":")[2]))
        queued: list[tuple[str, str]] = []
        implementations = ModelImplementations(session, queued.append)
        statuses = []
        for _ in range(2):
            cluster = ClusterBackend(
                place._api, cache, SETTINGS, "default", place.name, implementations=implementations
            )
            await reconcile(cluster)
            statuses.append((cache.get(KIND, "default", place.name) or {})["status"])
            await answered(implementations)
        await implementations.close()
    assert ["modelImpl" in status for status in statuses] == [False, True]
    assert statuses[1]["modelImpl"] == "transformers"
    assert queued == [("default", place.name)]
