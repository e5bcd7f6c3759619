"""Time, engines and gateways put together: requests arrive, gateways send them to engines, answers are noted.

Knows no policy. What an engine publishes reaches every gateway after `NEWS_DELAY_S`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from typing import Any, Protocol

from benchmarks.routing.engine_model import Change, EngineModel, EngineShape, Report
from benchmarks.routing.workload import Follow, SimulatedRequest, Workload

TRANSFER_FIXED_S = 0.002
"""After a prompt was computed apart: the pages of its last layer, and the word that they are there."""
NEWS_DELAY_S = 0.002
"""From the end of a pass until gateways have its events and load report."""


@dataclass(slots=True)
class Answer:
    """What became of a request."""

    request: SimulatedRequest
    engine: int = -1
    sent_s: float = -1.0
    """When its gateway sent it to an engine; before that it waited at the gateway."""
    first_token_s: float = -1.0
    end_s: float = -1.0
    cached_tokens: int = 0
    refused: bool = False
    prefill: int | None = None
    """The engine that computes its prompt, where that is another one."""
    predicted_wait_s: float | None = None
    """At a gateway with a queue: the wait that it predicted on arrival."""


class SimulatedGateway(Protocol):
    """What the world tells a gateway."""

    def arrive(self, request: SimulatedRequest, now_s: float) -> None:
        """A client's request."""

    def first_token(self, request: SimulatedRequest, engine: int, now_s: float) -> None:
        """Of a request that this gateway sent."""

    def finished(self, request: SimulatedRequest, engine: int, now_s: float) -> None:
        """Of a request that this gateway sent."""

    def joined(self, engine: int, now_s: float) -> None:
        """An engine serves from now on."""

    def died(self, engine: int, lost: Sequence[SimulatedRequest], now_s: float) -> None:
        """An engine is gone, and with it the answers to these requests of this gateway, which are to be sent anew."""

    def news(self, engine: int, events: Sequence[Change], report: Report, now_s: float) -> None:
        """What an engine published at the end of a pass."""


