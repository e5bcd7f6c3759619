"""The queue in the serving path: requests wait as futures until they are placed, refused, timed out or abandoned.

Load reports, first bytes and ends are reported to it. It also checks everything itself at intervals, since endpoints
come, go and break without notice. The queue and the router decide what is sent where.
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
from mini_infer_gateway.fleet.registry import no_endpoint
from mini_infer_gateway.fleet.tier_rates import TierRates
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
"""Number of idle endpoints to which one look offers requests that wait for others, in turns."""


class Candidates(Protocol):
    """The source of candidate endpoints in their current state; the fleet implements it."""

    def candidates(self, names: Sequence[str], now_s: float) -> list[Candidate]:
        """Returns these endpoints as candidates."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A request's endpoint: the request counts in its load until `FlowController.finish`."""

    decision: Decision
    flight: InFlight
    prefill_flight: InFlight | None
    """The request's load at the engine that computes its prompt; None if the decode engine does."""
    prompt_tokens: int
    """Number of prompt tokens by its tokenizer; 0 if the prompt was not tokenised."""
    waited_s: float
    sent_s: float
    tokens_before_answer: int
    """The request's own uncached tokens, and those that the endpoint had to compute already."""
    flow: Flow = NO_KEY


@dataclass(slots=True, eq=False)
class Waiter(QueuedRequest):
    """A request of the serving path that may wait."""

    names: Callable[[], Sequence[str]] = tuple
    """Returns the names of the model's endpoints now: others may have come since the request began to wait."""
    request_id: str = ""
    first_token_by_s: float = inf
    """Time by which its client expects a first token."""
    placement: Placement | None = None
    future: "asyncio.Future[None] | None" = None

    def fail(self, error: Exception) -> None:
        """Ends the wait with an error, without an endpoint."""
        if self.future and not self.future.done():
            self.future.set_exception(error)


