"""The queue in the serving path: requests wait as futures, and leave when they are placed, refused, late or abandoned.

It is told of load reports, first bytes and ends, and looks at everything itself now and then, since endpoints also
come, go and break without a word. What is sent where is the queue's and the router's to decide.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import inf
from typing import Protocol

from mini_infer_contract.events import LoadReport
from mini_infer_gateway.fleet.backlog import Backlog, Order
from mini_infer_gateway.fleet.fair_shares import NO_KEY, TOKENS_PER_SECOND, Flow
from mini_infer_gateway.fleet.load import InFlight, Load, LoadLedger
from mini_infer_gateway.fleet.prefill_rates import PrefillRates
from mini_infer_gateway.fleet.transfer_rates import TransferRates
from mini_infer_gateway.flow_control.flow_queue import FlowQueue, QueuedRequest, QueueFullError
from mini_infer_gateway.flow_control.wait_prediction import retry_after_s
from mini_infer_gateway.metrics import Metrics
from mini_infer_gateway.routing.base import Candidate, Decision, RoutingRequest
from mini_infer_gateway.routing.router import Router
from mini_infer_gateway.settings import GatewaySettings
from mini_infer_web.api_errors import ApiError

LOOK_EVERY_S = 0.1
LOOKED_AT = 4
"""Endpoints for which nothing waits that one look offers what waits for others, in turns."""


class Candidates(Protocol):
    """Who may be asked, as things stand; the fleet."""

    def candidates(self, names: Sequence[str], now_s: float) -> list[Candidate]:
        """These endpoints."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A request's endpoint: it counts there from now on, until `FlowController.finish`."""

    decision: Decision
    flight: InFlight
    prefill_flight: InFlight | None
    """At the engine that computes its prompt, where that is another one."""
    prompt_tokens: int
    """As its tokenizer counts them; 0: not tokenised."""
    waited_s: float
    sent_s: float
    tokens_before_answer: int
    """Its own uncached ones, and those that the endpoint had to compute already."""
    flow: Flow = NO_KEY


@dataclass(slots=True, eq=False)
class Waiter(QueuedRequest):
    """A request of the serving path."""

    names: Callable[[], Sequence[str]] = tuple
    """Of the model's endpoints: others may have come since it began to wait."""
    request_id: str = ""
    placement: Placement | None = None
    future: "asyncio.Future[None] | None" = None

    def fail(self, error: Exception) -> None:
        """It ends without an endpoint."""
        if self.future and not self.future.done():
            self.future.set_exception(error)


