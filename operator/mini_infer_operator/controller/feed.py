"""Feeds one kind of objects from kopf's watch into the cache, and lists them to find what the watch could not report.

kopf lists again after a watch that broke, and reports the objects that exist, never those deleted meanwhile. So after
each of kopf's lists, and every RELIST_S at the latest, this module reads the whole list in pages, and removes from the
cache every object that it lacks. Objects that the watch reports while the list is in flight are newer, and stay.
Decides nothing about services.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from mini_infer_operator.objects.api import KubernetesApi, RefusedError
from mini_infer_operator.objects.cache import ObjectCache, ServiceKey
from mini_infer_operator.objects.kinds import Kind, path_of
from mini_infer_operator.resource import KIND, LABEL_SERVICE
from mini_infer_web.kubernetes_api import REQUEST_ERRORS, ApiError

RELIST_S = 600.0
"""Longest time in seconds between two full lists."""
FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 10.0
NOT_SERVED = 404
SERVED_POLL_S = 120.0
"""Seconds between two checks whether the cluster serves an optional kind by now."""
MISSED_POLL_S = 30.0
"""Seconds between two such checks while a service needs the optional kind."""

log = logging.getLogger(__name__)


class Feed:
    """Keeps one kind, in one namespace or in all, in the cache; calls `changed` with services whose objects changed."""

    def __init__(
        self,
        api: KubernetesApi,
        cache: ObjectCache,
        kind: Kind,
        namespace: str | None,
        changed: Callable[[ServiceKey], None],
        appeared: Callable[[Kind], None],
    ) -> None:
        """`appeared` is called with an optional kind that the cluster did not serve at first and serves now."""
        self.kind = kind
        self.namespace = namespace
        self.path = path_of(kind.name, namespace)
        self.synced = asyncio.Event()
        """Set once the first full list was read."""
        self.last_seen_s = time.monotonic()
        """time.monotonic() of the last event, request or list."""
        self._api = api
        self._cache = cache
        self._selector = LABEL_SERVICE if kind.is_labelled else None
        self._changed = changed
        self._appeared = appeared
        self._due = asyncio.Event()
        self._reported: set[tuple[str, str]] | None = None
        """Namespaces and names that the watch reported since the list in flight began; None if no list is in flight."""

    def take(self, event_type: str | None, found: Mapping[str, Any]) -> None:
        """Takes an event of kopf's watch, or an object that kopf has listed (type None)."""
        self.last_seen_s = time.monotonic()
        metadata = found["metadata"]
        namespace, name, version = metadata.get("namespace", ""), metadata["name"], int(metadata["resourceVersion"])
        if self._reported is not None:
            self._reported.add((namespace, name))
        if event_type == "DELETED":
            changed = self._cache.drop(self.kind.name, namespace, name, uid=metadata["uid"], version=version)
        else:
            changed = self._cache.put(self.kind.name, found)
        if changed is not None:
            self._changed(changed)

    def requested(self, *, listed: bool) -> None:
        """Records a request of kopf's: the begin of a watch, or a list, after which a list of our own is due."""
        self.last_seen_s = time.monotonic()
        if listed:
            self._due.set()

    async def run(self) -> None:
        """Lists whenever a list is due, until cancelled; errors only delay it."""
        if self.kind.optional:
            await self._until_served()
        failures, pause_s = 0, RELIST_S
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._due.wait()
            self._due.clear()
            try:
                await self._list()
                failures, pause_s = 0, RELIST_S * random.uniform(0.8, 1.0)
            except (RefusedError, *REQUEST_ERRORS) as error:
                pause_s = _backoff_s(failures)
                failures += 1
                self._warn(error, pause_s)

    async def _until_served(self) -> None:
        failures, missing = 0, False
        while True:
            try:
                await self._api.list(self.kind.name, self.namespace, self._selector)
                break
            except (RefusedError, *REQUEST_ERRORS) as error:
                self.last_seen_s = time.monotonic()
                if isinstance(error, ApiError) and error.status == NOT_SERVED:
                    missing, failures = True, 0
                    self._take_none()
                    await self._until_it_is_time_to_look()
                else:
                    pause_s = _backoff_s(failures)
                    failures += 1
                    self._warn(error, pause_s)
                    await asyncio.sleep(pause_s)
        if missing:
            self._appeared(self.kind)

    async def _until_it_is_time_to_look(self) -> None:
        for _ in range(round(SERVED_POLL_S / MISSED_POLL_S)):
            await asyncio.sleep(MISSED_POLL_S)
            if self.kind.name in self._cache.missed:
                return

    def _take_none(self) -> None:
        """Marks the kind as unknown to this cluster, and drops all its objects from the cache."""
        self._cache.unserved.add(self.kind.name)
        for key in self._cache.replace(self.kind.name, self.namespace, ()):
            self._changed(key)
        self.synced.set()

    async def _list(self) -> None:
        self._reported = reported = set[tuple[str, str]]()
        try:
            found, version = await self._api.list(self.kind.name, self.namespace, self._selector)
        finally:
            self._reported = None
        self.last_seen_s = time.monotonic()
        if self.kind.name in self._cache.unserved:  # services may wait for it
            self._cache.unserved.remove(self.kind.name)
            self._cache.missed.discard(self.kind.name)
            for key in self._cache.keys(KIND):
                self._changed(key)
        for key in self._cache.replace(self.kind.name, self.namespace, found, version, besides=reported):
            self._changed(key)
        self.synced.set()

    def _warn(self, error: Exception, pause_s: float) -> None:
        reason = str(error) or type(error).__name__
        log.warning("list of %s: %s; again in %.1f s", self.kind.plural, reason, pause_s)


def _backoff_s(failures: int) -> float:
    return min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(failures, 16)) * random.uniform(0.8, 1.2)
