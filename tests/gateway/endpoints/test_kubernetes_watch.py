"""The watch against a false API server, and a real one (etcd and kube-apiserver from KUBEBUILDER_ASSETS)."""

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from mini_infer_gateway.endpoints import list_watch
from mini_infer_gateway.endpoints.base import Listed, Service
from mini_infer_gateway.endpoints.kubernetes_watch import KubernetesWatch
from mini_infer_operator.local.ports import free_ports
from mini_infer_operator.resource import GROUP
from tests.support.api_servers import server_of
from tests.support.running_gateway import until


def kubeconfig(folder: Path, server: str, token: str = "t") -> str:
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": server, "insecure-skip-tls-verify": True}}],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "c",
    }
    path = folder / "kubeconfig"
    path.write_text(json.dumps(content))
    return str(path)


def pod(name: str, version: str = "1", **metadata: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "ns",
            "resourceVersion": version,
            "labels": {f"{GROUP}/service": "svc", **metadata.pop("labels", {})},
            "annotations": metadata.pop("annotations", {f"{GROUP}/model": "m"}),
            **metadata,
        },
        "spec": {"containers": [{"name": "engine", "image": "x"}]},
        "status": {"phase": "Running", "podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]},
    }


REAL_POD_BOOKMARKS = (
    b'{"type":"BOOKMARK","object":{"kind":"Pod","apiVersion":"v1","metadata":{"resourceVersion":"213","annotations":'
    b'{"k8s.io/initial-events-end":"true"}},"spec":{"containers":null},"status":{}}}\n'
    b'{"type":"BOOKMARK","object":{"kind":"Pod","apiVersion":"v1","metadata":{"resourceVersion":"239"},'
    b'"spec":{"containers":null},"status":{}}}\n'
)
"""As kube-apiserver 1.36.4 sent them."""


def service(name: str, model: str | None = "m", created: str = "2026-01-01T00:00:00Z") -> dict[str, Any]:
    return {
        "apiVersion": f"{GROUP}/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name, "namespace": "ns", "resourceVersion": "1", "creationTimestamp": created},
        "spec": {"model": {"uri": "demo"} | ({"name": model} if model else {})},
    }


class Watching:
    """A running watch and the last lists that it published."""

    def __init__(self) -> None:
        self.lists: list[Sequence[Listed]] = []
        self.services: Sequence[Service] | None = None

    def publish(self, listed: Sequence[Listed], services: Sequence[Service] | None = None) -> None:
        self.lists.append(listed)
        self.services = services

    def names(self) -> dict[str, bool]:
        return {listed.endpoint.name: listed.ready for listed in self.lists[-1]} if self.lists else {}


@asynccontextmanager
async def watching(config: str, namespace: str | None = None) -> AsyncIterator[Watching]:
    seen = Watching()
    task = asyncio.create_task(KubernetesWatch(namespace, config).run(seen.publish))
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class FalseServer:
    """Lists `pods`; each watch sends what is in the queue: an event, or None to end it."""

    def __init__(self) -> None:
        self.pods: list[dict[str, Any]] = []
        self.services: list[dict[str, Any]] | None = []
        self.events: asyncio.Queue[dict[str, Any] | bytes | None] = asyncio.Queue()
        self.service_events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.watched_from: list[str] = []
        self.lists = 0
        self.fail_lists = 0

    async def handle_services(self, request: web.Request) -> web.StreamResponse:
        if self.services is None:
            return web.json_response({"kind": "Status", "code": 404}, status=404)
        if "watch" not in request.query:
            return web.json_response({"metadata": {"resourceVersion": "10"}, "items": self.services})
        response = web.StreamResponse()
        await response.prepare(request)
        while event := await self.service_events.get():
            await response.write(json.dumps(event).encode() + b"\n")
        return response

    async def handle(self, request: web.Request) -> web.StreamResponse:
        assert request.query["labelSelector"] == f"{GROUP}/service"
        if "watch" not in request.query:
            self.lists += 1
            if self.fail_lists:
                self.fail_lists -= 1
                return web.json_response({"kind": "Status", "code": 500}, status=500)
            return web.json_response({"kind": "PodList", "metadata": {"resourceVersion": "10"}, "items": self.pods})
        self.watched_from.append(request.query["resourceVersion"])
        assert int(request.query["timeoutSeconds"]) == list_watch.WATCH_S
        response = web.StreamResponse()
        await response.prepare(request)
        while event := await self.events.get():
            line = event if isinstance(event, bytes) else json.dumps(event).encode() + b"\n"
            await response.write(line[:7])
            await response.write(line[7:])
            if isinstance(event, dict) and event["type"] == "ERROR":
                break
        return response


