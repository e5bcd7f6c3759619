"""Plans the replicas of the roles of one service. Pure: all that it remembers is in the `Memory` that it returns.

The stages: work that arrives (demand.py) and its forecast for the time of a start (forecast.py) give the engines that
keep the targets; what waits and what is in flight may need more; the latency that was observed corrects the model; and
windows let the number change only if it was needed, or not needed, for long enough.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil, exp

from mini_infer_operator.scaling.demand import backlog_engines, memory_engines, rows_engines, utilisation, work_of
from mini_infer_operator.scaling.forecast import NO_HISTORY, History, level, margin, recent, steady
from mini_infer_operator.scaling.policy import ScalingPolicy, Targets, Windows
from mini_infer_operator.scaling.role_split import Part, split
from mini_infer_operator.scaling.signals import EngineRates, Sample

UP_HYSTERESIS, DOWN_HYSTERESIS = 0.1, 0.3
"""Parts of an engine: the need must exceed the engines by the first before one is added, and must leave as much as the
second free on one fewer before one is removed.
"""
REGRET_WINDOWS, CALM_WINDOWS, MOST_PATIENCE = 5.0, 10.0, 3.0
"""An engine that is needed again within so many windows after one was removed doubles the window; so many windows
without a removal halve it. The last is the greatest factor.
"""
CORRECTION_UP, CORRECTION_DOWN, MOST_CORRECTION = 1.02, 0.995, 1.5
"""Factors on the work for each sample that missed a target though the model expected none, and for each that did not;
and the greatest one.
"""
LEAST_STARTING, STARTING_PER_READY = 4, 2
"""Engines that may be starting at a time: the first, or the second for each ready one if that is more. Engines that
never become ready cost no more than these.
"""
FORECAST_SLACK = 5.0
"""The forecast may be exceeded this many times as often as requests may miss their targets: what exceeds it lasts a
part of a start, and engines are whole and stay for a window. Measured by benchmarks/autoscaling.py.
"""
DEFAULT_START_S = 30.0
"""Seconds of a start until one was measured."""
SWITCH_EVERY_S = 5.0
"""Seconds between two switches of roles: the effect of one shows in the next samples."""
PREFILL, DECODE, PAIR = "prefill", "decode", "prefill+decode"


@dataclass(frozen=True, slots=True)
class Fleet:
    """The engines of one role now."""

    replicas: int
    """Engines that exist or are being started."""
    ready: int


@dataclass(frozen=True, slots=True)
class RoleMemory:
    """The memory of the planner of one role."""

    history: History = NO_HISTORY
    ahead: float = 0.0
    """The forecast's margin by this history."""
    needs: tuple[tuple[float, float, float], ...] = ()
    """Times of the past, the engines needed then, and those without short peaks, the latest last."""
    correction: float = 1.0
    patience: float = 1.0
    """The factor on the window in which no engine is removed after some were added."""
    removed_s: float | None = None
    """The time at which engines were last removed, or the patience last shrank."""
    added_s: float | None = None
    """The time at which engines were last added: for a window from then, none is removed."""
    seen_since_s: float | None = None
    """The time of the first sample: before a whole window has passed, no engine is removed."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of the planner of one service. A new operator begins with an empty one, and removes no engine until
    it has seen a whole window.
    """

    roles: Mapping[str, RoleMemory] = field(default_factory=dict)
    busy_s: float | None = None
    """The time of the latest sample that was not idle."""
    prompt_tokens: float = 0.0
    """The mean number of uncached tokens of a prompt."""
    request_work: float = 0.0
    """The work of one request a second."""
    sampled_s: float | None = None
    """The time of the latest sample."""
    answer_s: float = 0.0
    """The mean seconds for which a request is decoded."""
    output_tokens_per_s: float = 0.0
    """The rate at which output tokens are computed."""
    switched_s: float | None = None
    """The time at which engines last switched between prefill and decode."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The replicas of one role, with the reason."""

    replicas: int
    needed: float
    """Engines that the load needs, before windows and bounds."""
    why: str
    bounds: tuple[int, int] = (0, 0)
    """The fewest and the most engines of the role now."""


