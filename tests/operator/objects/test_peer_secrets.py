"""The Secrets with which peers of one service prove that they belong to it."""

from base64 import b64decode, b64encode
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from mini_infer_contract.peer_auth import PeerSecret
from mini_infer_operator.launch import launch_of
from mini_infer_operator.objects.api import KubernetesApi, RefusedError
from mini_infer_operator.objects.peer_secrets import AGAIN_S, PeerSecrets
from mini_infer_operator.objects.peers import (
    MISSED_AFTER,
    PEER_KEY_FILE,
    may_miss_secret,
    needs_peers_secret,
    peers_secret,
)
from mini_infer_operator.objects.pod import frozen_pods
from mini_infer_operator.parse import parse_service
from mini_infer_operator.resource import ANNOTATION_PEER_AUTH
from mini_infer_web.kubernetes_api import ApiError
from tests.support.services import changed

SERVICE = parse_service(changed({"metadata": {"name": "chat", "namespace": "team", "uid": "u1"}}))
ROOT = PeerSecret(bytes(range(32)))
NOW = datetime(2026, 11, 28, 12, tzinfo=UTC)


class Api:
    """Secrets of an API server, and what was done to them."""

    def __init__(self, stored: dict[str, Any] | None = None) -> None:
        self.secrets = {"system/mini-infer-peer-root": stored} if stored else {}
        self.calls: list[str] = []
        self.is_late = False

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        self.calls.append(f"get {namespace}/{name}")
        return self.secrets.get(f"{namespace}/{name}")

    async def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        name = f"{manifest['metadata']['namespace']}/{manifest['metadata']['name']}"
        self.calls.append(f"create {name}")
        if self.is_late:
            self.secrets[name] = root_of(ROOT)
        if name in self.secrets:
            raise ApiError(409, "AlreadyExists", "it exists")
        self.secrets[name] = manifest
        return manifest

    async def apply(self, manifest: dict[str, Any]) -> dict[str, Any]:
        name = f"{manifest['metadata']['namespace']}/{manifest['metadata']['name']}"
        self.calls.append(f"apply {name}")
        self.secrets[name] = manifest
        return manifest


def root_of(secret: PeerSecret) -> dict[str, Any]:
    return {"data": {"key": b64encode(secret.hex().encode()).decode()}}


def secrets_of(api: Api, clock: list[float] | None = None) -> PeerSecrets:
    times = clock or [0.0]
    return PeerSecrets(cast("KubernetesApi", api), "system/mini-infer", lambda: times[0])


def pod(
    age: timedelta, reason: str = "ContainerCreating", annotation: bool = True, now: datetime | None = None
) -> dict[str, Any]:
    created = ((now or datetime.now(UTC)) - age).strftime("%Y-%m-%dT%H:%M:%SZ")
    annotations = {ANNOTATION_PEER_AUTH: "service"} if annotation else {}
    waiting = [{"state": {"waiting": {"reason": reason}}}]
    return {
        "metadata": {"creationTimestamp": created, "annotations": annotations},
        "status": {"containerStatuses": waiting},
    }


async def test_a_services_peer_secret_equals_the_one_derived_by_gateways() -> None:
    api = Api(root_of(ROOT))
    await secrets_of(api).ensure(SERVICE, [])
    written = api.secrets["team/chat-peers"]
    assert written is not None
    assert b64decode(written["data"]["key"]).decode() == ROOT.for_service("team/chat").hex()
    assert written["metadata"]["ownerReferences"][0]["uid"] == "u1"
    assert api.calls == ["get system/mini-infer-peer-root", "apply team/chat-peers"]


async def test_the_root_is_made_once_when_there_is_none() -> None:
    api = Api()
    peers = secrets_of(api)
    root = await peers.root()
    assert await peers.root() == root
    assert api.calls == ["get system/mini-infer-peer-root", "create system/mini-infer-peer-root"]
    assert await secrets_of(api).root() == root


async def test_the_root_of_another_replica_is_taken_when_that_was_faster() -> None:
    api = Api()
    api.is_late = True
    assert await secrets_of(api).root() == ROOT


@pytest.mark.parametrize(
    "data", [None, {}, {"key": "!"}, {"key": b64encode(b"short").decode()}, {"key": b64encode(b"\xff").decode()}]
)
async def test_the_peer_root_secret_is_refused_and_unchanged_when_it_has_no_key(data: Any) -> None:
    api = Api({"data": data})
    with pytest.raises(RefusedError, match="mini-infer-peer-root"):
        await secrets_of(api).root()
    assert api.calls == ["get system/mini-infer-peer-root"]


async def test_no_writes_are_made_when_a_service_is_at_rest() -> None:
    api, clock = Api(root_of(ROOT)), [0.0]
    peers = secrets_of(api, clock)
    for now_s in (0.0, 1.0, 1000.0):
        clock[0] = now_s
        await peers.ensure(SERVICE, [pod(timedelta(hours=1), "ImagePullBackOff"), pod(timedelta(seconds=5))])
    assert api.calls.count("apply team/chat-peers") == 1


async def test_the_secret_is_written_again_when_pods_wait_for_it() -> None:
    api, clock = Api(root_of(ROOT)), [0.0]
    peers = secrets_of(api, clock)
    waiting = [pod(MISSED_AFTER + timedelta(seconds=5))]
    for now_s in (0.0, AGAIN_S - 1, AGAIN_S + 1, AGAIN_S + 2):
        clock[0] = now_s
        await peers.ensure(SERVICE, waiting)
    assert api.calls.count("apply team/chat-peers") == 2


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (pod(MISSED_AFTER + timedelta(seconds=5), now=NOW), True),
        (pod(MISSED_AFTER + timedelta(seconds=5), "CreateContainerConfigError", now=NOW), True),
        (pod(timedelta(seconds=5), now=NOW), False),
        (pod(timedelta(hours=1), "CrashLoopBackOff", now=NOW), False),
        (pod(timedelta(hours=1), annotation=False, now=NOW), False),
        ({"metadata": {"creationTimestamp": "2026-11-28T12:00:00Z", "annotations": {}}}, False),
    ],
)
def test_a_pod_may_miss_its_secret_when_its_containers_are_not_made(found: dict[str, Any], expected: bool) -> None:
    assert may_miss_secret(found, NOW) is expected


def test_engines_mount_the_secret_when_their_revision_is_new() -> None:
    pods = frozen_pods(SERVICE, "unified", "r", launch_of(SERVICE, "unified", "i"), None)
    spec = pods["template"]["spec"]
    (container,) = spec["containers"]
    assert f"--peer-key-file={PEER_KEY_FILE}" in container["args"]
    (volume,) = [volume for volume in spec["volumes"] if "secret" in volume]
    assert volume["secret"]["secretName"] == peers_secret(SERVICE, ROOT)["metadata"]["name"]
    (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == volume["name"]]
    assert mount["readOnly"]
    assert PEER_KEY_FILE.startswith(mount["mountPath"])
    assert needs_peers_secret([{"kind": "ControllerRevision", "data": pods}])
    del pods["template"]["metadata"]["annotations"][ANNOTATION_PEER_AUTH]
    assert not needs_peers_secret([{"kind": "ControllerRevision", "data": pods}, {"kind": "Service"}])
