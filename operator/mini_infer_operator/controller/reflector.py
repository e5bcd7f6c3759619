"""One kind of objects, listed and then watched for ever, into the cache. Decides nothing.

The API server ends a watch after WATCH_S, and about once a minute it sends a bookmark: a connection that is silent for
longer than SILENCE_S is dead, whatever TCP says. What was seen last stays while the API server is away. A list every
RELIST_S removes whatever a watch failed to report.
"""

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import msgspec

from mini_infer_contract.kubernetes_client import ApiError, KubernetesClient, lines
from mini_infer_operator.objects.cache import ObjectCache, ServiceKey
from mini_infer_operator.objects.kinds import Kind, path_of
from mini_infer_operator.resource import KIND

WATCH_S = 600
SILENCE_S = 100.0
RELIST_S = 600.0
"""At the latest after this long a watch ends and everything is listed anew."""
LIST_TIMEOUT_S = 60.0
PAGE = 500
"""Objects an answer to a list; more are asked for in pages."""
FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 10.0
GONE = 410
NOT_SERVED = 404
SERVED_POLL_S = 60.0
"""Look this often whether the cluster knows an optional kind by now."""

log = logging.getLogger(__name__)


class Reflector:
    """Keeps one kind, in one namespace or in all, in the cache; `changed` is told whose objects changed."""

    def __init__(
        self,
        client: KubernetesClient,
        cache: ObjectCache,
        kind: Kind,
        namespace: str | None,
        selector: str | None,
        changed: Callable[[ServiceKey], None],
    ) -> None:
        self.kind = kind
        self.synced = asyncio.Event()
        """Set once everything was listed."""
        self.heard_s = time.monotonic()
        """time.monotonic() of the last answer or attempt."""
        self._client = client
        self._cache = cache
        self._namespace = namespace
        self._selector = {"labelSelector": selector} if selector else {}
        self._changed = changed
        self._version: str | None = None
        self._relist_at_s = 0.0
        """time.monotonic() from which the next watch begins with a list."""

    async def run(self) -> None:
        """List and watch until cancelled; errors only delay."""
        failures = 0
        while True:
            self.heard_s = time.monotonic()
            try:
                if self._version is None or time.monotonic() >= self._relist_at_s:
                    self._version = await self._list()
                    self._relist_at_s = time.monotonic() + RELIST_S * random.uniform(0.8, 1.0)
                    self.synced.set()
                await self._watch()
                failures = 0
            except (ApiError, aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError) as error:
                if self.kind.optional and isinstance(error, ApiError) and error.status == NOT_SERVED:
                    self._take_none()
                    failures = 0
                    await asyncio.sleep(SERVED_POLL_S)
                    continue
                expired = isinstance(error, ApiError) and error.status == GONE
                if expired or failures > 2:
                    self._version = None  # list anew
                if expired and not failures:
                    failures = 1
                    continue
                backoff_s = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2**failures) * random.uniform(0.8, 1.2)
                failures += 1
                said = str(error) or type(error).__name__
                log.warning("watch of %s: %s; again in %.1f s", self.kind.plural, said, backoff_s)
                await asyncio.sleep(backoff_s)

    def _take_none(self) -> None:
        """The cluster does not know this kind, so there are none of it."""
        self._version = None
        self._cache.unserved.add(self.kind.name)
        for key in self._cache.replace(self.kind.name, self._namespace, ()):
            self._changed(key)
        self.synced.set()

    async def _list(self) -> str:
        """Returns the version to watch from."""
        found: list[Mapping[str, Any]] = []
        query = {**self._selector, "limit": str(PAGE)}
        timeouts = aiohttp.ClientTimeout(total=LIST_TIMEOUT_S)
        while True:
            path = path_of(self.kind.name, self._namespace)
            async with await self._client.open("GET", path, query=query, timeouts=timeouts) as response:
                answer = msgspec.json.decode(await response.read())
            found += answer["items"] or ()
            self.heard_s = time.monotonic()
            if not answer["metadata"].get("continue"):
                break
            query["continue"] = answer["metadata"]["continue"]
        if self.kind.name in self._cache.unserved:  # services may wait for it
            self._cache.unserved.remove(self.kind.name)
            for key in self._cache.keys(KIND):
                self._changed(key)
        version = str(answer["metadata"]["resourceVersion"])
        for key in self._cache.replace(self.kind.name, self._namespace, found, int(version)):
            self._changed(key)
        return version

    async def _watch(self) -> None:
        """One watch, until the server ends it, at the latest when a list is due."""
        limit_s = min(WATCH_S * random.uniform(0.8, 1.2), self._relist_at_s - time.monotonic())
        query = {
            **self._selector,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": str(self._version),
            "timeoutSeconds": str(max(1, math.ceil(limit_s))),
        }
        timeouts = aiohttp.ClientTimeout(sock_connect=10, sock_read=SILENCE_S)
        path = path_of(self.kind.name, self._namespace)
        async with await self._client.open("GET", path, query=query, timeouts=timeouts) as response:
            async for line in lines(response):
                self.heard_s = time.monotonic()
                self._take(msgspec.json.decode(line))

    def _take(self, event: Mapping[str, Any]) -> None:
        kind, found = event["type"], event["object"]
        if kind == "ERROR":
            raise ApiError(found.get("code", 500), found.get("reason", ""), found.get("message", ""))
        metadata = found["metadata"]
        self._version, version = metadata["resourceVersion"], int(metadata["resourceVersion"])
        changed = set[ServiceKey | None]()
        if kind == "DELETED":
            namespace, name, uid = metadata["namespace"], metadata["name"], metadata["uid"]
            changed.add(self._cache.drop(self.kind.name, namespace, name, uid=uid, version=version))
        elif kind != "BOOKMARK":
            changed.add(self._cache.put(self.kind.name, found))
        for key in changed | self._cache.advance(self.kind.name, self._namespace, version):
            if key is not None:
                self._changed(key)
