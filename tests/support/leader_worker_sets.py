"""Stands in for LeaderWorkerSet's controller: makes groups of pods by its documented contract, and nothing more.

https://lws.sigs.k8s.io/docs/reference/labels-annotations-and-environment-variables/
Not so here: the real one has StatefulSets between the set and its pods, and rolls groups when a template changes.
"""

import asyncio
import contextlib
import hashlib
import threading
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from mini_infer_web.kubernetes_api import ApiError, ApiServer
from tests.support.api_servers import server_of

Object = dict[str, Any]
LABEL = "leaderworkerset.sigs.k8s.io"
SETS = "/apis/leaderworkerset.x-k8s.io/v1"
CRD = Path(__file__).parents[1] / "operator/data/leaderworkersets.yaml"
POLL_S = 0.2


@contextlib.contextmanager
def leader_worker_sets(kubeconfig: Path) -> Iterator[None]:
    """Runs in a thread of its own until the end of the block."""
    ended = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(_run(kubeconfig, ended)), name="LeaderWorkerSets")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(20)


async def _run(kubeconfig: Path, ended: threading.Event) -> None:
    async with server_of(kubeconfig) as client:
        while not ended.is_set():
            with contextlib.suppress(
                ApiError
            ):  # the kind is not served yet, or somebody was quicker: it is tried again
                for found in (await client.request("GET", f"{SETS}/leaderworkersets"))["items"]:
                    await _reconcile(client, found)
            await asyncio.sleep(POLL_S)


async def _reconcile(client: ApiServer, found: Object) -> None:
    metadata, spec = found["metadata"], found["spec"]
    pods_path = f"/api/v1/namespaces/{metadata['namespace']}/pods"
    selector = {"labelSelector": f"{LABEL}/name={metadata['name']}"}
    live = {pod["metadata"]["name"]: pod for pod in (await client.request("GET", pods_path, query=selector))["items"]}
    size = spec["leaderWorkerTemplate"]["size"]
    await _create(client, f"/api/v1/namespaces/{metadata['namespace']}/services", headless_service(found))
    for group in range(spec["replicas"]):
        expected = {pod["metadata"]["name"]: pod for pod in (member(found, group, index) for index in range(size))}
        mine = {name: live.pop(name) for name in expected if name in live}
        started = any(pod["status"].get("phase") == "Running" for pod in mine.values())
        if started and (len(mine) < size or any(map(_ends_its_group, mine.values()))):  # RecreateGroupOnPodRestart
            for name, pod in mine.items():
                if "deletionTimestamp" not in pod["metadata"]:
                    await _delete(client, f"{pods_path}/{name}")
            continue
        for name, pod in expected.items():
            if name not in mine:
                await _create(client, pods_path, pod)
    for name in live:  # of groups that are too many: the highest indexes
        await _delete(client, f"{pods_path}/{name}")


def headless_service(found: Mapping[str, Any]) -> Object:
    """By which the pods of all groups have names, before they are ready."""
    name = found["metadata"]["name"]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "ownerReferences": [_owner(found)]},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {f"{LABEL}/name": name}},
    }


def member(found: Mapping[str, Any], group: int, index: int) -> Object:
    """The pod of a group with this index; 0 is the leader."""
    metadata, templates = found["metadata"], found["spec"]["leaderWorkerTemplate"]
    name, leader = metadata["name"], f"{metadata['name']}-{group}"
    template = templates["workerTemplate"] if index else templates.get("leaderTemplate", templates["workerTemplate"])
    pod = deepcopy({"apiVersion": "v1", "kind": "Pod", **template})
    pod["metadata"] |= {"name": f"{leader}-{index}" if index else leader, "ownerReferences": [_owner(found)]}
    pod["metadata"]["labels"] |= {
        f"{LABEL}/name": name,
        f"{LABEL}/group-index": str(group),
        f"{LABEL}/worker-index": str(index),
        f"{LABEL}/group-key": hashlib.sha1(f"{metadata['namespace']}/{leader}".encode()).hexdigest(),
    }
    pod["metadata"].setdefault("annotations", {})[f"{LABEL}/size"] = str(templates["size"])
    if index:
        pod["metadata"]["annotations"][f"{LABEL}/leader-name"] = leader
    environment = [
        {"name": "LWS_LEADER_ADDRESS", "value": f"{leader}.{name}.{metadata['namespace']}"},
        {"name": "LWS_GROUP_SIZE", "value": str(templates["size"])},
        {"name": "LWS_WORKER_INDEX", "value": str(index)},
    ]
    for container in pod["spec"]["containers"]:
        container["env"] = [*environment, *container.get("env", ())]
    pod["spec"] |= {"hostname": pod["metadata"]["name"], "subdomain": name}
    return pod


def _owner(found: Mapping[str, Any]) -> Object:
    metadata = found["metadata"]
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
    }


def _ends_its_group(pod: Mapping[str, Any]) -> bool:
    restarted = any(container.get("restartCount", 0) > 0 for container in pod["status"].get("containerStatuses", ()))
    return restarted or "deletionTimestamp" in pod["metadata"]


async def _create(client: ApiServer, path: str, manifest: Object) -> None:
    try:
        await client.request("POST", path, body=manifest)
    except ApiError as error:
        if error.status != 409:
            raise


async def _delete(client: ApiServer, path: str) -> None:
    try:
        await client.request("DELETE", path)
    except ApiError as error:
        if error.status != 404:
            raise
