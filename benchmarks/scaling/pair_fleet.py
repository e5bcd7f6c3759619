"""A fleet of modelled engines that are prefill or decode engines, and may start, stop and switch. Knows no rule.

A prompt is computed by the prefill engine with the fewest tokens to compute; its pages then move, and the decode engine
with the fewest rows takes it. An engine that switches finishes what it has, beside its new work.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from typing import Any, Protocol

from benchmarks.routing.engine_model import EngineModel, EngineShape
from benchmarks.routing.workload import SimulatedRequest
from benchmarks.routing.world import TRANSFER_FIXED_S
from benchmarks.scaling.fleet import ROOM_TOKENS, TOKEN_BUDGET, Setup
from benchmarks.scaling.loads import BLOCK_TOKENS
from benchmarks.scaling.meter import Meter, MeteredRates
from mini_infer_operator.scaling.plan_state import DECODE, PREFILL, Fleet
from mini_infer_operator.scaling.signals import EngineRates, Sample

TRANSFER_TOKENS_PER_S = 1e5
"""Tokens of KV cache that move in a second: a tenth of what `benchmarks.routing` assumes, as engines are, too."""
TICK_S = 1.0
"""Seconds between two samples, as the operator reads them."""
SAMPLES_OF_LATENCY = 5


class Splitter(Protocol):
    """Decides which engines have which role."""

    def split(self, sample: Sample, rates: EngineRates, fleets: Mapping[str, Fleet]) -> Mapping[str, int]:
        """Returns how many prefill and decode engines there shall be."""


@dataclass(slots=True)
class PairOutcome:
    """One run."""

    requests: int
    kept: int = 0
    """Requests that kept both targets."""
    kept_ttft: int = 0
    kept_itl: int = 0
    switches: int = 0
    gpu_hours: float = 0.0

    @property
    def attainment(self) -> float:
        """The share of requests that kept both targets."""
        return self.kept / self.requests


@dataclass(slots=True)
class _Member:
    engine: EngineModel
    role: str
    begun_s: float = 0.0
    ready: bool = True
    leaving: bool = False
    due: float | None = None

    @property
    def load(self) -> float:
        """The work that it still has, in requests."""
        return len(self.engine.running) + len(self.engine.waiting) + self.engine.queued_tokens() / 512


@dataclass(slots=True)
class _Since:
    """Counts since the last sample."""

    prompt_tokens: list[int] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)


class PairFleet:
    """One run of one load with one splitter."""

    def __init__(self, setup: Setup, splitter: Splitter, prefill: int, decode: int) -> None:
        self._setup, self._splitter, self._meter = setup, splitter, Meter()
        rates = setup.rates
        metered = MeteredRates(
            rates.weights_ms, rates.token_ms, rates.row_ms, rates.kv_token_ms, rates.pair_ms, self._meter
        )
        self._shape = EngineShape(setup.cache_tokens // BLOCK_TOKENS, BLOCK_TOKENS, metered, token_budget=TOKEN_BUDGET)
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()
        self._queue: deque[SimulatedRequest] = deque()
        self._first_s: dict[int, float] = {}
        self._whole: dict[int, SimulatedRequest] = {}
        self._since, self._outputs, self._open, self._moving = _Since(), (50.0, 0.25), 0, 0
        roles = [PREFILL] * prefill + [DECODE] * decode
        self._members = [_Member(self._engine(), role) for role in roles]
        self._gpu_s, self._last_s = 0.0, 0.0
        self.outcome = PairOutcome(0)

    def run(self, requests: Sequence[SimulatedRequest]) -> PairOutcome:
        """Returns what became of all requests."""
        self.outcome.requests = self._open = len(requests)
        for request in requests:
            self._push(request.arrival_s, self._arrive, request)
        self._last_s = requests[-1].arrival_s
        self._push(TICK_S, self._tick)
        while self._heap and self._open:
            now_s, _, action, what = heappop(self._heap)
            action(now_s, *what)
        self._gpu_s += sum(max(0.0, self._last_s - member.begun_s) for member in self._members)
        self.outcome.gpu_hours = self._gpu_s / 3600
        return self.outcome

    def _push(self, at_s: float, action: Callable[..., None], *what: Any) -> None:
        heappush(self._heap, (at_s, next(self._order), action, what))

    def _engine(self) -> EngineModel:
        return EngineModel("", self._shape, self._first_token, self._finished, record_events=False)

    def _of(self, role: str) -> list[_Member]:
        return [m for m in self._members if m.role == role and m.ready and not m.leaving]

    # Requests.

    def _arrive(self, now_s: float, request: SimulatedRequest) -> None:
        self._whole[request.number] = request
        self._queue.append(request)
        hit = max((member.engine.match_blocks(request) for member in self._members), default=0)
        self._since.prompt_tokens.append(request.prompt_tokens - hit * BLOCK_TOKENS)
        self._pump(now_s)

    def _pump(self, now_s: float) -> None:
        prefill = self._of(PREFILL)
        while self._queue and prefill:
            request = self._queue[0]
            free = [member for member in prefill if member.engine.queued_tokens() < ROOM_TOKENS]
            if not free:
                return
            self._queue.popleft()
            best = min(
                free,
                key=lambda member: member.engine.queued_tokens() - member.engine.match_blocks(request) * BLOCK_TOKENS,
            )
            best.engine.add(replace(request, output_tokens=1), now_s)
            self._schedule(best)

    def _first_token(self, request: SimulatedRequest, now_s: float) -> None:
        """Counts the first token where its client gets it: at the decode engine."""
        if request.output_tokens == self._whole[request.number].output_tokens:
            self._first_s.setdefault(request.number, now_s)
            self._since.ttfts.append(now_s - request.arrival_s)

    def _finished(self, request: SimulatedRequest, now_s: float, cached_tokens: int) -> None:
        whole = self._whole[request.number]
        if request.output_tokens < whole.output_tokens:
            self._moving += 1
            seconds = TRANSFER_FIXED_S + (whole.prompt_tokens % BLOCK_TOKENS) / TRANSFER_TOKENS_PER_S
            self._push(now_s + seconds, self._decode, whole)  # other blocks moved while the next ones were computed
            return
        self._open -= 1
        first_s = self._first_s[request.number]
        ttft_s, itl_s = first_s - whole.arrival_s, (now_s - first_s) / max(1, whole.output_tokens - 1)
        total, answers = self._outputs
        self._outputs = 0.995 * total + whole.output_tokens, 0.995 * answers + 1
        is_early, is_even = ttft_s <= self._setup.ttft_s, itl_s <= self._setup.itl_s
        self.outcome.kept += is_early and is_even
        self.outcome.kept_ttft += is_early
        self.outcome.kept_itl += is_even

    def _decode(self, now_s: float, request: SimulatedRequest) -> None:
        decode = self._of(DECODE)
        if not decode:  # the last one has just switched, and the next one starts
            self._push(now_s + TICK_S, self._decode, request)
            return
        self._moving -= 1
        best = min(decode, key=lambda member: len(member.engine.running) + len(member.engine.waiting))
        best.engine.add(request, now_s, elsewhere=True)
        self._schedule(best)

    def _schedule(self, member: _Member) -> None:
        due = member.engine.next_s
        if due is not None and due != member.due:
            member.due = due
            self._push(due, self._pass_ends, member)

    def _pass_ends(self, now_s: float, member: _Member) -> None:
        if member.due == now_s:
            member.due = None
            member.engine.wake(now_s)
            self._schedule(member)
            if member.leaving:
                self._leave_if_idle(now_s, member)
            self._pump(now_s)

    # Roles.

    def _tick(self, now_s: float) -> None:
        sample = self._sample(now_s)
        staying = {role: [m for m in self._members if m.role == role and not m.leaving] for role in (PREFILL, DECODE)}
        fleets = {role: Fleet(len(mine), sum(member.ready for member in mine)) for role, mine in staying.items()}
        wanted = self._splitter.split(sample, self._meter.rates(), fleets)
        missing = {role: wanted[role] - len(mine) for role, mine in staying.items()}
        taker, giver = sorted(missing, key=lambda role: -missing[role])
        count = max(0, min(missing[taker], -missing[giver]))
        for member in sorted(staying[giver], key=lambda m: (not m.ready, m.load))[:count]:
            member.role = taker
            self.outcome.switches += 1
        for role in (PREFILL, DECODE):
            self._resize(now_s, role, wanted[role])
        self._pump(now_s)
        self._push(now_s + TICK_S, self._tick)

    def _resize(self, now_s: float, role: str, wanted: int) -> None:
        """Starts what is missing, and lets what is too many finish."""
        staying = [member for member in self._members if member.role == role and not member.leaving]
        for _ in range(wanted - len(staying)):
            member = _Member(self._engine(), role, now_s, ready=False)
            self._members.append(member)
            self._push(now_s + self._setup.start_s, self._is_ready, member)
        for member in sorted(staying, key=lambda m: (m.ready, m.load))[: max(0, len(staying) - wanted)]:
            member.leaving = True
            self._leave_if_idle(now_s, member)

    def _is_ready(self, now_s: float, member: _Member) -> None:
        member.ready = True
        self._pump(now_s)

    def _leave_if_idle(self, now_s: float, member: _Member) -> None:
        if not member.engine.running and not member.engine.waiting and member in self._members:
            self._members.remove(member)
            self._gpu_s += max(0.0, min(now_s, self._last_s) - member.begun_s)

    def _sample(self, now_s: float) -> Sample:
        since, self._since = self._since, _Since()
        engines = [member.engine for member in self._members]
        mean_output, arrived = self._outputs[0] / self._outputs[1], len(since.prompt_tokens)
        gaps = [gap for engine in engines for gap in engine.gaps]
        for engine in engines:
            engine.gaps.clear()
        tokens = sum(number for _, number in gaps)
        return Sample(
            at_s=now_s,
            prompt_tokens_per_s=sum(since.prompt_tokens) / TICK_S,
            output_tokens_per_s=arrived * mean_output / TICK_S,
            requests_per_s=arrived / TICK_S,
            queued_tokens=float(sum(r.prompt_tokens for r in self._queue) + sum(e.queued_tokens() for e in engines)),
            queued_requests=len(self._queue),
            running_requests=self._moving + sum(len(engine.running) + len(engine.waiting) for engine in engines),
            tokens_in_flight=float(sum(engine.kv_tokens for engine in engines)),
            ttft_s=max(since.ttfts, default=None),
            itl_s=sum(seconds * number for seconds, number in gaps) / tokens if tokens else None,
        )