def plan_replicas(
    policies: Mapping[str, ScalingPolicy],
    fleets: Mapping[str, Fleet],
    sample: Sample,
    rates: EngineRates,
    memory: Memory,
    start_s: float = DEFAULT_START_S,
    *,
    are_roles_interchangeable: bool = False,
) -> tuple[dict[str, Recommendation], Memory]:
    """Returns the replicas of each role that has a policy, and what to remember until the next sample.

    `start_s` is the time that a start of this service's engines takes, as measured. With `are_roles_interchangeable`
    prefill and decode are planned as one number of engines, which then is split between them.
    """
    memory = _observed(memory, sample, rates)
    sample, memory = _spread(sample, rates, memory)
    if any(fleet.replicas and not fleet.ready for fleet in fleets.values()):
        memory = replace(memory, busy_s=sample.at_s)  # an engine that nobody could use yet is not idle
    found: dict[str, Recommendation] = {}
    roles: dict[str, RoleMemory] = {}
    if are_roles_interchangeable and {PREFILL, DECODE} <= policies.keys():
        return _plan_pair(policies, fleets, sample, rates, memory, start_s)
    for role, policy in policies.items():
        fleet = fleets.get(role, Fleet(0, 0))
        past = memory.roles.get(role, RoleMemory())
        found[role], roles[role] = _plan_role(role, policy, fleet, sample, rates, memory, past, start_s)
    return found, replace(memory, roles=roles)


def _observed(memory: Memory, sample: Sample, rates: EngineRates) -> Memory:
    """Returns the memory with what the sample says about requests."""
    first = memory.busy_s is None
    busy_s = sample.at_s if first or not sample.is_idle else memory.busy_s
    if not sample.requests_per_s:
        return replace(memory, busy_s=busy_s)
    prompt = sample.prompt_tokens_per_s / sample.requests_per_s
    work = work_of(sample, rates).of("unified") / sample.requests_per_s
    weight = 1.0 if not memory.request_work else 0.05
    return replace(
        memory,
        busy_s=busy_s,
        prompt_tokens=memory.prompt_tokens + weight * (prompt - memory.prompt_tokens),
        request_work=memory.request_work + weight * (work - memory.request_work),
    )


def _spread(sample: Sample, rates: EngineRates, memory: Memory) -> tuple[Sample, Memory]:
    """Returns the sample with output tokens at the rate at which they are computed.

    A request that arrives is decoded over the seconds of its answer. Counted all at once, the answers of requests that
    come together would look like a peak of work that never is.
    """
    if sample.requests_per_s:
        tokens = sample.output_tokens_per_s / sample.requests_per_s
        weight = 1.0 if not memory.answer_s else 0.05
        answer_s = memory.answer_s + weight * (tokens * (sample.itl_s or rates.pass_s) - memory.answer_s)
        memory = replace(memory, answer_s=answer_s)
    seconds = sample.at_s - memory.sampled_s if memory.sampled_s is not None else 0.0
    share = 1.0 - exp(-seconds / memory.answer_s) if memory.answer_s and seconds > 0 else 0.0
    rate = memory.output_tokens_per_s + share * (sample.output_tokens_per_s - memory.output_tokens_per_s)
    memory = replace(memory, sampled_s=sample.at_s, output_tokens_per_s=rate)
    return replace(sample, output_tokens_per_s=rate), memory


