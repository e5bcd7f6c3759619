"""Keeps one kind of Kubernetes objects up to date: a list, then a watch from its version on, as client-go's reflector.

Does not know what the objects mean. Both sides time out: the server ends a watch after WATCH_S, and a connection that
stays silent longer than that is dead. The last known objects stay while the API server is unreachable.
"""

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Generic, TypeVar

import aiohttp
import msgspec

from mini_infer_web.kubernetes_api import REQUEST_ERRORS, ApiError, ApiServer, Object, lines

WATCH_S = 60
SILENCE_S = WATCH_S + 10
LIST_TIMEOUT_S = 30
FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
RELIST_AFTER = 2
"""Failures of a watch in a row after which the resource version is dropped and the objects are listed again."""
HTTP_GONE = 410
NO_SUCH_KIND = 404
"""Status of a list of an unknown kind: a cluster has no objects of a custom resource before its definition is installed
or after it was removed.
"""

log = logging.getLogger(__name__)

Stored = TypeVar("Stored")


class _Metadata(msgspec.Struct, rename="camel"):
    name: str = ""
    namespace: str = ""
    resource_version: str = ""


class _Partial(msgspec.Struct):
    """The part that objects, lists and bookmarks have in common; a bookmark of pods also has `"containers": null`."""

    metadata: _Metadata


class _List(msgspec.Struct):
    metadata: _Metadata
    items: list[Object] | None = None


class _Event(msgspec.Struct):
    """One line of a watch."""

    type: str
    object: Object


_FAILURES = (*REQUEST_ERRORS, msgspec.MsgspecError)

_list_decoder = msgspec.json.Decoder(_List)
_event_decoder = msgspec.json.Decoder(_Event)


class ListWatch(Generic[Stored]):
    """Keeps the objects under `path`, by namespace/name, each as `convert` returns it; None leaves the object out."""

    def __init__(
        self,
        api: ApiServer,
        path: str,
        convert: Callable[[Object], Stored | None],
        changed: Callable[[], None],
        label_selector: str = "",
    ) -> None:
        self._api, self._path, self._convert, self._changed = api, path, convert, changed
        self._label_selector = label_selector
        self._version = ""
        """The resource version at which the next watch begins; "" if a list must come first."""
        self._failures = 0
        """Failures since the last success: a whole list, or an event of a watch."""
        self.objects: dict[str, Stored] = {}
        self.synced = False

    async def run(self) -> None:
        """Lists and watches until cancelled; errors only delay."""
        while True:
            try:
                if not self._version:
                    await self._list()
                await self._watch()
                self._failures = 0
            except _FAILURES as error:
                await self._recover(error)

    async def _recover(self, error: Exception) -> None:
        """Waits after a failure, and drops the resource version if it may no longer be valid."""
        self._failures += 1
        status = getattr(error, "status", None)
        is_expired, is_unknown_kind = status == HTTP_GONE, status == NO_SUCH_KIND
        # A list failed so, and not a watch, which begins at a version.
        if is_unknown_kind and not self._version and (self.objects or not self.synced):
            self.objects, self.synced = {}, True
            self._changed()
        if is_expired or is_unknown_kind or isinstance(error, msgspec.MsgspecError) or self._failures >= RELIST_AFTER:
            self._version = ""
        pause_s = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(self._failures - 1, 16))
        level = logging.INFO if is_expired else logging.WARNING
        reason = str(error) or type(error).__name__
        log.log(level, "watch of %s: %s; trying again in %.1f s", self._path, reason, pause_s)
        await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))

    async def _list(self) -> None:
        async with await self._open(LIST_TIMEOUT_S) as response:
            listed = _list_decoder.decode(await response.read())
        previous, self.objects = self.objects, {}
        for item in listed.items or ():
            self._keep(item, previous)
        self._version = listed.metadata.resource_version
        self._failures = 0
        self.synced = True
        self._changed()

    async def _watch(self) -> None:
        """Watches until the server ends the watch, and keeps the version at which the next one continues."""
        query = {
            "watch": "true",
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_S),
        }
        async with await self._open(SILENCE_S, **query) as response:
            async for line in lines(response):
                event = _event_decoder.decode(line)
                if event.type == "ERROR":
                    status = event.object
                    raise ApiError(status.get("code", 500), status.get("reason", ""), status.get("message", ""))
                metadata = msgspec.convert(event.object, _Partial).metadata
                if event.type == "DELETED":
                    self.objects.pop(f"{metadata.namespace}/{metadata.name}", None)
                elif event.type != "BOOKMARK":
                    self._keep(event.object, self.objects)
                self._version, self._failures = metadata.resource_version, 0
                if event.type != "BOOKMARK":
                    self._changed()

    def _keep(self, item: Object, previous: dict[str, Stored]) -> None:
        """Stores an object. One that cannot be read keeps its value in `previous`, and does not affect the others."""
        metadata = msgspec.convert(item, _Partial).metadata
        name = f"{metadata.namespace}/{metadata.name}"
        try:
            stored = self._convert(item)
        except msgspec.ValidationError as error:
            log.warning("%s %s cannot be read, it stays as it was: %s", self._path, name, error)
            stored = previous.get(name)
        if stored is None:
            self.objects.pop(name, None)
        else:
            self.objects[name] = stored

    async def _open(self, timeout_s: float, **query: str) -> aiohttp.ClientResponse:
        if self._label_selector:
            query["labelSelector"] = self._label_selector
        return await self._api.open("GET", self._path, query=query, timeouts=aiohttp.ClientTimeout(total=timeout_s))
