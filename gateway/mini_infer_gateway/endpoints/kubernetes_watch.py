"""Endpoints from a Kubernetes watch of the pods that our operator labels: list, then watch from there, for ever.

Both sides time out: the server ends a watch after WATCH_S, and a connection that stays silent longer than that is dead.
What was seen last stays while the API server is away.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec

from mini_infer_contract.kubernetes_access import find_access
from mini_infer_contract.kubernetes_client import ApiError, KubernetesClient
from mini_infer_contract.resources import LABEL_SERVICE
from mini_infer_gateway.endpoints.base import Listed, Publish
from mini_infer_gateway.endpoints.pods import Pod, PodList, WatchEvent, listed_from_pod

WATCH_S = 60
SILENCE_S = WATCH_S + 10
LIST_TIMEOUT_S = 30
FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
GONE = 410

log = logging.getLogger(__name__)

_list_decoder = msgspec.json.Decoder(PodList)
_event_decoder = msgspec.json.Decoder(WatchEvent)


class KubernetesWatch:
    """See base.EndpointSource."""

    def __init__(self, namespace: str | None, kubeconfig: str | None) -> None:
        self._namespace = namespace
        self._kubeconfig = kubeconfig
        self._pods: dict[str, Listed] = {}

    async def run(self, publish: Publish) -> None:
        """Lists and watches until cancelled; errors only delay."""
        backoff_s = FIRST_BACKOFF_S
        async with KubernetesClient(find_access(self._kubeconfig)) as api:
            while True:
                try:
                    version = await self._list(api)
                    publish(list(self._pods.values()))
                    while True:
                        version = await self._watch(api, version, publish)
                        backoff_s = FIRST_BACKOFF_S
                except (ApiError, aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError) as error:
                    if getattr(error, "status", None) == GONE and backoff_s == FIRST_BACKOFF_S:
                        log.info("the pod watch is too old, listing anew")
                    else:
                        log.warning("pod watch: %s; trying again in %.1f s", error or type(error).__name__, backoff_s)
                        await asyncio.sleep(backoff_s * random.uniform(0.8, 1.2))
                    backoff_s = min(LONGEST_BACKOFF_S, 2 * backoff_s)

    async def _open(self, api: KubernetesClient, timeout_s: float, **query: str) -> aiohttp.ClientResponse:
        path = f"/api/v1/namespaces/{self._namespace}/pods" if self._namespace else "/api/v1/pods"
        timeouts = aiohttp.ClientTimeout(total=timeout_s)
        return await api.open("GET", path, query={"labelSelector": LABEL_SERVICE, **query}, timeouts=timeouts)

    async def _list(self, api: KubernetesClient) -> str:
        async with await self._open(api, LIST_TIMEOUT_S) as response:
            pods = _list_decoder.decode(await response.read())
        self._pods = {}
        for pod in pods.items:
            self._keep(pod)
        return pods.metadata.resource_version

    async def _watch(self, api: KubernetesClient, version: str, publish: Publish) -> str:
        """One watch until the server ends it; returns the version to go on from."""
        query = {"watch": "true", "resourceVersion": version, "allowWatchBookmarks": "true"}
        async with await self._open(api, SILENCE_S, timeoutSeconds=str(WATCH_S), **query) as response:
            async for line in _lines(response):
                event = _event_decoder.decode(line)
                if event.type == "ERROR":
                    status = msgspec.convert(event.object, dict[str, Any])
                    code, reason, message = status.get("code", 500), status.get("reason", ""), status.get("message", "")
                    raise ApiError(code, reason, message)
                pod = msgspec.convert(event.object, Pod)
                version = pod.metadata.resource_version
                if event.type == "BOOKMARK":
                    continue
                if event.type == "DELETED":
                    self._pods.pop(f"{pod.metadata.namespace}/{pod.metadata.name}", None)
                else:
                    self._keep(pod)
                publish(list(self._pods.values()))
        return version

    def _keep(self, pod: Pod) -> None:
        listed = listed_from_pod(pod)
        name = f"{pod.metadata.namespace}/{pod.metadata.name}"
        if listed:
            self._pods[name] = listed
        else:
            self._pods.pop(name, None)


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Lines of any length: a pod may be longer than the stream reader's line limit."""
    buffer = b""
    async for piece in response.content.iter_any():
        *lines, buffer = (buffer + piece).split(b"\n")
        for line in lines:
            if line:
                yield line
