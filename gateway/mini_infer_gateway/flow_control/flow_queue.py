"""A bounded queue in front of the endpoints of each model: decides when a request is sent. Pure but for its outlet.

A request is routed when it arrives. If the chosen endpoint has room, it goes there at once; otherwise it waits for that
endpoint. When an endpoint has room again, the first request that waits for it is routed once more, with current
knowledge: it goes there, or to the endpoint that is better by now. An endpoint for which nothing waits is offered the
first and the last of the requests that wait for others, and takes those that would start sooner there at a justified
price. With each decision the queue stores the cost of every endpoint without the wait in its queue: an offer is routed
only if present queues would change the decision, or if the request has waited twice as long. A pair needs room at both
endpoints: the request waits for the one that has none. So only the router decides where; the queue only decides when.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Protocol

from mini_infer_gateway.fleet.backlog import Backlog, Entry
from mini_infer_gateway.fleet.load import Load
from mini_infer_gateway.fleet.placement_pauses import lacks_pages
from mini_infer_gateway.fleet.prefill_rates import PrefillRates
from mini_infer_gateway.flow_control.capacity import FIRST_WINDOW_S, Window, has_capacity
from mini_infer_gateway.flow_control.wait_prediction import WaitPrediction, retry_after_s
from mini_infer_gateway.routing.base import Decision, RoutingRequest
from mini_infer_gateway.routing.seconds import costs_beside_queues

IMMEDIATE = -(1 << 40)
"""Priority of requests that never wait here, because they take no place in a batch."""
PLACED_AT_ONCE = 32
"""Largest number of requests that one look at an endpoint places, to bound its duration; the next look continues."""
MOST_UNREPORTED = 8
"""Largest number of requests of API keys at an engine that its report (every 20 ms) does not count yet: requests that
wait at the engine are in order of arrival, and the shares of keys no longer apply to them.
"""
OFFERS = 8
"""Number of waiting requests whose decisions one look of an idle endpoint checks, to bound its cost."""
DECISION_VALID_S = 0.5
"""Seconds after which a decision is made again, and then at each doubled wait: caches change, too."""
KEPT_COST_ERROR_S = 0.3
"""Seconds by which an offer may look worse by stored costs and is still routed: batches and prices change meanwhile."""


class QueueFullError(Exception):
    """The queue is full, and no waiting request goes after this one."""

    def __init__(self, depth: int, retry_after_s: int) -> None:
        super().__init__(f"{depth} requests wait for this model already")
        self.depth, self.retry_after_s = depth, retry_after_s


@dataclass(slots=True, eq=False)
class QueuedRequest(Entry):
    """A request on its way to an endpoint."""

    request: RoutingRequest | None = None
    came_s: float = 0.0
    give_up_s: float = inf
    """Time at which the request stops waiting."""
    predicted_wait_s: float = 0.0
    decision: Decision | None = None
    """The latest decision, while the request waits."""
    decided_s: float = 0.0
    costs_s: Mapping[str, float] = field(default_factory=dict)
    """Cost of that decision by endpoint, without the wait in its queue."""


class Outlet(Protocol):
    """Receives the queue's decisions. It is called in the middle of the queue's work, so it must not call back."""

    def route(self, entry: QueuedRequest, now_s: float) -> Decision | None:
        """Routes the request in the current state. Returns None if no endpoint may be chosen."""

    def send(self, entry: QueuedRequest, decision: Decision, now_s: float) -> None:
        """Sends the request now; from here on it counts in that endpoint's load."""

    def refuse(self, entry: QueuedRequest, retry_after_s: int) -> None:
        """Rejects a waiting request that must make room for one that goes before it."""

    def abandon(self, entry: QueuedRequest) -> None:
        """Ends the wait of a request for which no endpoint is left that may be chosen."""

    def load(self, endpoint: str) -> Load:
        """Returns the current load of an endpoint."""


