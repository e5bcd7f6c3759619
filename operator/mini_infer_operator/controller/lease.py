"""Elects one leader among the operator pods of a class by a Lease; the others watch and wait.

The protocol is client-go's (k8s.io/client-go/tools/leaderelection). Clocks of different machines are never compared: a
Lease counts as expired if it did not change for its duration by our own clock.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import aiohttp

from mini_infer_web.kubernetes_api import REQUEST_ERRORS, ApiError, ApiServer

DURATION_S = 10.0
"""Seconds of silence after which a holder has lost the Lease. A successor works at most RETRY_S later."""
RENEW_EVERY_S = 4.0
GIVE_UP_S = 7.0
"""Seconds without a renewal after which a holder stops working, before any other pod may begin."""
RETRY_S = 2.0
REQUEST_TIMEOUT_S = 3.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LeaseView:
    """The Lease as last seen, and since when it is unchanged by our own monotonic clock."""

    holder: str
    version: str
    unchanged_since_s: float


def may_take(view: LeaseView | None, me: str, now_s: float) -> bool:
    """Returns True if the Lease is free: it does not exist, was given back, is ours, or its holder is silent."""
    if view is None or view.holder in {"", me}:
        return True
    return now_s - view.unchanged_since_s >= DURATION_S


class LeaderLease:
    """Takes the Lease whenever it can. `gained` and `lost` are called alternately, `gained` first."""

    def __init__(
        self,
        server: ApiServer,
        namespace: str,
        name: str,
        me: str,
        gained: Callable[[], None],
        lost: Callable[[], Awaitable[None]],
    ) -> None:
        self._server = server
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._metadata = {"name": name, "namespace": namespace}
        self._me = me
        self._gained = gained
        self._lost = lost
        self._view: LeaseView | None = None
        self._transitions = 0
        self._renewed_s = 0.0
        self.is_leader = False

    async def run(self) -> None:
        """Takes the Lease, renews it, and takes it again, until cancelled; then gives it back."""
        try:
            while True:
                await self._step()
                await asyncio.sleep(RENEW_EVERY_S if self.is_leader else RETRY_S)
        finally:
            if self.is_leader:
                await self._give_back()

    async def _step(self) -> None:
        try:
            if not self.is_leader:
                self._see(await self._read())
            if self.is_leader or may_take(self._view, self._me, time.monotonic()):
                requested_s = time.monotonic()
                self._see(await self._write(self._me))
                self._renewed_s = requested_s
        except REQUEST_ERRORS as error:
            is_conflict = isinstance(error, ApiError) and error.status == 409
            if is_conflict and self.is_leader:
                log.warning("another operator took the lease %s", self._metadata["name"])
                self._renewed_s = -GIVE_UP_S
            elif not is_conflict:
                log.warning("lease %s: %s", self._metadata["name"], error or type(error).__name__)
        await self._update_leadership(time.monotonic())

    async def _update_leadership(self, now_s: float) -> None:
        leads = self._view is not None and self._view.holder == self._me and now_s - self._renewed_s < GIVE_UP_S
        if leads and not self.is_leader:
            self.is_leader = True
            log.info("this operator holds the lease %s and works", self._metadata["name"])
            self._gained()
        elif self.is_leader and not leads:
            self.is_leader = False
            log.warning("this operator lost the lease %s and waits", self._metadata["name"])
            await self._lost()

    async def _read(self) -> dict[str, Any] | None:
        try:
            return await self._request("GET", f"{self._path}/{self._metadata['name']}")
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def _write(self, holder: str) -> dict[str, Any]:
        """Creates the Lease, or replaces the version that we know. A writer that comes second gets a 409."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        if self._view is None or self._view.holder != self._me:
            self._transitions += 1
        spec = {
            "holderIdentity": holder,
            "leaseDurationSeconds": int(DURATION_S),
            "acquireTime": now,
            "renewTime": now,
            "leaseTransitions": self._transitions,
        }
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": self._metadata, "spec": spec}
        if self._view is None:
            return await self._request("POST", self._path, body=lease)
        lease["metadata"] = {**self._metadata, "resourceVersion": self._view.version}
        return await self._request("PUT", f"{self._path}/{self._metadata['name']}", body=lease)

    async def _request(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        timeouts = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        return await self._server.request(method, path, timeouts=timeouts, **options)

    def _see(self, lease: dict[str, Any] | None) -> None:
        if lease is None:
            self._view = None
            return
        version, spec = lease["metadata"]["resourceVersion"], lease.get("spec", {})
        self._transitions = int(spec.get("leaseTransitions") or 0)
        if self._view is None or self._view.version != version:
            self._view = LeaseView(spec.get("holderIdentity") or "", version, time.monotonic())

    async def _give_back(self) -> None:
        """Stops work, then clears the holder so that the next leader need not wait."""
        self.is_leader = False
        await self._lost()
        try:
            await self._write("")
        except REQUEST_ERRORS as error:
            log.warning("lease %s was not given back: %s", self._metadata["name"], error or type(error).__name__)