@asynccontextmanager
async def false_server(folder: Path) -> AsyncIterator[tuple[FalseServer, str]]:
    server = FalseServer()
    app = web.Application()
    app.router.add_get("/api/v1/pods", server.handle)
    app.router.add_get(f"/apis/{GROUP}/v1alpha1/inferenceservices", server.handle_services)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield server, kubeconfig(folder, f"http://127.0.0.1:{runner.addresses[0][1]}")
    finally:
        server.events.put_nowait(None)
        server.service_events.put_nowait(None)
        await runner.cleanup()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(list_watch, "FIRST_BACKOFF_S", 0.02)


async def test_watch_resumes_from_its_bookmark_when_it_ends(tmp_path: Path) -> None:
    async with false_server(tmp_path) as (server, config):
        server.pods = [pod("a")]
        async with watching(config) as seen:
            await until(lambda: seen.names() == {"ns/a": True})
            server.events.put_nowait({"type": "ADDED", "object": pod("b", "11")})
            await until(lambda: seen.names() == {"ns/a": True, "ns/b": True})
            draining = pod("b", "12", labels={f"{GROUP}/draining": "true"})
            server.events.put_nowait({"type": "MODIFIED", "object": draining})
            await until(lambda: seen.names() == {"ns/a": True, "ns/b": False})
            server.events.put_nowait({"type": "DELETED", "object": pod("a", "13")})
            await until(lambda: seen.names() == {"ns/b": False})
            server.events.put_nowait(REAL_POD_BOOKMARKS)
            server.events.put_nowait(None)
            await until(lambda: server.watched_from == ["10", "239"])
            assert server.lists == 1


async def test_a_pods_last_state_is_kept_and_others_go_on_when_its_object_is_malformed(tmp_path: Path) -> None:
    async with false_server(tmp_path) as (server, config):
        odd = pod("odd") | {"spec": {"containers": "none"}}
        server.pods = [pod("a"), odd, pod("b")]
        async with watching(config) as seen:
            await until(lambda: seen.names() == {"ns/a": True, "ns/b": True})
            server.events.put_nowait({"type": "MODIFIED", "object": pod("a", "11") | {"status": 7}})
            server.events.put_nowait({"type": "DELETED", "object": pod("b", "12")})
            await until(lambda: seen.names() == {"ns/a": True})
            assert len(server.watched_from) == 1


async def test_backoff_is_reset_when_a_list_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    real_sleep = asyncio.sleep

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        await real_sleep(0)

    monkeypatch.setattr(list_watch.asyncio, "sleep", sleep)
    async with false_server(tmp_path) as (server, config):
        server.fail_lists = 6
        async with watching(config) as seen:
            while not seen.lists:
                await real_sleep(0.005)
            assert max(pauses) > 16 * list_watch.FIRST_BACKOFF_S
            pauses.clear()
            server.events.put_nowait({"type": "ERROR", "object": {"kind": "Status", "code": 500, "message": "etcd"}})
            while not pauses:
                await real_sleep(0.005)
            assert pauses[0] < 1.3 * list_watch.FIRST_BACKOFF_S


async def test_a_services_age_comes_from_its_own_object_when_its_pods_annotate_another(tmp_path: Path) -> None:
    async with false_server(tmp_path) as (server, config):
        server.pods = [
            pod("a", annotations={f"{GROUP}/model": "m", f"{GROUP}/service-created": "1970-01-01T00:00:00Z"})
        ]
        server.services = [service("svc"), service("unnamed", None)]
        async with watching(config) as seen:
            await until(lambda: seen.names() == {"ns/a": True})
            created = "2026-01-01T00:00:00Z"
            assert seen.services == [Service("ns/svc", created, "m"), Service("ns/unnamed", created, "unnamed")]
            assert seen.lists[-1][0].endpoint.service_created == ""
            server.service_events.put_nowait({"type": "DELETED", "object": service("svc")})
            await until(lambda: seen.services == [Service("ns/unnamed", created, "unnamed")])


async def test_no_services_are_listed_when_the_crd_is_not_installed(tmp_path: Path) -> None:
    async with false_server(tmp_path) as (server, config):
        server.pods, server.services = [pod("a")], None
        async with watching(config) as seen:
            await until(lambda: seen.names() == {"ns/a": True})
            assert seen.services == []


async def test_services_are_gone_when_their_kind_is_removed_from_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(list_watch, "FIRST_BACKOFF_S", 0.01)
    async with false_server(tmp_path) as (server, config):
        server.pods, server.services = [pod("a")], [service("svc")]
        async with watching(config) as seen:
            await until(lambda: bool(seen.services))
            server.services = None
            server.service_events.put_nowait(None)
            await until(lambda: seen.services == [])
            assert seen.names() == {"ns/a": True}
            server.services = [service("svc")]
            await until(lambda: bool(seen.services))


