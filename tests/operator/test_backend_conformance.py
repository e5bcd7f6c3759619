"""The contract of `Backend`, which every implementation keeps: the same cases for each line of `PLACES`.

A place is where engines run: this process' memory, this machine, an API server in memory, a real one.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import pytest
import yaml

from mini_infer_operator.local import backend as local_backend
from mini_infer_operator.local.backend import LocalBackend
from mini_infer_operator.local.ports import HOST
from mini_infer_operator.local.supervise import Command, OrphanReaper
from mini_infer_operator.objects.api import KubernetesApi
from mini_infer_operator.objects.backend import ClusterBackend
from mini_infer_operator.objects.cache import ObjectCache
from mini_infer_operator.objects.kinds import KINDS
from mini_infer_operator.observe import Observed
from mini_infer_operator.parse import parse_service
from mini_infer_operator.plan.plan import make_plan
from mini_infer_operator.reconcile import Backend, reconcile
from mini_infer_operator.resource import LABEL_SERVICE
from mini_infer_operator.settings import OperatorSettings
from tests.operator.test_reconcile import MemoryBackend
from tests.support.api_servers import server_of
from tests.support.control_plane import ControlPlane
from tests.support.memory_api import MemoryApi
from tests.support.services import VALID, changed

LIMIT_S = 60.0
"""Ends a test that hangs."""
QUICK = {"rollout": {"minReadySeconds": 0}}
SETTINGS = OperatorSettings(engine_image="engine:1")


class Place(Protocol):
    """A backend with the user who edits its service, and whatever starts engines."""

    name: str

    async def backend(self) -> Backend:
        """Returns a backend for one run of `reconcile`."""

    async def store(self, document: dict[str, Any]) -> None:
        """Creates or edits the service as a user does."""

    async def advance(self) -> None:
        """Lets engines start or end."""

    async def writes(self) -> object:
        """Returns a value that changes with everything that the backend writes."""


class Memory:
    name = "demo"

    def __init__(self) -> None:
        self._backend = MemoryBackend(None)

    async def backend(self) -> Backend:
        return self._backend

    async def store(self, document: dict[str, Any]) -> None:
        before = self._backend.stored or {"metadata": {"generation": 0}}
        generation = before["metadata"]["generation"] + 1
        self._backend.stored = changed({"metadata": {"generation": generation}}, document)
        self._backend.stored["status"] = before.get("status")

    async def advance(self) -> None:
        self._backend.start()

    async def writes(self) -> object:
        return self._backend.reports, self._backend.workloads, len(self._backend.events)


class OnApi:
    """A `ClusterBackend`, which reads what the API server has before each run."""

    name = "conformance"

    def __init__(self, api: KubernetesApi) -> None:
        self._api = api

    async def cache(self) -> ObjectCache:
        cache = ObjectCache()
        for kind in KINDS:
            if "watch" in kind.verbs and not kind.optional:
                cache.replace(kind.name, None, (await self._api.list(kind.name, "default"))[0])
        return cache

    async def backend(self) -> Backend:
        return ClusterBackend(self._api, await self.cache(), SETTINGS, "default", self.name)

    async def writes(self) -> object:
        cache = await self.cache()
        names = [(kind.name, *key) for kind in KINDS for key in cache.keys(kind.name)]
        found = [cache.get(*name) or {} for name in names]
        ours = [one for one in found if self.name in one["metadata"]["name"]]
        return sorted((one["metadata"]["uid"], one["metadata"]["resourceVersion"]) for one in ours)


class OnMemoryApi(OnApi):
    def __init__(self) -> None:
        self._memory = MemoryApi()
        super().__init__(self._memory)

    async def store(self, document: dict[str, Any]) -> None:
        await self._memory.apply(document)

    async def advance(self) -> None:
        self._memory.start_engines()


class OnApiServer(OnApi):
    def __init__(self, plane: ControlPlane, api: KubernetesApi) -> None:
        self._plane = plane
        super().__init__(api)

    async def store(self, document: dict[str, Any]) -> None:
        await asyncio.to_thread(self._plane.apply, document)

    async def advance(self) -> None:
        await asyncio.sleep(0.05)


class OnThisMachine:
    name = "demo"

    def __init__(self, folder: Path, backend: LocalBackend) -> None:
        self._folder, self._backend = folder, backend

    async def backend(self) -> Backend:
        return self._backend

    async def store(self, document: dict[str, Any]) -> None:
        (self._folder / "service.yaml").write_text(yaml.safe_dump(document))

    async def advance(self) -> None:
        await asyncio.sleep(0.01)

    async def writes(self) -> object:
        files = [self._folder / "status.json", self._backend.endpoints_path]
        return [path.stat().st_mtime_ns for path in files], [engine.process.pid for engine in self._backend._engines]


ENGINE = """
import http.server, sys
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer((sys.argv[1], int(sys.argv[2])), Ready).serve_forever()
"""
"""Stands in for an engine: it answers that it is ready."""


def stub_command(launch: object, ports: tuple[int, ...], peer_key: Path, **more: object) -> Command:
    return Command([sys.executable, "-I", "-S", "-c", ENGINE, HOST, str(ports[0])], {}, f"http://{HOST}:{ports[0]}")


@asynccontextmanager
async def in_memory(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    yield Memory()


@asynccontextmanager
async def on_memory_api(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    yield OnMemoryApi()


@asynccontextmanager
async def on_api_server(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    plane: ControlPlane = request.getfixturevalue("plane_with_pods")
    async with server_of(plane.kubeconfig) as server:
        yield OnApiServer(plane, KubernetesApi(server))
    await asyncio.to_thread(plane.kubectl, "delete", "infsvc", OnApi.name, "--cascade=foreground", "--ignore-not-found")
    own = f"--selector={LABEL_SERVICE}={OnApi.name}"
    await asyncio.to_thread(plane.kubectl, "wait", "--for=delete", "deployments,services", own, "--timeout=60s")


@asynccontextmanager
async def on_this_machine(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    folder: Path = request.getfixturevalue("tmp_path")
    patch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
    patch.setattr(local_backend, "engine_command", stub_command)
    patch.setattr(local_backend, "UNROUTE_S", 0.0)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        reaper = await OrphanReaper.start(sys.executable)
        stack.push_async_callback(reaper.close)
        path = folder / "service.yaml"
        backend = LocalBackend(path, folder, reaper, session, (), print, lambda: None, "http://gateway")
        stack.push_async_callback(backend.close, 5.0)
        yield OnThisMachine(folder, backend)


PLACES = [
    in_memory,
    on_this_machine,
    on_memory_api,
    pytest.param(on_api_server, marks=pytest.mark.cluster),
]


@pytest.fixture(params=PLACES)
async def place(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    async with request.param(request) as place:
        yield place


def service(place: Place, replicas: int, **unified: Any) -> dict[str, Any]:
    spec = {**QUICK, "unified": {"replicas": replicas, **unified}}
    return changed({"metadata": {"name": place.name}, "spec": spec}, VALID)


async def observed(place: Place) -> tuple[Mapping[str, Any], Observed]:
    backend = await place.backend()
    stored = await backend.read()
    assert stored is not None
    return stored.get("status") or {}, await backend.observe(parse_service(stored))


async def settle(place: Place, is_settled: Callable[[Mapping[str, Any], Observed], bool]) -> None:
    """Reconciles until the status and the engines are as they should be, and one run more."""
    end_s = time.monotonic() + LIMIT_S
    while True:
        await reconcile(await place.backend())
        found = await observed(place)
        if is_settled(*found):
            await reconcile(await place.backend())
            return
        assert time.monotonic() < end_s, found
        await place.advance()


def has_ready(replicas: int) -> Callable[[Mapping[str, Any], Observed], bool]:
    def is_settled(status: Mapping[str, Any], seen: Observed) -> bool:
        return status.get("readyReplicas", 0) == replicas and [(w.replicas, w.ready) for w in seen.workloads] == (
            [(replicas, replicas)] if seen.workloads else []
        )

    return is_settled


async def test_nothing_is_read_when_no_service_is_stored(place: Place) -> None:
    assert await (await place.backend()).read() is None
    assert await reconcile(await place.backend()) is None


async def test_status_and_engines_agree_when_a_service_is_ready(place: Place) -> None:
    await place.store(service(place, 2))
    await settle(place, has_ready(2))
    status, seen = await observed(place)
    [workload] = seen.workloads
    assert (workload.role, workload.replicas, workload.ready, workload.worked) == ("unified", 2, 2, True)
    assert workload.revision == status["revision"]
    stored = await (await place.backend()).read()
    assert stored is not None
    assert status["observedGeneration"] == stored["metadata"]["generation"]
    assert status["url"] == (await place.backend()).url(parse_service(stored))
    assert str(status["url"]).startswith("http://")


async def test_nothing_is_written_when_nothing_has_changed(place: Place) -> None:
    await place.store(service(place, 1))
    await settle(place, has_ready(1))
    end_s = time.monotonic() + LIMIT_S
    while True:  # until nothing else writes: Kubernetes' own controllers do so when they can
        before = await place.writes()
        for _ in range(3):
            await reconcile(await place.backend())
        if (after := await place.writes()) == before:
            break
        assert time.monotonic() < end_s, (before, after)
        await place.advance()


async def test_a_plan_has_no_further_effect_when_it_is_applied_again(place: Place) -> None:
    await place.store(service(place, 2))
    backend = await place.backend()
    stored = await backend.read()
    assert stored is not None
    parsed = parse_service(stored)
    plan = make_plan(parsed, await backend.observe(parsed), datetime.now(UTC))
    for _ in range(2):
        assert await backend.apply(parsed, plan) is None
    _, seen = await observed(place)
    assert [workload.replicas for workload in seen.workloads] == [2]


async def test_engines_follow_when_replicas_change(place: Place) -> None:
    await place.store(service(place, 2))
    await settle(place, has_ready(2))
    _, before = await observed(place)
    for replicas in (1, 0, 1):
        await place.store(service(place, replicas))
        await settle(place, has_ready(replicas))
    _, after = await observed(place)
    assert [w.revision for w in after.workloads] == [w.revision for w in before.workloads]


async def test_only_the_new_revision_is_left_when_the_engine_changes(place: Place) -> None:
    await place.store(service(place, 1))
    await settle(place, has_ready(1))
    status, _ = await observed(place)
    await place.store(service(place, 1, engine={"maxNumSeqs": 3}))
    await settle(
        place,
        lambda now, seen: (
            now["revision"] != status["revision"]
            and [(w.revision, w.ready) for w in seen.workloads] == [(now["revision"], 1)]
        ),
    )


async def test_a_status_is_read_back_when_it_was_reported(place: Place) -> None:
    await place.store(service(place, 0))
    await settle(place, has_ready(0))
    stored = await (await place.backend()).read()
    assert stored is not None
    status = {**stored["status"], "readyReplicas": 7}
    await (await place.backend()).report(stored, status)
    assert (await observed(place))[0] == status


async def test_recording_an_event_never_raises(place: Place) -> None:
    await place.store(service(place, 0))
    backend = await place.backend()
    stored = await backend.read()
    assert stored is not None
    for _ in range(2):
        backend.record_event(stored, "Ready", "1 of 1 engines are ready")
        backend.record_event(stored, "Refused", "exceeded quota", "Warning")