@dataclass
class World:
    """One run."""

    shape: EngineShape
    engine_count: int
    make_gateway: "Callable[[World], SimulatedGateway]"
    gateway_count: int = 1
    prefill_count: int = 0
    """Of the engines, from the first on: those that compute prompts for the others."""
    transfer_tokens_per_s: float = 1e6
    """Of KV cache between two engines."""
    publishes: bool = True
    """Whether gateways hear of events and load; references look at the engines themselves."""
    speeds: Sequence[float] = ()
    """Of each engine, beside the shape's rates; empty: all are alike."""
    joins: Mapping[int, float] = field(default_factory=dict)
    """By engine, when it begins to serve; others do from the start."""
    deaths: Mapping[int, float] = field(default_factory=dict)
    """By engine, when it dies."""
    now_s: float = 0.0
    answers: dict[int, Answer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.engines = [
            EngineModel(
                f"engine-{number}",
                self._shape_of(number),
                partial(self._first_token, number),
                partial(self._finished, number),
                record_events=self.publishes,
            )
            for number in range(self.engine_count)
        ]
        self._heap: list[tuple[float, int, int, Any]] = []
        self._order = 0
        self._due: list[float | None] = [None] * self.engine_count
        self.serving = [number not in self.joins for number in range(self.engine_count)]
        """Of each engine, whether it may be chosen; gateways are told of changes, too."""
        self._left: dict[int, int] = {}
        """Of requests that follow others, how many of those have not ended."""
        self._followers: dict[int, list[SimulatedRequest]] = {}
        self._follows: Mapping[int, Follow] = {}
        self._arrived = 0
        self.gateways = [self.make_gateway(self) for _ in range(self.gateway_count)]
        self._owner: dict[int, SimulatedGateway] = {}

    def run(self, workload: Workload) -> list[Answer]:
        """All answers, in order of arrival."""
        self._follows = workload.follows
        for request in workload.requests:
            if follow := workload.follows.get(request.number):
                self._left[request.number] = len(follow.numbers)
                for number in follow.numbers:
                    self._followers.setdefault(number, []).append(request)
            else:
                self._push(request.arrival_s, ARRIVAL, request)
        for number, at_s in self.joins.items():
            self.call_at(at_s, partial(self._joins, number))
        for number, at_s in self.deaths.items():
            self.call_at(at_s, partial(self._dies, number))
        while self._heap:
            self.now_s, _, kind, what = heappop(self._heap)
            if kind == PASS:
                self._pass_ends(what)
            elif kind == ARRIVAL:
                self.answers[what.number] = Answer(what)
                self._owner[what.number] = gateway = self.gateways[self._arrived % self.gateway_count]
                self._arrived += 1
                gateway.arrive(what, self.now_s)
            elif kind == NEWS:
                for gateway in self.gateways:
                    engine, events, report = what
                    gateway.news(engine, events, report, self.now_s)
            else:
                what(self.now_s)
        return [self.answers[request.number] for request in workload.requests]

    def send(self, request: SimulatedRequest, engine: int, prefill: int | None = None) -> None:
        """A gateway's decision; `prefill`: another engine that computes its prompt first."""
        answer = self.answers[request.number]
        answer.engine, answer.sent_s, answer.prefill = engine, self.now_s, prefill
        if prefill is None:
            self.engines[engine].add(request, self.now_s)
            self._schedule(engine)
            return
        whole = request.prompt_tokens // self.shape.block_tokens
        only_prompt = replace(request, output_tokens=1, blocks=request.blocks[:whole])
        self.engines[prefill].add(only_prompt, self.now_s)
        self._schedule(prefill)

    def _prefilled(self, engine: int, request: SimulatedRequest, now_s: float, cached_tokens: int) -> None:
        """An engine has computed a prompt for another one; what did not move meanwhile moves now."""
        answer = self.answers[request.number]
        answer.cached_tokens = cached_tokens
        missing = (
            request.prompt_tokens - self.engines[answer.engine].match_blocks(answer.request) * self.shape.block_tokens
        )
        left_s = max(0.0, missing / self.transfer_tokens_per_s - (now_s - answer.sent_s))

        def hand_over(at_s: float) -> None:
            self.engines[answer.engine].add(answer.request, at_s, elsewhere=True)
            self._schedule(answer.engine)

        self.call_at(now_s + left_s + TRANSFER_FIXED_S, hand_over)

    def refuse(self, request: SimulatedRequest, retry_after_s: int) -> None:
        """A gateway's answer where too many wait."""
        answer = self.answers[request.number]
        answer.refused, answer.predicted_wait_s = True, float(retry_after_s)

    def call_at(self, at_s: float, action: Callable[[float], None]) -> None:
        """Wakes a gateway."""
        self._push(at_s, CALL, action)

    def _push(self, at_s: float, kind: int, what: object) -> None:
        self._order += 1
        heappush(self._heap, (at_s, self._order, kind, what))

    def _schedule(self, engine: int) -> None:
        due = self.engines[engine].next_s
        if due is not None and due != self._due[engine]:
            self._due[engine] = due
            self._push(due, PASS, engine)

    def _pass_ends(self, number: int) -> None:
        engine = self.engines[number]
        if self._due[number] != self.now_s:
            return  # the run of decode passes was cut since, or the engine has died
        self._due[number] = None
        engine.wake(self.now_s)
        self._schedule(number)
        if self.publishes:
            self._push(self.now_s + NEWS_DELAY_S, NEWS, (number, engine.take_events(), engine.report(self.now_s)))

    def _first_token(self, engine: int, request: SimulatedRequest, now_s: float) -> None:
        if engine == self.answers[request.number].prefill:
            return  # it is told by the engine that decodes
        answer = self.answers[request.number]
        if answer.first_token_s < 0:  # else its first engine has died since
            answer.first_token_s = now_s
        self._owner[request.number].first_token(request, engine, now_s)

    def _finished(self, engine: int, request: SimulatedRequest, now_s: float, cached_tokens: int) -> None:
        answer = self.answers[request.number]
        if engine == answer.prefill:
            self._prefilled(engine, request, now_s, cached_tokens)
            return
        answer.end_s = now_s
        if answer.prefill is None:
            answer.cached_tokens = cached_tokens
        self._owner[request.number].finished(request, engine, now_s)
        for follower in self._followers.pop(request.number, ()):
            self._left[follower.number] -= 1
            if not self._left[follower.number]:
                at_s = now_s + self._follows[follower.number].pause_s
                self._push(at_s, ARRIVAL, replace(follower, arrival_s=at_s))

    def _shape_of(self, number: int) -> EngineShape:
        if not self.speeds:
            return self.shape
        return replace(self.shape, rates=self.shape.rates.at_speed(self.speeds[number]))

    def _joins(self, number: int, now_s: float) -> None:
        self.serving[number] = True
        for gateway in self.gateways:
            gateway.joined(number, now_s)

    def _dies(self, number: int, now_s: float) -> None:
        self.serving[number], self._due[number] = False, None
        lost = self.engines[number].end()
        for gateway in self.gateways:
            gateway.died(number, [one for one in lost if self._owner[one.number] is gateway], now_s)


PASS, ARRIVAL, NEWS, CALL = range(4)
