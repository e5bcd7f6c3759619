"""A fleet of modelled engines whose number an autoscaler changes: starts take time, and engines that go finish first.

Requests go to the engine with the fewest prompt tokens to compute, cached ones left out, and wait at the gateway while
none has room. Knows no autoscaler's rule.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, Protocol

from benchmarks.routing.engine_model import EngineModel, EngineShape
from benchmarks.routing.rates import PassRates
from benchmarks.routing.workload import SimulatedRequest
from benchmarks.scaling.loads import BLOCK_TOKENS
from benchmarks.scaling.meter import Meter, MeteredRates
from mini_infer_operator.scaling.signals import EngineRates, Sample

ROOM_TOKENS = 4096
"""Prompt tokens below which an engine gets another request."""
TOKEN_BUDGET = 1024
"""Tokens of one pass, so that prompts delay the tokens of others by little more than the target."""
TICK_S = 5.0
"""Seconds between two samples."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The engines, targets and times that all runs have in common."""

    rates: PassRates
    cache_tokens: int = 400_000
    start_s: float = 25.0
    """Seconds from the decision to the first request: scheduling, weights, graphs."""
    most: int = 24
    ttft_s: float = 3.0
    itl_s: float = 0.1


@dataclass(frozen=True, slots=True)
class View:
    """The figures that an autoscaler may know."""

    now_s: float
    replicas: int
    ready: int
    waiting: Sequence[int]
    """Requests that wait, by ready engine; those of the gateway in equal parts."""
    kv_usage: Sequence[float]
    running: int
    queued: int
    """Requests that wait, at the gateway and in engines."""
    sample: Sample
    rates: EngineRates


class Scaler(Protocol):
    """An autoscaler. `every_s` is its period."""

    every_s: float

    def desired(self, view: View) -> int:
        """Returns the number of engines that should exist."""


@dataclass(slots=True)
class Outcome:
    """One run."""

    requests: int
    kept: int
    """Requests that kept both targets."""
    gpu_hours: float
    turns: int
    """Changes of direction: from more engines to fewer, or back."""
    changes: int
    most: int
    sizes: list[tuple[float, int]] = field(default_factory=list)

    @property
    def attainment(self) -> float:
        """The share of requests that kept both targets."""
        return self.kept / self.requests


@dataclass(slots=True)
class _Member:
    engine: EngineModel
    begun_s: float
    ready: bool = False
    leaving: bool = False
    gone: bool = False
    due: float | None = None