async def test_pods_are_relisted_and_missing_ones_dropped_when_the_watch_gets_410(tmp_path: Path) -> None:
    async with false_server(tmp_path) as (server, config):
        server.pods = [pod("a")]
        async with watching(config) as seen:
            await until(lambda: len(server.watched_from) == 1)
            server.pods = [pod("b")]
            server.events.put_nowait({"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}})
            await until(lambda: seen.names() == {"ns/b": True})


async def test_the_last_list_is_kept_when_the_api_server_fails(tmp_path: Path) -> None:
    async with false_server(tmp_path) as (server, config):
        server.pods, server.fail_lists = [pod("a")], 2
        async with watching(config) as seen:
            await until(lambda: seen.names() == {"ns/a": True})
            server.pods, server.fail_lists = [], 3
            server.events.put_nowait({"type": "ERROR", "object": {"kind": "Status", "code": 500, "message": "etcd"}})
            server.events.put_nowait({"type": "ERROR", "object": {"kind": "Status", "code": 500, "message": "etcd"}})
            await until(lambda: server.fail_lists == 0)
            await until(lambda: seen.names() == {})
            assert {len(listed) for listed in seen.lists} == {0, 1}


@pytest.fixture(scope="module")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An API server that stores things and runs nothing; yields a kubeconfig."""
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    if not assets:
        pytest.skip("KUBEBUILDER_ASSETS names no folder with etcd and kube-apiserver")
    folder = tmp_path_factory.mktemp("api")
    etcd_port, peer_port, port = free_ports(3)
    (folder / "tokens.csv").write_text('secret,admin,admin,"system:masters"\n')
    subprocess.run(
        ["openssl", "genrsa", "-out", folder / "key", "2048"],
        check=True,
        capture_output=True,
    )
    etcd_url = f"http://127.0.0.1:{etcd_port}"
    commands = [
        [f"{assets}/etcd", f"--data-dir={folder}/etcd", "--unsafe-no-fsync", f"--listen-client-urls={etcd_url}",
         f"--advertise-client-urls={etcd_url}", f"--listen-peer-urls=http://127.0.0.1:{peer_port}"],
        [f"{assets}/kube-apiserver", f"--etcd-servers={etcd_url}", "--bind-address=127.0.0.1", f"--secure-port={port}",
         f"--cert-dir={folder}/certs", "--service-account-issuer=https://kubernetes.default.svc",
         f"--service-account-signing-key-file={folder}/key", f"--service-account-key-file={folder}/key",
         f"--token-auth-file={folder}/tokens.csv", "--authorization-mode=RBAC",
         "--disable-admission-plugins=ServiceAccount",
         "--service-cluster-ip-range=10.96.0.0/16", "--endpoint-reconciler-type=none"],
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        processes = [subprocess.Popen(command, stdout=log, stderr=log) for command in commands]
    try:
        yield kubeconfig(folder, f"https://127.0.0.1:{port}", "secret")
    finally:
        for process in reversed(processes):
            process.kill()
            process.wait()


@pytest.mark.cluster
async def test_watch_follows_pods_of_a_real_api_server(api_server: str) -> None:
    async with server_of(api_server) as api, watching(api_server, "gw") as seen:
        # The watch begins before the server does: it has to wait for it.
        await until(lambda: bool(seen.lists), timeout_s=200)
        await api.request("POST", "/api/v1/namespaces", body={"metadata": {"name": "gw"}})
        pods = "/api/v1/namespaces/gw/pods"

        async def patch(path: str, body: dict[str, Any]) -> None:
            await api.request("PATCH", path, body=body, content_type="application/merge-patch+json")

        async def create(name: str, labels: dict[str, str]) -> None:
            body = pod(name, namespace="gw", labels=labels)
            del body["metadata"]["resourceVersion"]
            await api.request("POST", pods, body=body)
            await patch(f"{pods}/{name}/status", {"status": body["status"]})

        await create("a", {})
        await until(lambda: seen.names() == {"gw/a": True})
        await create("b", {f"{GROUP}/draining": "true"})
        await until(lambda: seen.names() == {"gw/a": True, "gw/b": False})
        await patch(f"{pods}/b", {"metadata": {"labels": {f"{GROUP}/draining": None}}})
        await until(lambda: seen.names() == {"gw/a": True, "gw/b": True})
        await patch(f"{pods}/b", {"metadata": {"labels": {f"{GROUP}/service": None}}})
        await until(lambda: seen.names() == {"gw/a": True})
        await api.request("DELETE", f"{pods}/a", query={"gracePeriodSeconds": "0"})
        await until(lambda: seen.names() == {})