class FlowController:
    """All requests between their routing and their end."""

    def __init__(
        self,
        settings: GatewaySettings,
        fleet: Candidates,
        router: Router,
        ledger: LoadLedger,
        backlog: Backlog,
        rates: PrefillRates,
        transfers: TransferRates,
        metrics: Metrics,
        guess: Callable[[RoutingRequest, Decision, float], int],
        clock: Callable[[], float],
    ) -> None:
        """`guess` counts a prompt as cached at the endpoint that it goes to, and returns its tokens."""
        self._settings, self._fleet, self._router, self._ledger = settings, fleet, router, ledger
        self._backlog, self._rates, self._transfers = backlog, rates, transfers
        self._metrics, self._guess, self._clock = metrics, guess, clock
        self._queue = FlowQueue(self, backlog, rates, settings.max_queue)
        self._numbers, self._turns = count(1), count()
        ledger.on_report = self.reported

    def order(self, priority: int, arrived_s: float, patience_s: float = inf) -> Order:
        """A new request's place in the queue: by priority, then by when it must be placed at the latest.

        `patience_s`: how long its client wants to wait at most.
        """
        return priority, arrived_s + min(patience_s, self._settings.queue_timeout_s), next(self._numbers)

    async def place(
        self,
        request: RoutingRequest,
        names: Callable[[], Sequence[str]],
        request_id: str,
        leave: Callable[[Callable[[Exception], None]], None],
        give_up_s: float = inf,
    ) -> Placement | None:
        """An endpoint for this request, at once or when it is its turn; None: there is none that may be chosen.

        `leave` gets a function that ends the wait with an error; `give_up_s` is when the client wants no more.

        Raises ApiError: 429 where too many wait, 503 where it
        waited too long.
        """
        now_s = self._clock()
        waiter = Waiter(
            request.order, request.model, flow=request.flow, request=request, names=names, request_id=request_id
        )
        waiter.give_up_s = min(request.order[1], give_up_s)
        try:
            if not self._queue.offer(waiter, now_s):
                return None
        except QueueFullError as full:
            self._metrics.queue_refused(request.model, "full")
            raise _queue_full(request.model, full.retry_after_s) from None
        if waiter.placement is None:
            leave(waiter.fail)
            await self._wait(waiter, now_s)
        return waiter.placement

    def place_now(self, request: RoutingRequest, decision: Decision, request_id: str) -> Placement:
        """Where it has been decided already and nothing may wait: a stream goes on."""
        waiter = Waiter(request.order, request.model, flow=request.flow, request=request, request_id=request_id)
        self.send(waiter, decision, self._clock())
        assert waiter.placement is not None
        return waiter.placement

    async def _wait(self, waiter: Waiter, now_s: float) -> None:
        loop = asyncio.get_running_loop()
        waiter.future = loop.create_future()
        timer = loop.call_later(max(0.0, waiter.give_up_s - now_s), self._too_late, waiter)
        try:
            await waiter.future
        except BaseException:
            if waiter.placement:
                self.finish(waiter.placement)  # placed and abandoned in the same moment
            raise
        finally:
            timer.cancel()
            self._queue.drop(waiter)

    def first_byte(self, placement: Placement, is_stream: bool, came_apart: bool = True) -> None:
        """Its answer begins, so its prompt is computed, and, in a stream, not much more.

        `came_apart`: where another engine was to compute it, that one has.
        """
        endpoint = placement.flight.endpoint
        self._ledger.answered(placement.flight)
        took_s = self._clock() - placement.sent_s
        if placement.prefill_flight:
            self._end_prefill(placement.prefill_flight)
            if is_stream and came_apart:
                self._transfers.observe(placement.decision.first_token_s, took_s, self._clock())
                self._metrics.first_token_apart(placement.decision.first_token_s, took_s)
        elif is_stream and not self._ledger.load(endpoint).reported:
            self._rates.observe(endpoint, placement.tokens_before_answer, took_s)
        self._pump(endpoint)

    def finish(self, placement: Placement) -> None:
        """It is over, however it ended."""
        self._ledger.finish(placement.flight)
        if placement.flow.name:
            self._backlog.shares.charge(placement.flow, TOKENS_PER_SECOND * max(0.0, self._clock() - placement.sent_s))
        if placement.prefill_flight:
            self._end_prefill(placement.prefill_flight)
        self._pump(placement.flight.endpoint)

    def _end_prefill(self, flight: InFlight) -> None:
        self._ledger.finish(flight)
        self._pump(flight.endpoint)

    def reported(self, endpoint: str, report: LoadReport) -> None:
        """An endpoint said how busy it is."""
        self._rates.report(endpoint, report)
        self._transfers.report(endpoint, report)
        self._queue.report(endpoint, report.queued_tokens, self._clock())

    async def look(self, names: Callable[[], Sequence[str]]) -> None:
        """Until cancelled: places anew what waits for endpoints that are gone, and offers idle ones what waits."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            known = list(names())
            self._rates.keep(known)
            self._transfers.keep(known)
            self._queue.keep(known)
            if self._backlog:
                self.look_once(known)

    def look_once(self, names: Sequence[str]) -> None:
        """One look; `names` are all endpoints that there are."""
        now_s = self._clock()
        usable = {candidate.endpoint.name for candidate in self._fleet.candidates(names, now_s) if _usable(candidate)}
        waited_for = self._backlog.endpoints()
        for endpoint in waited_for:
            if endpoint in usable:
                self._queue.pump(endpoint, now_s)
            else:
                self._queue.place_anew(endpoint, now_s)
        idle = sorted(usable.difference(waited_for))
        for _ in range(min(LOOKED_AT, len(idle))):
            self._queue.pump(idle[next(self._turns) % len(idle)], now_s)

    def _pump(self, endpoint: str) -> None:
        if self._backlog:
            self._queue.pump(endpoint, self._clock())

    def _too_late(self, waiter: Waiter) -> None:
        self._metrics.queue_refused(waiter.pool, "late")
        waited_s = self._clock() - waiter.came_s
        message = f"model {waiter.pool!r} is so busy that this request was not placed within {waited_s:.0f} s"
        headers = {"retry-after": str(retry_after_s(waited_s))}
        waiter.fail(ApiError(503, f"{message}; try again later", code="queue_timeout", headers=headers))

    # What the queue asks of its outlet.

    def route(self, entry: QueuedRequest, now_s: float) -> Decision | None:
        """See Outlet."""
        assert isinstance(entry, Waiter)
        assert entry.request is not None
        return self._router.route(entry.request, self._fleet.candidates(entry.names(), now_s), now_s)

    def send(self, entry: QueuedRequest, decision: Decision, now_s: float) -> None:
        """See Outlet."""
        assert isinstance(entry, Waiter)
        assert entry.request is not None
        prompt_tokens = self._guess(entry.request, decision, now_s)
        uncached = 0 if decision.prefill else max(0, entry.request.prompt_tokens - decision.hit_tokens)
        tokens = uncached + self._ledger.load(decision.decode.name).queued_tokens
        flight, prefill_flight = self._ledger.start(decision.decode.name, entry.request_id, uncached), None
        if decision.prefill:
            prefill_flight = self._ledger.start(decision.prefill.name, entry.request_id, decision.prefill_tokens)
        waited_s = now_s - entry.came_s if entry.future else 0.0
        decision = replace(decision, standing=None)  # a stream may last long, and needs no costs any more
        entry.placement = Placement(
            decision, flight, prefill_flight, prompt_tokens, waited_s, now_s, tokens, entry.flow
        )
        self._metrics.prefill_placed(entry.pool, decision.prefill_reason, decision.break_even_tokens)
        self._metrics.queue_waited(entry.pool, waited_s, entry.predicted_wait_s if entry.future else None)
        if entry.future and not entry.future.done():
            entry.future.set_result(None)

    def refuse(self, entry: QueuedRequest, retry_after_s: int) -> None:
        """See Outlet."""
        assert isinstance(entry, Waiter)
        self._metrics.queue_refused(entry.pool, "displaced")
        entry.fail(_queue_full(entry.pool, retry_after_s))

    def abandon(self, entry: QueuedRequest) -> None:
        """See Outlet: placed nowhere, and nothing wrong with the request."""
        assert isinstance(entry, Waiter)
        if entry.future and not entry.future.done():
            entry.future.set_result(None)

    def load(self, endpoint: str) -> Load:
        """See Outlet."""
        return self._ledger.load(endpoint)


def _usable(candidate: Candidate) -> bool:
    return candidate.ready and not candidate.circuit_open


def _queue_full(model: str, retry_after_s: int) -> ApiError:
    message = f"as many requests wait for model {model!r} as may; try again in about {retry_after_s} s"
    return ApiError(429, message, code="queue_full", headers={"retry-after": str(retry_after_s)})