def _plan_role(
    role: str,
    policy: ScalingPolicy,
    fleet: Fleet,
    sample: Sample,
    rates: EngineRates,
    memory: Memory,
    past: RoleMemory,
    start_s: float,
) -> tuple[Recommendation, RoleMemory]:
    targets, work = policy.targets, work_of(sample, rates)
    history = past.history.add(sample.at_s, work.of(role))
    most = utilisation(role, targets, rates, memory.prompt_tokens)
    now = level(history, memory.request_work)
    percentile = max(0.5, 1 - FORECAST_SLACK * (1 - targets.percentile))
    is_same = history.values is past.history.values  # the margin takes a while to compute, and changes only with these
    ahead = past.ahead if is_same else margin(history, start_s, percentile, memory.request_work)
    backlog = backlog_engines(role, sample, targets, rates, fleet.ready, start_s)
    is_calm = not backlog and fleet.ready >= max([fleet.replicas, *(need for _, need, _ in past.needs)])
    correction = _corrected(past.correction, role, sample, targets, is_calm=is_calm)
    busy = correction * max(now, steady(history) + ahead) / most
    in_flight = 0.0 if role == "prefill" else memory_engines(sample, targets)
    rows = 0.0 if role == "prefill" else rows_engines(sample, targets, rates, memory.prompt_tokens)
    if role == "unified":
        rows += work.prefill
    needed = max(busy + backlog, in_flight, rows)
    lasting = max(correction * (steady(history) + ahead) / most + backlog, in_flight)
    replicas, after = _settled(policy, fleet, (needed, lasting), sample, memory, past, start_s)
    why = _why(now, ahead, backlog, in_flight, most, correction, sample, start_s)
    after = replace(after, history=history, ahead=ahead, correction=correction)
    return Recommendation(replicas, needed, why, (_least(policy, sample, memory), policy.max_replicas)), after


def _plan_pair(
    policies: Mapping[str, ScalingPolicy],
    fleets: Mapping[str, Fleet],
    sample: Sample,
    rates: EngineRates,
    memory: Memory,
    start_s: float,
) -> tuple[dict[str, Recommendation], Memory]:
    """Plans prefill and decode engines that can take each other's role: their sum as one role's number, with one
    forecast, and then its split by what each needs now.
    """
    work, needs, roles, most = work_of(sample, rates), dict[str, float](), dict[str, RoleMemory](), dict[str, float]()
    pair, lasting = {role: fleets.get(role, Fleet(0, 0)) for role in (PREFILL, DECODE)}, dict[str, float]()
    for role in (PREFILL, DECODE):
        targets, past = policies[role].targets, memory.roles.get(role, RoleMemory())
        most[role] = utilisation(role, targets, rates, memory.prompt_tokens)
        history = past.history.add(sample.at_s, work.of(role) / most[role])
        backlog = backlog_engines(role, sample, targets, rates, pair[role].ready, start_s)
        rows = rows_engines(sample, targets, rates, memory.prompt_tokens) if role == DECODE else 0.0
        in_flight = memory_engines(sample, targets) if role == DECODE else 0.0
        is_calm = not backlog and pair[role].ready >= pair[role].replicas
        correction = _corrected(past.correction, role, sample, targets, is_calm=is_calm)
        unit = memory.request_work / most[role]
        arriving = correction * recent(history, unit)
        needs[role] = arriving + backlog if role == PREFILL else max(rows, in_flight)
        lasting[role] = max(arriving + backlog, needs[role])
        roles[role] = replace(past, history=history, correction=correction)
    past, busy = memory.roles.get(PAIR, RoleMemory()), sum(work.of(role) / most[role] for role in pair)
    history = past.history.add(sample.at_s, busy)
    percentile = max(0.5, 1 - FORECAST_SLACK * (1 - max(policies[role].targets.percentile for role in pair)))
    is_same = history.values is past.history.values
    unit = memory.request_work / min(most.values())
    ahead = past.ahead if is_same else margin(history, start_s, percentile, unit)
    both = _both(policies, start_s)
    fleet = Fleet(sum(one.replicas for one in pair.values()), sum(one.ready for one in pair.values()))
    needed = max(level(history, unit), sum(lasting.values())) + ahead
    kept = max(steady(history), sum(needs.values())) + ahead
    total, after = _settled(both, fleet, (needed, kept), sample, memory, past, start_s, roles=2)
    least = {role: _least(policies[role], sample, memory) for role in pair}
    useful = sum(max(least[role], min(policies[role].max_replicas, ceil(lasting[role] + ahead))) for role in pair)
    total = min(total, max(useful, fleet.replicas))  # what one role may not have does not help the other
    why = (
        f"{needs[PREFILL]:.2f} engines are needed for prompts and {needs[DECODE]:.2f} for tokens, {ahead:.2f} more may "
        f"be within a start of {start_s:.0f} s, and engines of both roles can switch"
    )
    bounds = {role: (least[role], policies[role].max_replicas) for role in pair}
    found = {role: Recommendation(pair[role].replicas, needs[role], why, bounds[role]) for role in pair}
    roles[PAIR] = replace(after, history=history, ahead=ahead)
    counts, memory = split_between_roles(total, found, pair, replace(memory, roles=roles), sample.at_s)
    return {role: replace(found[role], replicas=counts[role]) for role in pair}, memory


