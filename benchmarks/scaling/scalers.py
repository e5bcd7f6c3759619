"""Autoscalers: ours by the real planner, the rules of three others, and an oracle that knows the load.

- HPA: https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale: every 15 s, ceil(replicas x metric /
  target), a tolerance of 0.1, a down window of 300 s, at most doubling or four engines in 15 s, and engines that are
  not ready count as using nothing while it scales up.
- KEDA: its HPA with an external metric of type AverageValue: ceil(metric / threshold), otherwise as above; the metric
  is read every 30 s.
- llm-d's workload-variant-autoscaler, saturation rule V1: engines below KV 0.80 and queue 5 are not saturated; one more
  engine if their mean spare KV is below 0.1 or their mean spare queue below 3, unless engines are still starting; one
  fewer if the load of all, on one fewer, leaves both spares. Usage and queue are the greatest of a minute.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

from benchmarks.routing.workload import SimulatedRequest
from benchmarks.scaling.fleet import TICK_S, Setup, View
from mini_infer_operator.scaling.plan_state import Fleet, Memory
from mini_infer_operator.scaling.planner import plan_replicas
from mini_infer_operator.scaling.policy import ScalingPolicy, Targets, Windows
from mini_infer_operator.scaling.signals import EngineRates

TOLERANCE, DOWN_WINDOW_S, HPA_EVERY_S = 0.1, 300.0, 15.0


@dataclass
class Planner:
    """The planner of the operator."""

    setup: Setup
    percentile: float = 0.95
    every_s: float = TICK_S
    down_s: float | None = None
    memory: Memory = field(default_factory=Memory)

    def __post_init__(self) -> None:
        targets = Targets(self.setup.ttft_s, self.setup.itl_s, self.percentile, 0.85 * self.setup.cache_tokens)
        self._policy = ScalingPolicy(1, self.setup.most, targets, Windows(down_s=self.down_s))

    def desired(self, view: View) -> int:
        """Returns what the planner recommends."""
        fleets = {"unified": Fleet(view.replicas, view.ready)}
        found, self.memory = plan_replicas(
            {"unified": self._policy}, fleets, view.sample, view.rates, self.memory, self.setup.start_s
        )
        return found["unified"].replicas


@dataclass
class Hpa:
    """A HorizontalPodAutoscaler on waiting requests of pods, or, with `whole`, on a sum over the service (KEDA)."""

    target: float
    whole: bool = False
    every_s: float = HPA_EVERY_S
    _past: deque[tuple[float, int]] = field(default_factory=deque)
    _metric: tuple[float, float] = (-1e9, 0.0)

    def desired(self, view: View) -> int:
        """Returns the replicas by the HPA's rule."""
        current = max(1, view.replicas)
        wanted = self._by_sum(view, current) if self.whole else self._by_pods(view, current)
        wanted = max(1, min(wanted, max(2 * current, current + 4)))
        self._past.append((view.now_s, wanted))
        while self._past[0][0] < view.now_s - DOWN_WINDOW_S:
            self._past.popleft()
        return wanted if wanted >= current else min(current, max(past for _, past in self._past))

    def _by_sum(self, view: View, current: int) -> int:
        if view.now_s - self._metric[0] >= 30.0:
            self._metric = view.now_s, float(view.running + view.queued)
        ratio = self._metric[1] / self.target / current
        return current if abs(ratio - 1) <= TOLERANCE else ceil(self._metric[1] / self.target)

    def _by_pods(self, view: View, current: int) -> int:
        if not view.ready:
            return current
        ratio = view.queued / view.ready / self.target
        if abs(ratio - 1) <= TOLERANCE:
            return current
        if ratio > 1 and view.ready < current:
            ratio = view.queued / current / self.target  # engines that start use nothing yet
            return current if ratio <= 1 + TOLERANCE else ceil(ratio * current)
        return ceil(ratio * view.ready)


@dataclass
class Saturation:
    """llm-d's rule."""

    kv_spare: float = 0.1
    queue_spare: float = 3.0
    every_s: float = 30.0
    _past: deque[tuple[float, Sequence[float], Sequence[int]]] = field(default_factory=deque)

    def desired(self, view: View) -> int:
        """Returns one engine more or fewer, or as many."""
        self._past.append((view.now_s, view.kv_usage, view.waiting))
        while self._past[0][0] < view.now_s - 60.0:
            self._past.popleft()
        ready = view.ready
        usage = [max(row[1][i] if i < len(row[1]) else 0.0 for row in self._past) for i in range(ready)]
        waiting = [max(row[2][i] if i < len(row[2]) else 0 for row in self._past) for i in range(ready)]
        free = [i for i in range(ready) if usage[i] < 0.8 and waiting[i] < 5]
        starting = view.replicas > ready
        if not free:
            return view.replicas + (not starting)
        kv = sum(0.8 - usage[i] for i in free) / len(free)
        queue = sum(5 - waiting[i] for i in free) / len(free)
        if kv < self.kv_spare or queue < self.queue_spare:
            return view.replicas + (not starting)
        if ready < 2 or starting:
            return view.replicas
        kv_after = 0.8 - sum(usage) / (ready - 1)
        queue_after = 5 - sum(waiting) / (ready - 1)
        return view.replicas - (kv_after >= self.kv_spare and queue_after >= self.queue_spare)


@dataclass
class Oracle:
    """Knows every arrival: the engines that the next seconds need at a utilisation, started in time."""

    setup: Setup
    requests: Sequence[SimulatedRequest]
    load: float
    rates: EngineRates
    cached: float = 0.0
    """The share of prompt tokens that is cached."""
    is_warned: bool = True
    """False: it knows the load until this moment, the most that can be known of what nothing announces."""
    every_s: float = TICK_S

    def __post_init__(self) -> None:
        steps = ceil(self.requests[-1].arrival_s / TICK_S) + 1
        work = [0.0] * steps
        for request in self.requests:
            prompt_s = request.prompt_tokens * (1 - self.cached) / self.rates.prefill_tokens_per_s
            work[int(request.arrival_s / TICK_S)] += (prompt_s + request.output_tokens * self.rates.row_s) / TICK_S
        self._work = [sum(work[max(0, i - 1) : i + 2]) / len(work[max(0, i - 1) : i + 2]) for i in range(steps)]

    def desired(self, view: View) -> int:
        """Returns the engines for the busiest moment within two starts: those to come, or unwarned the last ones."""
        now, span = int(view.now_s / TICK_S), round(2 * self.setup.start_s / TICK_S)
        moments = self._work[now : now + span + 1] if self.is_warned else self._work[max(0, now - span) : now + 1]
        return max(1, ceil(max(moments, default=0.0) / self.load))


@dataclass
class Fixed:
    """Keeps as many engines all the time."""

    count: int
    every_s: float = 60.0

    def desired(self, view: View) -> int:
        """Returns the number."""
        return self.count
