"""Scales one service: keeps the planner's memory between samples, and says when a number changes. No I/O."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mini_infer_contract.scaling import EngineLoad, GatewayLoads
from mini_infer_operator.scaling.pair_planner import split_between_roles
from mini_infer_operator.scaling.plan_state import Fleet, Memory, Recommendation
from mini_infer_operator.scaling.planner import DEFAULT_START_S, plan_replicas
from mini_infer_operator.scaling.policy import ScalingPolicy
from mini_infer_operator.scaling.rates import LearnedRates
from mini_infer_operator.scaling.samples import Observed, sample_of

TOKENS_OF_REQUEST = 512


@dataclass(frozen=True, slots=True)
class Change:
    """A number of engines that the planner has changed."""

    role: str
    before: int
    after: int
    why: str

    @property
    def message(self) -> str:
        """The change as a sentence."""
        return f"{self.role} goes from {self.before} to {self.after}: {self.why}"


@dataclass(slots=True)
class ServiceScaler:
    """The planner of one service. `name` is namespace/name."""

    name: str
    decided: dict[str, int] = field(default_factory=dict)
    """The numbers of engines by role."""
    start_s: float = DEFAULT_START_S
    """Seconds of a start, as measured lately."""
    _memory: Memory = field(default_factory=Memory)
    _observed: Observed = field(default_factory=Observed)
    _rates: LearnedRates = field(default_factory=LearnedRates)
    engine_loads: Mapping[str, float] = field(default_factory=dict)
    """The work that each engine still has, in requests, by its name without a namespace."""
    _fleets: Mapping[str, Fleet] = field(default_factory=dict)
    latest: Mapping[str, Recommendation] = field(default_factory=dict)

    def take(
        self,
        policies: Mapping[str, ScalingPolicy],
        fleets: Mapping[str, Fleet],
        reports: Mapping[str, GatewayLoads],
        now_s: float,
        measured_start_s: float | None = None,
        *,
        are_roles_interchangeable: bool = False,
    ) -> list[Change]:
        """Takes the reports of gateways, and returns the numbers that change. `fleets` are the engines by role, whose
        prefill and decode engines may switch if `are_roles_interchangeable`.

        Without a report nothing changes: gateways that cannot be reached are no reason to stop engines.
        """
        self.start_s = measured_start_s or self.start_s
        self._fleets = fleets
        self.decided = {role: self.decided.get(role, fleet.replicas) for role, fleet in fleets.items()}
        percentile = max((policy.targets.percentile for policy in policies.values()), default=0.95)
        found, self._observed = sample_of(self._observed, reports, self.name, now_s, percentile)
        if found is None or not policies:
            return []
        self.engine_loads = {name.rpartition("/")[2]: _load(engine) for name, engine in found.engines.items()}
        rates = self._rates.prefill(found.prefill_tokens_per_s)
        if found.mean_itl_s is not None:
            engines = max(1, sum(fleet.ready for fleet in fleets.values()))
            share = found.sample.prompt_tokens_per_s / rates.rates().prefill_tokens_per_s / engines
            rates = rates.decode(found.rows, found.mean_itl_s, share)
        self._rates = rates
        planned = {role: Fleet(self.decided[role], fleet.ready) for role, fleet in fleets.items()}
        self.latest, self._memory = plan_replicas(
            policies,
            planned,
            found.sample,
            rates.rates(),
            self._memory,
            self.start_s,
            are_roles_interchangeable=are_roles_interchangeable,
        )
        changes = [
            Change(role, self.decided[role], one.replicas, one.why)
            for role, one in self.latest.items()
            if one.replicas != self.decided[role]
        ]
        self.decided |= {change.role: change.after for change in changes}
        return changes

    def split(self, total: int, current: Mapping[str, int], now_s: float) -> dict[str, int]:
        """Returns how many of `total` engines prefill and decode get, if fewer were granted than were decided.

        `current` is what they have been granted so far.
        """
        fleets = {role: Fleet(current[role], fleet.ready) for role, fleet in self._fleets.items()}
        counts, self._memory = split_between_roles(total, self.latest, fleets, self._memory, now_s)
        return counts


def _load(engine: EngineLoad) -> float:
    """Returns an engine's load in requests, of which one has `TOKENS_OF_REQUEST` waiting prompt tokens."""
    return engine.running + engine.queued_tokens / TOKENS_OF_REQUEST