def split_between_roles(
    total: int, needs: Mapping[str, Recommendation], fleets: Mapping[str, Fleet], memory: Memory, at_s: float
) -> tuple[dict[str, int], Memory]:
    """Returns how many of `total` engines prefill and decode get, by what each `needs`, and what to remember of it.

    The planner splits its own number by it, and its caller the number that a budget allows instead.
    """
    pair = (PREFILL, DECODE)
    parts = [Part(needs[role].needed, fleets[role].replicas, fleets[role].ready, *needs[role].bounds) for role in pair]
    may_switch = memory.switched_s is None or not 0 < at_s - memory.switched_s < SWITCH_EVERY_S
    counts = dict(zip(pair, split(total, *parts, may_switch=may_switch), strict=True))
    grown = [counts[role] - fleets[role].replicas for role in pair]
    return counts, replace(memory, switched_s=at_s) if min(grown) < 0 < max(grown) else memory


def _both(policies: Mapping[str, ScalingPolicy], start_s: float) -> ScalingPolicy:
    """Returns the policy of the sum of prefill and decode engines: the sums of bounds, and the longer windows."""
    pair = [policies[role] for role in (PREFILL, DECODE)]
    windows = Windows(
        max(one.windows.up_s for one in pair),
        max(one.windows.down_after_s(start_s) for one in pair),
        max(one.windows.zero_s for one in pair),
    )
    least, most = sum(one.min_replicas for one in pair), sum(one.max_replicas for one in pair)
    return ScalingPolicy(least, most, pair[0].targets, windows)


def _is_awake(policy: ScalingPolicy, sample: Sample, memory: Memory) -> bool:
    """True unless there was no request for so long that the last engine may stop."""
    idle_s = 0.0 if memory.busy_s is None else sample.at_s - memory.busy_s
    return idle_s < policy.windows.zero_s or not sample.is_idle


def _least(policy: ScalingPolicy, sample: Sample, memory: Memory) -> int:
    """Returns the fewest engines of a role now."""
    return max(policy.min_replicas, int(_is_awake(policy, sample, memory)))


