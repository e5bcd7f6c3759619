"""Counts the load of each service for what scales it (`GET /scaling`). It observes requests, and changes nothing.

A request belongs to the service that owns its model's name, so that requests of a service without engines count too.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from mini_infer_contract.scaling import LATENCY_BUCKETS_S, EngineLoad, GatewayLoads, ServiceLoad, bucket_of
from mini_infer_gateway.console.request_log import completion_tokens_of
from mini_infer_gateway.fleet.backlog import Backlog
from mini_infer_gateway.fleet.load import LoadLedger
from mini_infer_gateway.fleet.prefill_rates import PrefillRates
from mini_infer_gateway.fleet.registry import Fleet
from mini_infer_gateway.pipeline.observer import StreamProgress
from mini_infer_gateway.routing.base import Decision
from mini_infer_web.asgi import Scope

MAX_SERVICES: Final = 10_000
"""Services that are counted; requests of further ones are not."""
HIT_MEMORY: Final = 0.98
"""Weight of the past in the share of prompt tokens that is found cached: the last fifty requests count."""


@dataclass(slots=True)
class _Counts:
    """The sums of one service."""

    requests: int = 0
    prompt_tokens: float = 0.0
    answers: int = 0
    output_tokens: int = 0
    hit_share: float = 0.0
    ttft: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BUCKETS_S) + 1))
    itl: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BUCKETS_S) + 1))
    running: "set[_Trace]" = field(default_factory=set)


class ServiceLoads:
    """The counters of all services at one gateway. It is an observer of requests."""

    def __init__(
        self, fleet: Fleet, backlog: Backlog, ledger: LoadLedger, rates: PrefillRates, clock: Callable[[], float]
    ) -> None:
        self._fleet, self._backlog, self._ledger, self._rates = fleet, backlog, ledger, rates
        self._clock, self._started_s = clock, time.time()
        self._counts: dict[str, _Counts] = {}
        self.held: Callable[[], Mapping[str, int]] = dict
        """Returns the number of requests by model that wait for a first engine."""

    def begin(self, scope: Scope, now_s: float) -> "_Trace":
        """Returns the trace of a request that has just arrived."""
        return _Trace(self, now_s)

    def report(self) -> GatewayLoads:
        """Returns the answer to `GET /scaling`."""
        now_s = self._clock()
        engines: dict[str, dict[str, EngineLoad]] = {}
        for name, state in self._fleet.endpoints.items():
            if state.endpoint.service and state.phase(now_s) != "starting":
                load = self._ledger.load(name)
                engines.setdefault(state.endpoint.service, {})[name] = EngineLoad(
                    state.role, load.running, load.queued_tokens, round(self._rates.tokens_per_s(name), 1)
                )
        depths, tokens = self._backlog.depths(), self._backlog.waiting_tokens()
        queued = dict[str, tuple[int, int]]()
        for model, held in self.held().items():
            depths[model] = depths.get(model, 0) + held
        for model, depth in depths.items():
            if service := self._service_of(model):
                before = queued.get(service, (0, 0))
                queued[service] = before[0] + depth, before[1] + tokens.get(model, 0)
        names = {*self._counts, *engines, *queued}
        services = {
            name: self._load(self._counts.get(name) or _Counts(), *queued.get(name, (0, 0)), engines.get(name, {}))
            for name in names
        }
        return GatewayLoads(self._started_s, services)

    @staticmethod
    def _load(counts: _Counts, depth: int, tokens: int, engines: dict[str, EngineLoad]) -> ServiceLoad:
        return ServiceLoad(
            requests=counts.requests,
            prompt_tokens=round(counts.prompt_tokens),
            answers=counts.answers,
            output_tokens=counts.output_tokens,
            queued_requests=depth,
            queued_tokens=tokens,
            running_requests=len(counts.running),
            tokens_in_flight=sum(trace.tokens for trace in counts.running),
            ttft_counts=list(counts.ttft) if any(counts.ttft) else [],
            itl_counts=list(counts.itl) if any(counts.itl) else [],
            engines=engines,
        )

    def _service_of(self, model: str) -> str:
        """Returns the service that serves this model's name, or "" if none does."""
        catalog = self._fleet.catalog
        return catalog.owners.get(model) or (model if "/" in model and model in catalog.by_name else "")

    def counts_of(self, model: object) -> _Counts | None:
        """Returns the counters of the model's service; None if none is known, or too many services are counted."""
        service = self._service_of(model) if isinstance(model, str) else ""
        if not service or (service not in self._counts and len(self._counts) >= MAX_SERVICES):
            return None
        return self._counts.setdefault(service, _Counts())


class _Trace:
    """Counts one request."""

    __slots__ = ("_arrived_s", "_counts", "_first_s", "_is_stream", "_loads", "_output", "_progress", "_prompt")

    def __init__(self, loads: ServiceLoads, now_s: float) -> None:
        self._loads, self._arrived_s = loads, now_s
        self._counts: _Counts | None = None
        self._progress: StreamProgress | None = None
        self._first_s = 0.0
        self._prompt, self._output, self._is_stream = 0, -1, False

    @property
    def tokens(self) -> int:
        """The number of tokens of prompt and answer so far."""
        return self._prompt + (max(0, self._progress.tokens) if self._progress else 0)

    def tokenized(self, fields: Mapping[str, Any], prompt_tokens: int, now_s: float) -> None:
        """Counts the arrival."""
        self._counts = counts = self._loads.counts_of(fields.get("model"))
        if counts is not None:
            self._prompt, self._is_stream = prompt_tokens, fields.get("stream") is True
            counts.requests += 1
            counts.prompt_tokens += prompt_tokens * (1 - counts.hit_share)

    def sent(self, decision: Decision, waited_s: float, now_s: float) -> None:
        """Learns how much of a prompt is cached."""
        counts = self._counts
        if counts is not None:
            counts.running.add(self)
            if self._prompt:
                hit = min(1.0, decision.hit_tokens / self._prompt)
                counts.hit_share = HIT_MEMORY * counts.hit_share + (1 - HIT_MEMORY) * hit

    def answered(self, now_s: float) -> None:
        """Counts the time to the first token, once."""
        if self._counts is not None and self._is_stream and not self._first_s:
            self._first_s = now_s
            self._counts.ttft[bucket_of(now_s - self._arrived_s)] += 1

    def answered_whole(self, body: bytes) -> None:
        """Reads the length of an answer that is no stream."""
        self._progress, self._output = None, completion_tokens_of(body)

    def streams(self, progress: StreamProgress) -> None:
        """Takes a stream whose length is known as it grows."""
        self._progress = progress

    def failed(self, reason: str, now_s: float) -> None:
        """Records an attempt without an answer."""
        if self._counts is not None:
            self._counts.running.discard(self)

    def ended(self, facts: Mapping[str, Any], now_s: float) -> None:
        """Counts the answer's length, and the time between its tokens."""
        counts = self._counts
        if counts is None:
            return
        counts.running.discard(self)
        output = self._progress.tokens if self._progress else self._output
        self._progress = None
        if output < 0 or facts.get("status", 200) != 200:
            return
        counts.answers += 1
        counts.output_tokens += output
        if self._first_s and output > 1:
            counts.itl[bucket_of((now_s - self._first_s) / (output - 1))] += 1
