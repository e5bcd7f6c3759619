"""Kubernetes Events about what the operator decides: `kubectl describe` and `kubectl events` show them.

Callers say what they decided and go on; posting happens beside, and never fails a reconcile. Decides nothing.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from mini_infer_contract.kubernetes_client import ApiError
from mini_infer_operator.objects.api import KubernetesApi
from mini_infer_operator.resource import FIELD_MANAGER
from mini_infer_operator.status import EventType

log = logging.getLogger(__name__)

SAME_AGAIN_S = 600.0
"""The same sentence about the same object is counted up at most this often; in between it is dropped."""
REMEMBERED_S = 3600.0
"""The API server forgets an Event after an hour by default, so do we."""
MOST_PER_OBJECT = 20
"""New sentences about one object in SAME_AGAIN_S; more is a fault that repeats in ever new words."""
WAITING_LIMIT = 1000
"""Events that wait for a slow API server; more are dropped."""
_LONGEST_MESSAGE = 1024  # characters; the API server refuses more


@dataclass(slots=True)
class _Told:
    """One sentence about one object."""

    name: str
    first: str
    last_s: float
    count: int = 1


class EventRecorder:
    """Posts Events, each sentence once. `run` must run; `record_event` may be called from anywhere on its loop."""

    def __init__(self, api: KubernetesApi, now_s: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._now_s = now_s
        self._told: dict[tuple[str, str, str], _Told] = {}  # uid, reason, message
        self._waiting: asyncio.Queue[tuple[dict[str, Any], _Told]] = asyncio.Queue(WAITING_LIMIT)

    def record_event(
        self, about: Mapping[str, Any], reason: str, message: str, event_type: EventType = "Normal"
    ) -> None:
        """Tell users of `about` (a manifest with apiVersion, kind and metadata) what was decided; returns at once.

        `reason` is one word in CamelCase. The message should not hold numbers that change from look to look.
        """
        metadata, message, now_s = about["metadata"], message[:_LONGEST_MESSAGE], self._now_s()
        self._told = {key: told for key, told in self._told.items() if now_s - told.last_s < REMEMBERED_S}
        key = (str(metadata.get("uid", "")), reason, message)
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        told = self._told.get(key)
        if told is not None:
            if now_s - told.last_s < SAME_AGAIN_S:
                return
            told.last_s, told.count = now_s, told.count + 1
        else:
            recent = [t for (uid, *_), t in self._told.items() if uid == key[0] and now_s - t.last_s < SAME_AGAIN_S]
            if len(recent) >= MOST_PER_OBJECT:
                return
            digest = hashlib.sha256("\0".join(key).encode()).hexdigest()[:16]
            told = self._told[key] = _Told(f"{metadata['name']}.{digest}", stamp, now_s)
        try:
            self._waiting.put_nowait((_event(about, reason, message, event_type, told, stamp), told))
        except asyncio.QueueFull:
            log.warning("an event is dropped, too many wait: %s: %s", reason, message)

    async def run(self) -> None:
        """Post what is recorded until cancelled."""
        while True:
            manifest, told = await self._waiting.get()
            try:
                await self._post(manifest, told)
            except Exception as error:  # an Event is worth no retry: the status says the same
                log.warning("an event was not posted: %s: %s", manifest["reason"], str(error).split("\n", 1)[0])
            finally:
                self._waiting.task_done()

    async def settle(self) -> None:
        """Wait until everything recorded so far was tried."""
        await self._waiting.join()

    async def _post(self, manifest: dict[str, Any], told: _Told) -> None:
        namespace = manifest["metadata"]["namespace"]
        if told.count > 1:
            again = {"count": told.count, "lastTimestamp": manifest["lastTimestamp"]}
            if await self._api.merge("Event", namespace, told.name, again) is not None:
                return  # else the API server has forgotten it
        try:
            await self._api.create(manifest)
        except ApiError as error:
            if error.status != 409:  # told by the operator before us
                raise


def _event(
    about: Mapping[str, Any], reason: str, message: str, event_type: EventType, told: _Told, stamp: str
) -> dict[str, Any]:
    metadata = about["metadata"]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": told.name, "namespace": metadata["namespace"]},
        "involvedObject": {
            "apiVersion": about["apiVersion"],
            "kind": about["kind"],
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata.get("uid", ""),
        },
        "reason": reason,
        "message": message,
        "type": event_type,
        "count": told.count,
        "firstTimestamp": told.first,
        "lastTimestamp": stamp,
        "source": {"component": FIELD_MANAGER},
        "reportingComponent": FIELD_MANAGER,
        "reportingInstance": "",
    }