def _settled(
    policy: ScalingPolicy,
    fleet: Fleet,
    needed: tuple[float, float],
    sample: Sample,
    memory: Memory,
    past: RoleMemory,
    start_s: float,
    roles: int = 1,
) -> tuple[int, RoleMemory]:
    """Returns the replicas after windows and bounds, and what to remember of them.

    `needed` are the engines that are needed now, and those without short peaks, for which engines stay. `roles` is the
    number of roles that each need an engine while there are requests.
    """
    is_awake = _is_awake(policy, sample, memory)
    least = max(policy.min_replicas, roles * is_awake)
    now, lasting = (max(float(least), min(float(policy.max_replicas), one)) for one in needed)
    since_s = sample.at_s if past.seen_since_s is None else past.seen_since_s
    window_s = policy.windows.down_after_s(start_s)
    kept_s = max(window_s, policy.windows.up_s)
    needs = (*(need for need in past.needs if need[0] > sample.at_s - kept_s), (sample.at_s, now, lasting))
    is_held = past.added_s is not None and sample.at_s - past.added_s < past.patience * window_s
    held_since_s = sample.at_s if is_held else since_s
    replicas = _stabilised(fleet.replicas, needs, sample.at_s, held_since_s, window_s, policy.windows.up_s)
    if not is_awake:
        replicas = policy.min_replicas  # the wait without requests is over, which is a window of its own
    room = fleet.ready + max(LEAST_STARTING, STARTING_PER_READY * fleet.ready)
    replicas = max(policy.min_replicas, min(policy.max_replicas, replicas, max(fleet.replicas, room)))
    patience, removed_s = _patience(past, fleet.replicas, replicas, sample.at_s, window_s)
    added_s = sample.at_s if replicas > fleet.replicas else past.added_s
    after = replace(past, needs=needs, patience=patience, removed_s=removed_s, added_s=added_s, seen_since_s=since_s)
    return replicas, after


def _patience(past: RoleMemory, before: int, after: int, now_s: float, down_s: float) -> tuple[float, float | None]:
    """Returns the factor on the window, and the time from which the next change of it counts."""
    if after < before:
        return past.patience, now_s
    since_s = now_s - past.removed_s if past.removed_s is not None else 0.0
    if past.removed_s is None:
        return past.patience, None
    if after > before and since_s < REGRET_WINDOWS * down_s * past.patience:
        return min(MOST_PATIENCE, 2 * past.patience), None
    if since_s > CALM_WINDOWS * down_s * past.patience:
        return max(1.0, past.patience / 2), now_s
    return past.patience, past.removed_s


def _corrected(correction: float, role: str, sample: Sample, targets: Targets, *, is_calm: bool) -> float:
    """Returns the factor on the work. It grows while targets are missed although it `is_calm`: for a whole window there
    were as many engines as the model asked for, and nothing waits that came before them.
    """
    missed = (role != "decode" and sample.ttft_s is not None and sample.ttft_s > targets.ttft_s) or (
        role != "prefill" and sample.itl_s is not None and sample.itl_s > targets.itl_s
    )
    if missed and is_calm:
        return min(MOST_CORRECTION, correction * CORRECTION_UP)
    return max(1.0, correction * CORRECTION_DOWN)


def _stabilised(
    replicas: int,
    needs: tuple[tuple[float, float, float], ...],
    now_s: float,
    since_s: float,
    down_s: float,
    up_s: float,
) -> int:
    """Returns the number after the windows: the least need of the one for more, the greatest of the one for fewer."""
    latest = needs[-1][1]
    if replicas == 0:
        return ceil(latest)  # nobody is served meanwhile
    up = min([latest, *(need for at_s, need, _ in needs if at_s > now_s - up_s)])
    if up > replicas + UP_HYSTERESIS:
        return ceil(up)
    if now_s - since_s < down_s:
        return replicas
    most = max([latest, *(need for at_s, _, need in needs if at_s > now_s - down_s)])
    return min(replicas, ceil(most + DOWN_HYSTERESIS) if most > 1.0 else 1)


def _why(
    now: float,
    ahead: float,
    backlog: float,
    in_flight: float,
    most: float,
    correction: float,
    sample: Sample,
    start_s: float,
) -> str:
    """Returns the figures that decided, for people."""
    parts = [f"{now:.2f} engines are busy", f"{ahead:.2f} more may be within a start of {start_s:.0f} s"]
    if sample.queued_requests:
        parts.append(f"{sample.queued_requests} requests wait at gateways")
    if backlog:
        parts.append(f"{sample.queued_tokens:.0f} waiting prompt tokens need {backlog:.2f}")
    if in_flight:
        parts.append(f"tokens in flight need {in_flight:.2f}")
    if correction > 1.0:
        parts.append(f"missed targets add {100 * (correction - 1):.0f} %")
    return f"{', '.join(parts)}, at {100 * most:.0f} % utilisation"