class FlowController:
    """Controls all requests between their routing and their end."""

    def __init__(
        self,
        settings: GatewaySettings,
        fleet: Candidates,
        router: Router,
        ledger: LoadLedger,
        backlog: Backlog,
        rates: PrefillRates,
        transfers: TransferRates,
        tier_rates: TierRates,
        metrics: Metrics,
        guess: Callable[[RoutingRequest, Decision, float], int],
        clock: Callable[[], float],
    ) -> None:
        """`guess` counts a prompt as cached at the endpoint that it goes to, and returns its number of tokens."""
        self._settings, self._fleet, self._router, self._ledger = settings, fleet, router, ledger
        self._backlog, self._rates, self._transfers, self._tier_rates = backlog, rates, transfers, tier_rates
        self._metrics, self._guess, self._clock = metrics, guess, clock
        self._queue = FlowQueue(self, backlog, rates, settings.max_queue)
        self._numbers, self._rounds = count(1), count()
        ledger.on_report = self.reported

    def order(self, priority: int, arrived_s: float, client_timeout_s: float = inf) -> Order:
        """Returns a new request's position in the queue: by priority, then by its deadline for placement.

        `client_timeout_s` is the longest time for which its client is willing to wait.
        """
        return priority, arrived_s + min(client_timeout_s, self._settings.queue_timeout_s), next(self._numbers)

    async def place(
        self,
        request: RoutingRequest,
        names: Callable[[], Sequence[str]],
        request_id: str,
        leave: Callable[[Callable[[Exception], None]], None],
        give_up_s: float = inf,
        first_token_by_s: float = inf,
        waits: Callable[[Decision, float], None] = lambda decision, wait_s: None,
    ) -> Placement:
        """Waits for an endpoint for this request, and places it there.

        `leave` is called with a function that ends the wait with an error. `waits` is called with the decision for
        which the request begins to wait, and the predicted seconds of its wait. `give_up_s` is the time at which the
        client gives up, `first_token_by_s` the time by which it expects a first token. Raises ApiError: 429 if too many
        requests wait or the predicted wait is longer than the first token may take, 503 if this one waited too long or
        no endpoint may be chosen.
        """
        now_s = self._clock()
        waiter = Waiter(
            request.order, request.model, flow=request.flow, request=request, names=names, request_id=request_id
        )
        waiter.first_token_by_s = first_token_by_s
        waiter.give_up_s = min(request.order[1], give_up_s, first_token_by_s)
        try:
            is_routed = self._queue.offer(waiter, now_s)
        except QueueFullError as full:
            self._metrics.queue_refused(request.model, "full")
            raise _queue_full(request.model, full.retry_after_s) from None
        if is_routed and waiter.placement is None:
            if now_s + waiter.predicted_wait_s > first_token_by_s:
                self._queue.drop(waiter)
                raise self._unattainable(waiter, now_s)
            leave(waiter.fail)
            if waiter.decision is not None:
                waits(waiter.decision, waiter.predicted_wait_s)
            await self._wait(waiter, now_s)
        if waiter.placement is None:
            raise no_endpoint(request.model)
        return waiter.placement

    def place_now(self, request: RoutingRequest, decision: Decision, request_id: str) -> Placement:
        """Places a request that continues a stream: it is routed already and may not wait."""
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

    def first_byte(self, placement: Placement, is_stream: bool, was_disaggregated: bool = True) -> None:
        """Records that the answer begins: its prompt is computed, and, for a stream, not much more.

        `was_disaggregated` is True unless another engine was to compute the prompt and failed to.
        """
        endpoint = placement.flight.endpoint
        self._ledger.answered(placement.flight)
        took_s = self._clock() - placement.sent_s
        if placement.prefill_flight:
            self._end_prefill(placement.prefill_flight)
            if is_stream and was_disaggregated:
                self._transfers.observe(placement.decision.first_token_s, took_s, self._clock())
                self._metrics.first_token_apart(placement.decision.first_token_s, took_s)
        elif is_stream and not self._ledger.load(endpoint).reported:
            self._rates.observe(endpoint, placement.tokens_before_answer, took_s)
        self._pump(endpoint)

    def finish(self, placement: Placement) -> None:
        """Removes a request from the load of its endpoints, however it ended."""
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
        """Takes an endpoint's load report."""
        self._rates.report(endpoint, report)
        self._transfers.report(endpoint, report)
        self._tier_rates.report(endpoint, report)
        self._queue.report(endpoint, report.queued_tokens, self._clock())

    async def look(self, names: Callable[[], Sequence[str]]) -> None:
        """Re-routes requests that wait for lost endpoints and offers requests to idle ones, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            endpoint_names = list(names())
            self._rates.keep(endpoint_names)
            self._transfers.keep(endpoint_names)
            self._tier_rates.keep(endpoint_names)
            self._queue.keep(endpoint_names)
            if self._backlog:
                self.look_once(endpoint_names)

    def look_once(self, names: Sequence[str]) -> None:
        """Checks the queue once; `names` are all existing endpoints."""
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
            self._queue.pump(idle[next(self._rounds) % len(idle)], now_s)

    def _pump(self, endpoint: str) -> None:
        if self._backlog:
            self._queue.pump(endpoint, self._clock())

    def _too_late(self, waiter: Waiter) -> None:
        now_s = self._clock()
        if waiter.give_up_s == waiter.first_token_by_s:
            waiter.fail(self._unattainable(waiter, now_s))
            return
        self._metrics.queue_refused(waiter.pool, "late")
        waited_s = now_s - waiter.came_s
        message = f"model {waiter.pool!r} is so busy that this request was not placed within {waited_s:.3g} s"
        headers = {"retry-after": str(retry_after_s(waited_s))}
        waiter.fail(ApiError(503, f"{message}; try again later", code="queue_timeout", headers=headers))

    def _unattainable(self, waiter: Waiter, now_s: float) -> ApiError:
        """Returns the refusal of a request whose first token cannot come in time."""
        self._metrics.queue_refused(waiter.pool, "unattainable")
        due_ms = 1000 * max(0.0, waiter.first_token_by_s - waiter.came_s)
        message = f"ttft_ms {due_ms:.0f} cannot be met: so many requests wait for model {waiter.pool!r}"
        headers = {"retry-after": str(retry_after_s(waiter.predicted_wait_s))}
        return ApiError(429, message, param="ttft_ms", code="slo_unattainable", headers=headers)

    # What the queue asks of its outlet.

    def route(self, entry: QueuedRequest, now_s: float) -> Decision | None:
        """Routes a waiting request among the model's current endpoints."""
        assert isinstance(entry, Waiter)
        assert entry.request is not None
        return self._router.route(entry.request, self._fleet.candidates(entry.names(), now_s), now_s)

    def send(self, entry: QueuedRequest, decision: Decision, now_s: float) -> None:
        """Starts the request's load at its endpoints, and completes its wait with a placement."""
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
        """Fails the waiting request with a 429."""
        assert isinstance(entry, Waiter)
        self._metrics.queue_refused(entry.pool, "displaced")
        entry.fail(_queue_full(entry.pool, retry_after_s))

    def abandon(self, entry: QueuedRequest) -> None:
        """Completes the wait without a placement, which the request's caller reports as a missing endpoint."""
        assert isinstance(entry, Waiter)
        if entry.future and not entry.future.done():
            entry.future.set_result(None)

    def load(self, endpoint: str) -> Load:
        """Returns the endpoint's load from the ledger."""
        return self._ledger.load(endpoint)


def _usable(candidate: Candidate) -> bool:
    return candidate.ready and not candidate.circuit_open


def _queue_full(model: str, retry_after_s: int) -> ApiError:
    message = f"as many requests wait for model {model!r} as may; try again in about {retry_after_s} s"
    return ApiError(429, message, code="queue_full", headers={"retry-after": str(retry_after_s)})
