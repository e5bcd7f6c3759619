"""One endpoint as the gateway knows it now: what its source says, what its answers showed, who waits for it.

Plain data with the time passed in; the tasks that fill it are the registry's, the subscriber's and the watchdog's.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from mini_infer_contract.launch import Endpoint
from mini_infer_gateway.fleet.breaker import Breaker, Cause
from mini_infer_gateway.fleet.endpoint_subscriber import EndpointSubscriber
from mini_infer_gateway.fleet.liveness import SILENT_S, Signs
from mini_infer_gateway.routing.base import PREFILL, Candidate, IndexKind

FIRST_BYTES_KEPT = 64
RECENT_S = 60.0
"""How long a first byte's time says something of how fast a peer answers."""
FIRST_OVERLOAD_PAUSE_S = 0.5
LONGEST_OVERLOAD_PAUSE_S = 10.0


class Waiting(Protocol):
    """A request that was sent and has no answer yet, or a part of one."""

    @property
    def can_resume(self) -> bool:
        """It has a part, and another endpoint can go on with it."""
        ...

    def move(self, reason: str) -> None:
        """Give up this endpoint and try another one, if there is one and nothing is lost by it."""


@dataclass(slots=True)
class EndpointState:
    """One endpoint."""

    endpoint: Endpoint
    ready: bool
    subscriber: EndpointSubscriber
    task: asyncio.Task[None]
    breaker: Breaker = field(default_factory=Breaker)
    draining_until_s: float = 0.0
    overloaded_until_s: float = 0.0
    """It answered 429: until then it is chosen only where nothing else is left."""
    overloads: int = 0
    """429s in a row."""
    waiting: dict[Waiting, float] = field(default_factory=dict)
    """Requests without a first byte -> when they went out, the oldest first."""
    streaming: set[Waiting] = field(default_factory=set)
    """Requests with a part of their answer that another endpoint can go on with."""
    waiting_since_s: float | None = None
    """Since when at least one of them waits without a break."""
    abandoned_s: float = 0.0
    """How long they waited since the last byte in times that ended with the last client giving up."""
    byte_s: float = 0.0
    """When a byte of any answer last came."""
    first_bytes: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=FIRST_BYTES_KEPT))
    """(when, after how long) of recent first bytes."""
    unready: bool = False
    """The last time it was asked whether it is ready it did not say so."""
    probe: asyncio.Task[None] | None = None
    _seen: tuple[object, ...] = ()
    _candidate: Candidate | None = None
    """Made anew only where something of it has changed."""

    def index_kind(self, now_s: float) -> IndexKind:
        """How its cache is known."""
        if not self.subscriber.assets_revision:
            return "none"
        if self.subscriber.live:
            return "exact"
        return "stale" if now_s < self.subscriber.stale_until_s else "approximate"

    @property
    def role(self) -> str:
        """Its own word counts: it may have switched since its source was written."""
        return self.subscriber.role or self.endpoint.role

    def is_reporting(self, now_s: float) -> bool:
        """Its load reports come; nothing else shows that a prefill engine works, to which no client's request goes."""
        return self.subscriber.report_s is not None and now_s - self.subscriber.report_s <= SILENT_S

    @property
    def signs(self) -> Signs:
        """What liveness judges."""
        return Signs(self.subscriber.report_s, self.byte_s, self.waiting_since_s, self.abandoned_s, self.unready)

    def sent(self, request: Waiting, now_s: float) -> None:
        """A request went out."""
        self.waiting[request] = now_s
        if self.waiting_since_s is None:
            self.waiting_since_s = now_s

    def heard(self, now_s: float) -> None:
        """A byte of an answer came."""
        self.byte_s, self.abandoned_s = now_s, 0.0

    def waits_no_more(self, request: Waiting, now_s: float) -> None:
        """A request has its first byte, or ended without one."""
        self.waiting.pop(request, None)
        if not self.waiting and self.waiting_since_s is not None:
            self.abandoned_s += max(0.0, now_s - max(self.waiting_since_s, self.byte_s))
            self.waiting_since_s = None

    def ejected(self, now_s: float, cause: Cause) -> None:
        """It stopped working: nobody is sent to it until something shows that it works again."""
        self.breaker.trip(now_s, cause)
        self.abandoned_s = 0.0

    def candidate(self, now_s: float) -> Candidate:
        """As routing sees it."""
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
        )
        if fields != self._seen:
            self._seen, self._candidate = fields, Candidate(*fields)
        assert self._candidate is not None
        return self._candidate

    def phase(self, now_s: float) -> str:
        """One word for where it stands."""
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
        """It answered 429: leave it alone as long as it asks for, or longer each time."""
        pause_s = FIRST_OVERLOAD_PAUSE_S * 2.0 ** min(self.overloads, 10) if retry_after_s is None else retry_after_s
        self.overloaded_until_s = now_s + min(LONGEST_OVERLOAD_PAUSE_S, max(0.1, pause_s))
        self.overloads += 1

    def answers(self, now_s: float, took_s: float) -> None:
        """A first byte came, of an answer below 400."""
        self.byte_s, self.abandoned_s = now_s, 0.0
        self.first_bytes.append((now_s, took_s))
        self.overloads, self.overloaded_until_s, self.unready = 0, 0.0, False

    def recent_first_bytes_s(self, now_s: float) -> Iterator[float]:
        """How long recent first bytes took."""
        return (took_s for came_s, took_s in self.first_bytes if now_s - came_s < RECENT_S)