class FlowQueue:
    """The queues of all pools."""

    def __init__(self, outlet: Outlet, backlog: Backlog, rates: PrefillRates, max_queue: int) -> None:
        """`max_queue` is the number of requests that may wait in one pool; with 0, endpoints get everything at once."""
        self._outlet, self._backlog, self._rates, self._max_queue = outlet, backlog, rates, max_queue
        self._windows: dict[str, Window] = {}
        self._predictions: dict[str, WaitPrediction] = {}
        self._endpoints: frozenset[str] = frozenset()
        """All endpoints at the last call of `keep`."""
        self._has_keys = False

    def offer(self, entry: QueuedRequest, now_s: float) -> bool:
        """Sends a new request or queues it. Returns False if there is no endpoint for it. Raises QueueFullError."""
        self._has_keys |= bool(entry.flow.name)
        decision = self._outlet.route(entry, now_s)
        if decision is None:
            return False
        name = self._full(entry, decision)
        if name is None or not self._max_queue or entry.order[0] == IMMEDIATE:
            self._send(entry, decision, now_s)
            return True
        self._evict_for(entry)
        entry.came_s = now_s
        entry.predicted_wait_s = self._predict(entry, name)
        self._wait(entry, decision, name, now_s)
        return True

    def pump(self, endpoint: str, now_s: float) -> None:
        """Sends an endpoint what it has room for: after a load report, a first byte, an end, or a change of state."""
        seen: set[int] = set()
        for _ in range(PLACED_AT_ONCE):
            if not self._has_capacity(endpoint):
                return
            first = self._backlog.first(endpoint)
            if first and id(first) not in seen:
                seen.add(id(first))
                self._place_again(first, now_s)
            elif first or not self._take_over(endpoint, now_s):
                return

    def report(self, endpoint: str, queued_tokens: int, now_s: float) -> None:
        """Adapts the endpoint's window to a load report, and sends what it has room for."""
        waiting = self._backlog.count(endpoint)
        if waiting:
            self._windows.setdefault(endpoint, Window()).learn(queued_tokens, waiting)
        self.pump(endpoint, now_s)

    def drop(self, entry: QueuedRequest) -> None:
        """Removes a request whose client has disconnected, or which waited too long."""
        if entry.endpoint:
            self._leave(entry)

    def keep(self, endpoints: Collection[str]) -> None:
        """Forgets what was learned about all other endpoints; if one was removed, also the predictions of models for
        which nothing waits.
        """
        remaining = frozenset(endpoints)
        if self._endpoints - remaining:
            self._windows = {name: window for name, window in self._windows.items() if name in remaining}
            depths = self._backlog.depths()
            self._predictions = {pool: prediction for pool, prediction in self._predictions.items() if pool in depths}
        self._endpoints = remaining
        self._backlog.shares.keep(self._backlog.flows())
        self._backlog.pauses.keep(endpoints)

    def place_anew(self, endpoint: str, now_s: float) -> None:
        """Re-routes the first requests that wait for an endpoint that is not usable any more; the next look
        continues.
        """
        for entry in self._backlog.waiting(endpoint)[:PLACED_AT_ONCE]:
            self._place_again(entry, now_s)

    def depth(self, pool: str) -> int:
        """Returns the number of requests that wait in this pool."""
        return self._backlog.depth(pool)

    def _has_capacity(self, endpoint: str) -> bool:
        window = self._windows.get(endpoint)
        window_s = window.seconds if window else FIRST_WINDOW_S
        load = self._outlet.load(endpoint)
        if self._has_keys and load.reported and load.unreported >= MOST_UNREPORTED * load.engines:
            return False
        return has_capacity(load, self._rates.tokens_per_s(endpoint), window_s)

    def _full(self, entry: QueuedRequest, decision: Decision) -> str | None:
        """Returns the first endpoint of the decision that has no room for the request; None if all have room."""
        return next((one.name for one in decision.endpoints if not self._may_go(entry, one.name)), None)

    def _may_go(self, entry: QueuedRequest, endpoint: str) -> bool:
        first = self._backlog.first(endpoint)
        return (first is None or self._backlog.goes_before(entry, first)) and self._has_capacity(endpoint)

    def _evict_for(self, entry: QueuedRequest) -> None:
        """Makes room in a full queue: rejects the last request of the flow with the most for its weight, or the
        newcomer.

        So no flow fills the queue at the expense of others. Within a flow, a newcomer displaces a request of lower
        priority.
        """
        assert entry.request is not None
        if entry.request.attempted:
            return  # It was let in already, and its endpoint failed it.
        depth = self._backlog.depth(entry.pool)
        if depth < self._max_queue:
            return
        longest, own = self._backlog.longest(entry.pool), entry.flow
        assert longest is not None
        has_less = (self._backlog.depth_of(entry.pool, own) + 1) / own.weight
        displaces = longest != own and has_less <= self._backlog.depth_of(entry.pool, longest) / longest.weight
        last = self._backlog.last(entry.pool, longest if displaces else own) or self._backlog.last(entry.pool)
        assert isinstance(last, QueuedRequest)
        # Among requests of one priority it is the newcomer: who waited keeps the place.
        if not displaces and (last.flow != own or last.order[0] <= entry.order[0]):
            raise QueueFullError(depth, retry_after_s(self._predict(entry, last.endpoint)))
        self._leave(last)
        self._outlet.refuse(last, retry_after_s(last.predicted_wait_s))

    def _place_again(self, entry: Entry, now_s: float) -> bool:
        """Routes a waiting request once more. Returns False if it still waits."""
        assert isinstance(entry, QueuedRequest)
        decision = self._outlet.route(entry, now_s)
        before = entry.endpoint
        self._backlog.remove(entry)
        if decision is None:
            self._outlet.abandon(entry)
        elif (name := self._full(entry, decision)) is None:
            self._send(entry, decision, now_s)
        else:
            self._wait(entry, decision, name, now_s)
        if self._backlog.first(before) is None:
            self._backlog.pauses.left(before)
        return not entry.endpoint

    def _wait(self, entry: QueuedRequest, decision: Decision, endpoint: str, now_s: float) -> None:
        entry.costs_s = costs_beside_queues(decision.standing) if decision.standing else {}
        entry.decision, entry.decided_s = replace(decision, standing=None), now_s
        self._backlog.add(entry, endpoint, _uncached(entry, decision, endpoint))
        self._backlog.pauses.began(endpoint, now_s)

    def _leave(self, entry: Entry) -> None:
        endpoint = entry.endpoint
        self._backlog.remove(entry)
        if self._backlog.first(endpoint) is None:
            self._backlog.pauses.left(endpoint)

    def _take_over(self, endpoint: str, now_s: float) -> bool:
        """Sends one request here that waits for another endpoint, if this endpoint is better by now."""
        others = [name for name in self._backlog.endpoints() if name != endpoint]
        ends = (e for name in others for e in (self._backlog.first(name), self._backlog.final(name)) if e)
        offered = sorted({id(e): e for e in ends}.values(), key=self._backlog.rank)
        for entry in offered[:OFFERS]:
            assert isinstance(entry, QueuedRequest)
            if self._may_prefer(entry, endpoint, now_s) and self._place_again(entry, now_s):
                return True
        return False

    def _may_prefer(self, entry: QueuedRequest, endpoint: str, now_s: float) -> bool:
        """Returns False while the latest decision holds: the request would cost more here than where it waits."""
        if now_s - entry.decided_s >= max(DECISION_VALID_S, entry.decided_s - entry.came_s):
            return True
        if not entry.costs_s or entry.decision is None:
            return True
        there = entry.decision.decode if endpoint in entry.costs_s else entry.decision.prefill
        if there is None:
            return False
        return self._cost_s(entry, endpoint, now_s) < self._cost_s(entry, there.name, now_s) + KEPT_COST_ERROR_S

    def _cost_s(self, entry: QueuedRequest, endpoint: str, now_s: float) -> float:
        return entry.costs_s.get(endpoint, 0.0) + self._queue_s(endpoint, now_s)

    def _queue_s(self, endpoint: str, now_s: float) -> float:
        """Returns the seconds until this endpoint would start a new request, by queued tokens or by pages."""
        load = self._outlet.load(endpoint)
        pages_s = self._backlog.pauses.seconds(endpoint, now_s) if lacks_pages(load) else 0.0
        return max(load.queued_tokens / self._rates.tokens_per_s(endpoint), pages_s)

    def _send(self, entry: QueuedRequest, decision: Decision, now_s: float) -> None:
        for one in decision.endpoints:
            self._backlog.pauses.placed(one.name, now_s, still_waiting=self._backlog.first(one.name) is not None)
        entry.decision = None
        self._prediction(entry.pool).placed(now_s, still_waiting=self._backlog.depth(entry.pool) > 0)
        if self._has_keys:
            if entry.flow not in (waiting := self._backlog.flows()):
                self._backlog.shares.join(entry.flow)
            computes = decision.prefill or decision.decode
            self._backlog.shares.dispatch(entry.flow, _uncached(entry, decision, computes.name), waiting)
        self._outlet.send(entry, decision, now_s)

    def _predict(self, entry: QueuedRequest, endpoint: str) -> float:
        # Those of another model that shares an endpoint are before it as well.
        ahead = [self._backlog.ahead(name, entry.order, entry.flow) for name in self._backlog.endpoints()]
        tokens = self._outlet.load(endpoint).queued_tokens + self._backlog.ahead(endpoint, entry.order, entry.flow)[1]
        otherwise_s = tokens / self._rates.tokens_per_s(endpoint)
        return self._prediction(entry.pool).seconds(sum(requests for requests, _ in ahead), otherwise_s)

    def _prediction(self, pool: str) -> WaitPrediction:
        prediction = self._predictions.get(pool)
        if prediction is None:
            prediction = self._predictions[pool] = WaitPrediction()
        return prediction


def _uncached(entry: QueuedRequest, decision: Decision, endpoint: str) -> int:
    """Returns the prompt tokens that this endpoint of the decision would compute."""
    assert entry.request is not None
    if decision.prefill is None:
        return max(1, entry.request.prompt_tokens - decision.hit_tokens)
    return max(1, decision.prefill_tokens) if decision.prefill.name == endpoint else 1
