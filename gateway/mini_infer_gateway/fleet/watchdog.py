"""Checks all endpoints twice a second: ejects those that stopped working, and probes the readiness of suspects.

`liveness` defines when an endpoint has stopped, and the breaker when an ejection ends; this module has the clock and
the probes.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping

from mini_infer_contract.launch import READY_PATH
from mini_infer_gateway.fleet import liveness
from mini_infer_gateway.fleet.breaker import Evidence
from mini_infer_gateway.fleet.endpoint_state import EndpointState
from mini_infer_gateway.http.upstream import Upstream, UpstreamError

TICK_S = 0.5
LATE_S = 1.0
"""Delay of a tick that shows a stall of the gateway itself: what did not arrive is no sign of endpoints then."""
PROBE_TIMEOUT_S = 1.0
FOREIGN_READY_PATH = "/health"
"""Readiness path of vLLM and SGLang."""

log = logging.getLogger(__name__)


class Watchdog:
    """The watchdog of one fleet; `states` is the registry's own table."""

    def __init__(self, states: Mapping[str, EndpointState], upstream: Upstream, clock: Callable[[], float]) -> None:
        self._states, self._upstream, self._clock = states, upstream, clock

    async def run(self) -> None:
        """Checks all endpoints periodically, until cancelled."""
        while True:
            due_s = self._clock() + TICK_S
            await asyncio.sleep(TICK_S)
            now_s = self._clock()
            if now_s - due_s < LATE_S:
                self.look(now_s)

    def look(self, now_s: float) -> None:
        """Judges every endpoint once."""
        for state in list(self._states.values()):
            signals = state.liveness_signals
            cause = liveness.verdict(signals, self._peers_first_bytes_s(state, now_s), now_s)
            if cause and state.breaker.closed:
                log.warning("endpoint %s is %s: leaving it alone", state.endpoint.name, cause.value)
                state.ejected(now_s, cause)
            if not state.breaker.closed or liveness.is_suspect(signals, now_s):
                self._start_probe(state)
            if cause and liveness.is_confirmed(signals, now_s):
                for request in [*state.waiting, *state.streaming]:
                    request.move("hung")

    def _peers_first_bytes_s(self, state: EndpointState, now_s: float) -> Iterable[float]:
        peers = (peer for peer in self._states.values() if peer is not state)
        return (
            took_s
            for peer in peers
            if (peer.endpoint.service, peer.endpoint.model) == (state.endpoint.service, state.endpoint.model)
            for took_s in peer.recent_first_bytes_s(now_s)
        )

    def _start_probe(self, state: EndpointState) -> None:
        if state.probe is None or state.probe.done():
            state.probe = asyncio.create_task(self._probe(state), name=f"probe {state.endpoint.name}")

    async def _probe(self, state: EndpointState) -> None:
        ready = await self._is_ready(state.endpoint.url)
        if ready is None:
            # Nobody to ask: the word of a new event socket must do.
            if state.unready and state.breaker.learned(Evidence.SOCKET):
                log.info("endpoint %s is another process now", state.endpoint.name)
            state.unready = False
            return
        evidence = Evidence.READY_AGAIN if state.unready else Evidence.READY
        state.unready = not ready
        if ready and state.breaker.learned(evidence):
            log.info("endpoint %s is ready again", state.endpoint.name)

    async def _is_ready(self, url: str) -> bool | None:
        """Returns True if the endpoint is ready; None if it has no page that reports readiness."""
        for path in (READY_PATH, FOREIGN_READY_PATH):
            try:
                async with asyncio.timeout(PROBE_TIMEOUT_S):
                    status, _ = await self._upstream.fetch(url, path, PROBE_TIMEOUT_S)
            except (UpstreamError, TimeoutError):
                return False
            if status != 404:
                return status == 200
        return None
