"""Reads gateways' reports while any service has a canary, and queues these services. Decides nothing."""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from mini_infer_contract.rollouts import GatewayRollouts
from mini_infer_operator.canary.state import CanaryState, read_canary
from mini_infer_operator.canary.window import CanaryWindow
from mini_infer_operator.objects.cache import ServiceKey
from mini_infer_operator.observe import ObservedCanary

READ_EVERY_S = 2.0


class Reader(Protocol):
    """The source of gateways' reports."""

    async def rollouts(self) -> Mapping[str, GatewayRollouts]:
        """Returns the reports by the gateway's URL."""


class Canaries:
    """The figures of all services whose canary is judged. Without any, it sends no request."""

    def __init__(
        self, reader: Reader, changed: Callable[[ServiceKey], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Calls `changed` when a service has new figures."""
        self._reader, self._changed, self._clock = reader, changed, clock
        self._running: dict[ServiceKey, CanaryState] = {}
        self._windows: dict[ServiceKey, CanaryWindow] = {}

    def update(self, key: ServiceKey, stored: Mapping[str, Any] | None) -> None:
        """Takes a service that may have changed, or None if it is gone."""
        state = read_canary((stored or {}).get("status") or {})
        if state is not None and state.is_running:
            self._running[key] = state
            self._windows.setdefault(key, CanaryWindow(f"{key[0]}/{key[1]}"))
        else:
            self._running.pop(key, None)
            self._windows.pop(key, None)

    def observed(self, key: ServiceKey) -> ObservedCanary:
        """Returns both revisions of a service side by side."""
        window = self._windows.get(key)
        return ObservedCanary() if window is None else window.observed()

    async def run(self) -> None:
        """Reads until cancelled."""
        while True:
            await asyncio.sleep(READ_EVERY_S)
            if self._running:
                self.take(await self._reader.rollouts())

    def take(self, reports: Mapping[str, GatewayRollouts]) -> None:
        """Takes the reports of all gateways."""
        now_s = self._clock()
        for key, state in list(self._running.items()):
            self._windows[key].take(reports, state.revision, state.stable, state.step, now_s)
            self._changed(key)
