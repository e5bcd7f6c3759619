"""The gateway's state of one endpoint: reports of its source, results of its answers, and the requests that wait for
it.

Plain data with the time passed in; the registry, the subscriber and the watchdog own the tasks that fill it.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from mini_infer_contract.launch import Endpoint
from mini_infer_gateway.endpoints.canary import Canary
from mini_infer_gateway.fleet.breaker import Breaker, Cause
from mini_infer_gateway.fleet.endpoint_subscriber import EndpointSubscriber
from mini_infer_gateway.fleet.liveness import SILENT_S, LivenessSignals
from mini_infer_gateway.routing.base import PREFILL, Candidate, IndexKind

FIRST_BYTES_KEPT = 64
RECENT_S = 60.0
"""Seconds for which a time to first byte counts as a measure of a peer's speed."""
FIRST_OVERLOAD_PAUSE_S = 0.5
LONGEST_OVERLOAD_PAUSE_S = 10.0


class Waiting(Protocol):
    """A request that was sent and has no answer yet, or a part of one."""

    @property
    def can_resume(self) -> bool:
        """True if a part of the answer has arrived, and another endpoint can continue it."""
        ...

    def move(self, reason: str) -> None:
        """Gives up this endpoint and tries another one, if there is one and nothing is lost by it."""


@dataclass(slots=True)
class EndpointState:
    """The state of one endpoint."""

    endpoint: Endpoint
    ready: bool
    subscriber: EndpointSubscriber
    task: asyncio.Task[None]
    breaker: Breaker = field(default_factory=Breaker)
    draining_until_s: float = 0.0
    overloaded_until_s: float = 0.0
    """Time until which the endpoint is chosen only if no other is left, because it answered 429."""
    overloads: int = 0
    """Number of consecutive 429s."""
    waiting: dict[Waiting, float] = field(default_factory=dict)
    """Requests without a first byte, with the times when they were sent, oldest first."""
    streaming: set[Waiting] = field(default_factory=set)
    """Requests with a part of their answer that another endpoint can continue."""
    waiting_since_s: float | None = None
    """Time since which at least one request has always been waiting; None if none waits."""
    abandoned_s: float = 0.0
    """Seconds, since the last byte, of waits that ended because the last waiting client gave up."""
    byte_s: float = 0.0
    """Time at which a byte of any answer last arrived."""
    first_bytes: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=FIRST_BYTES_KEPT))
    """Recent first bytes, as (time, seconds after the request was sent)."""
    unready: bool = False
    """True if the last readiness probe did not succeed."""
    probe: asyncio.Task[None] | None = None
    canary: Canary | None = None
    """The canary of its service, if the endpoint is of that revision."""
    _seen: tuple[object, ...] = ()
    _candidate: Candidate | None = None
    """Cached candidate, rebuilt only when one of its fields has changed."""

    def index_kind(self, now_s: float) -> IndexKind:
        """Returns the source of the gateway's knowledge of the endpoint's cache."""
        if not self.subscriber.assets_revision:
            return "none"
        if self.subscriber.live:
            return "exact"
        return "stale" if now_s < self.subscriber.stale_until_s else "approximate"

    @property
    def role(self) -> str:
        """The endpoint's current role. Its own report counts first: it may have switched since the source was
        written.
        """
        return self.subscriber.role or self.endpoint.role

    def is_reporting(self, now_s: float) -> bool:
        """True if load reports arrive: nothing else shows that a prefill engine works, since no client talks to it."""
        return self.subscriber.report_s is not None and now_s - self.subscriber.report_s <= SILENT_S

    @property
    def liveness_signals(self) -> LivenessSignals:
        """The signs by which `liveness` judges the endpoint."""
        return LivenessSignals(
            self.subscriber.report_s, self.byte_s, self.waiting_since_s, self.abandoned_s, self.unready
        )

    def sent(self, request: Waiting, now_s: float) -> None:
        """Records that a request was sent."""
        self.waiting[request] = now_s
        if self.waiting_since_s is None:
            self.waiting_since_s = now_s

    def received_byte(self, now_s: float) -> None:
        """Records that a byte of an answer arrived."""
        self.byte_s, self.abandoned_s = now_s, 0.0

    def waits_no_more(self, request: Waiting, now_s: float) -> None:
        """Records that a request received its first byte, or ended without one."""
        self.waiting.pop(request, None)
        if not self.waiting and self.waiting_since_s is not None:
            self.abandoned_s += max(0.0, now_s - max(self.waiting_since_s, self.byte_s))
            self.waiting_since_s = None

    def ejected(self, now_s: float, cause: Cause) -> None:
        """Opens the circuit of an endpoint that stopped working, until there is evidence that it works again."""
        self.breaker.trip(now_s, cause)
        self.abandoned_s = 0.0

    def candidate(self, now_s: float) -> Candidate:
        """Returns the endpoint as a candidate for routing."""
        # Where it is known not to be ready, no client's request need find out.
        circuit_open = self.breaker.is_open(now_s) or (self.unready and not self.breaker.closed)
        subscriber = self.subscriber
        fields = (
            self.endpoint,
            self.ready and now_s >= self.draining_until_s,
            circuit_open or now_s < self.overloaded_until_s,
            self.index_kind(now_s),
            subscriber.assets_revision,
            subscriber.role,
            self.is_reporting(now_s),
            subscriber.resumes,
            self.canary,
        )
        if fields != self._seen:
            self._seen, self._candidate = fields, Candidate(*fields)
        assert self._candidate is not None
        return self._candidate

    def phase(self, now_s: float) -> str:
        """Returns the endpoint's phase in one word."""
        if self.endpoint.draining or now_s < self.draining_until_s:
            return "draining"
        if not self.ready:
            return "starting"
        if not self.breaker.closed:
            return "broken"
        if self.role == PREFILL and not self.is_reporting(now_s):
            return "silent"
        return "overloaded" if now_s < self.overloaded_until_s else "ready"

    def overloaded(self, now_s: float, retry_after_s: float | None) -> None:
        """Records a 429: the endpoint is avoided for as long as it requests, or for a longer pause each time."""
        pause_s = FIRST_OVERLOAD_PAUSE_S * 2.0 ** min(self.overloads, 10) if retry_after_s is None else retry_after_s
        self.overloaded_until_s = now_s + min(LONGEST_OVERLOAD_PAUSE_S, max(0.1, pause_s))
        self.overloads += 1

    def answers(self, now_s: float, took_s: float) -> None:
        """Records the first byte of an answer below 400."""
        self.byte_s, self.abandoned_s = now_s, 0.0
        self.first_bytes.append((now_s, took_s))
        self.overloads, self.overloaded_until_s, self.unready = 0, 0.0, False

    def recent_first_bytes_s(self, now_s: float) -> Iterator[float]:
        """Yields the seconds that recent first bytes took."""
        return (took_s for came_s, took_s in self.first_bytes if now_s - came_s < RECENT_S)