class ScaledFleet:
    """One run of one load with one autoscaler."""

    def __init__(self, setup: Setup, scaler: Scaler, first: int) -> None:
        self._setup, self._scaler = setup, scaler
        self._meter = Meter()
        rates = setup.rates
        metered = MeteredRates(
            rates.weights_ms, rates.token_ms, rates.row_ms, rates.kv_token_ms, rates.pair_ms, self._meter
        )
        self._shape = EngineShape(setup.cache_tokens // BLOCK_TOKENS, BLOCK_TOKENS, metered, token_budget=TOKEN_BUDGET)
        self._members: list[_Member] = []
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0
        self._queue: deque[SimulatedRequest] = deque()
        self._gpu_s = 0.0
        self._first_s: dict[int, float] = {}
        self._open = 0
        self._arrived: list[int] = []
        self._ttfts: list[float] = []
        self._outputs = (50.0, 0.25)
        self._prompts = self._hits = 0
        self._directions: list[int] = []
        self._sampled_s = 0.0
        self._sample = Sample(0.0)
        self._scaled_s = -1e9
        self._last_s = 0.0
        self.outcome = Outcome(0, 0, 0.0, 0, 0, first)
        for _ in range(first):
            self._start(0.0, ready=True)

    def run(self, requests: Sequence[SimulatedRequest]) -> Outcome:
        """Returns what became of all requests."""
        self.outcome.requests = self._open = len(requests)
        for request in requests:
            self._push(request.arrival_s, self._arrive, request)
        self._last_s = requests[-1].arrival_s
        self._push(TICK_S, self._tick)
        now_s = 0.0
        while self._heap and (self._open or now_s < self._last_s):
            now_s, _, action, what = heappop(self._heap)
            action(now_s, *what)
        for member in self._members:
            if not member.gone:
                self._gpu_s += max(0.0, self._last_s - member.begun_s)
        self.outcome.gpu_hours = self._gpu_s / 3600
        turns = [a for a, b in zip(self._directions, self._directions[1:], strict=False) if a != b]
        self.outcome.turns, self.outcome.changes = len(turns), len(self._directions)
        return self.outcome

    @property
    def measured_rates(self) -> EngineRates:
        """The rates of its engines."""
        return self._meter.rates()

    @property
    def cached_share(self) -> float:
        """The share of prompt tokens that some engine had cached."""
        return self._hits / max(1, self._prompts)

    def _push(self, at_s: float, action: Callable[..., None], *what: Any) -> None:
        self._order += 1
        heappush(self._heap, (at_s, self._order, action, what))

    # Requests.

    def _arrive(self, now_s: float, request: SimulatedRequest) -> None:
        self._queue.append(request)
        ready = [member for member in self._members if member.ready]
        hit = max((member.engine.match_blocks(request) for member in ready), default=0)
        self._arrived.append(request.prompt_tokens - hit * BLOCK_TOKENS)
        self._prompts, self._hits = self._prompts + request.prompt_tokens, self._hits + hit * BLOCK_TOKENS
        self._pump(now_s)

    def _pump(self, now_s: float) -> None:
        while self._queue:
            request = self._queue[0]
            best, best_cost = None, 0.0
            for member in self._members:
                engine = member.engine
                if not member.ready or member.leaving or len(engine.running) + len(engine.waiting) >= 256:
                    continue
                queued = engine.queued_tokens()
                if queued >= ROOM_TOKENS:
                    continue
                uncached = request.prompt_tokens - engine.match_blocks(request) * BLOCK_TOKENS
                cost = float(uncached + queued + 8 * engine.decode_rows)
                if best is None or cost < best_cost:
                    best, best_cost = member, cost
            if best is None:
                return
            self._queue.popleft()
            best.engine.add(request, now_s)
            self._schedule(best)

    def _schedule(self, member: _Member) -> None:
        due = member.engine.next_s
        if due is not None and due != member.due:
            member.due = due
            self._push(due, self._pass_ends, member)

    def _pass_ends(self, now_s: float, member: _Member) -> None:
        if member.due != now_s or member.gone:
            return
        member.due = None
        member.engine.wake(now_s)
        self._schedule(member)
        if member.leaving:
            self._leave_if_idle(now_s, member)
        self._pump(now_s)

    def _first_token(self, request: SimulatedRequest, now_s: float) -> None:
        if request.number not in self._first_s:
            self._first_s[request.number] = now_s
            self._ttfts.append(now_s - request.arrival_s)

    def _finished(self, request: SimulatedRequest, now_s: float, cached_tokens: int) -> None:
        self._open -= 1
        ttft_s = self._first_s[request.number] - request.arrival_s
        itl_s = (now_s - self._first_s[request.number]) / max(1, request.output_tokens - 1)
        total, count = self._outputs
        self._outputs = 0.995 * total + request.output_tokens, 0.995 * count + 1
        self.outcome.kept += ttft_s <= self._setup.ttft_s and itl_s <= self._setup.itl_s

    # Engines.

    def _start(self, now_s: float, *, ready: bool = False) -> None:
        engine = EngineModel("", self._shape, self._first_token, self._finished, record_events=False)
        member = _Member(engine, now_s, ready)
        self._members.append(member)
        if not ready:
            self._push(now_s + self._setup.start_s, self._is_ready, member)

    def _is_ready(self, now_s: float, member: _Member) -> None:
        if not member.gone:
            member.ready = True
            self._pump(now_s)

    def _leave_if_idle(self, now_s: float, member: _Member) -> None:
        if not member.engine.running and not member.engine.waiting:
            member.gone = True
            self._gpu_s += max(0.0, min(now_s, self._last_s) - member.begun_s)
            self._members.remove(member)

    def _scale(self, now_s: float, desired: int) -> None:
        staying = [member for member in self._members if not member.leaving]
        if desired == len(staying):
            return
        self._directions.append(1 if desired > len(staying) else -1)
        self.outcome.sizes.append((round(now_s), desired))
        self.outcome.most = max(self.outcome.most, desired)
        missing = desired - len(staying)
        for member in [member for member in self._members if member.leaving][: max(0, missing)]:
            member.leaving, missing = False, missing - 1  # an engine that drains is taken back
        for _ in range(missing):
            self._start(now_s)
        surplus = sorted(staying, key=lambda m: (m.ready, len(m.engine.running) + len(m.engine.waiting)))
        for member in surplus[: max(0, -missing)]:
            member.leaving = True
            self._leave_if_idle(now_s, member)

    def _tick(self, now_s: float) -> None:
        self._take_sample(now_s)
        if now_s - self._scaled_s >= self._scaler.every_s - 1e-6:
            self._scaled_s = now_s
            view = self._view(now_s)
            self._scale(now_s, max(0, min(self._setup.most, self._scaler.desired(view))))
            self._pump(now_s)
        if now_s < self._last_s or self._open:
            self._push(now_s + TICK_S, self._tick)

    def _take_sample(self, now_s: float) -> None:
        seconds, self._sampled_s = now_s - self._sampled_s, now_s
        count, prompt = len(self._arrived), sum(self._arrived)
        engines = [member.engine for member in self._members if member.ready]
        mean_output = self._outputs[0] / self._outputs[1]
        self._sample = Sample(
            at_s=now_s,
            prompt_tokens_per_s=prompt / seconds,
            output_tokens_per_s=count * mean_output / seconds,
            requests_per_s=count / seconds,
            queued_tokens=sum(r.prompt_tokens for r in self._queue) + sum(e.queued_tokens() for e in engines),
            queued_requests=len(self._queue),
            running_requests=sum(len(engine.running) + len(engine.waiting) for engine in engines),
            tokens_in_flight=float(sum(engine.kv_tokens for engine in engines)),
            ttft_s=_percentile(self._ttfts),
            itl_s=_mean_gap([gap for engine in engines for gap in engine.gaps]),
        )
        self._arrived, self._ttfts = [], []
        for engine in engines:
            engine.gaps.clear()

    def _view(self, now_s: float) -> View:
        staying = [member for member in self._members if not member.leaving]
        ready = [member.engine for member in staying if member.ready]
        reports = [engine.report(now_s) for engine in ready]
        share = len(self._queue) // max(1, len(ready))
        return View(
            now_s,
            len(staying),
            len(ready),
            [report.waiting + share for report in reports],
            [report.kv_usage for report in reports],
            sum(report.running for report in reports),
            len(self._queue) + sum(report.waiting for report in reports),
            self._sample,
            self._meter.rates(),
        )


def _percentile(values: list[float], share: float = 0.95) -> float | None:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else None


def _mean_gap(gaps: list[tuple[float, int]]) -> float | None:
    tokens = sum(count for _, count in gaps)
    return sum(seconds * count for seconds, count in gaps) / tokens if tokens else None
