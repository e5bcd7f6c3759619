"""Plans the replicas of the roles of one service. Pure: all that it remembers is in the `Memory` that it returns.

The stages: work that arrives (demand.py) and its forecast for the time of a start (forecast.py) give the engines that
keep the targets; what waits and what is in flight may need more; the latency that was observed corrects the model; and
windows (windows.py) let the number change only if it was needed, or not needed, for long enough.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import exp

from mini_infer_operator.scaling.correction import corrected
from mini_infer_operator.scaling.demand import backlog_engines, utilisation, work_of
from mini_infer_operator.scaling.forecast import forecast_percentile, level, margin, steady
from mini_infer_operator.scaling.pair_planner import plan_pair
from mini_infer_operator.scaling.plan_state import DECODE, PREFILL, Fleet, Memory, Recommendation, RoleMemory
from mini_infer_operator.scaling.policy import ScalingPolicy
from mini_infer_operator.scaling.signals import EngineRates, Sample
from mini_infer_operator.scaling.windows import least_engines, settled

DEFAULT_START_S = 30.0
"""Seconds of a start until one was measured."""


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
        return plan_pair(policies, fleets, sample, rates, memory, start_s)
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
    percentile = forecast_percentile(targets.percentile)
    is_same = history.values is past.history.values  # the margin takes a while to compute, and changes only with these
    more = past.margin if is_same else margin(history, start_s, percentile, memory.request_work, past.patience)
    backlog = backlog_engines(role, sample, targets, rates, fleet.ready, start_s)
    is_calm = not backlog and fleet.ready >= max([fleet.replicas, *(need for _, need, _ in past.needs)])
    correction = corrected(past.correction, role, sample, targets, is_calm=is_calm)
    busy = correction * max(now, steady(history) + more.ahead) / most
    running = past.running.observed(role, sample, rates, targets, memory.prompt_tokens, start_s, past.patience)
    needed = max(busy + backlog, running.rows + (work.prefill if role == "unified" else 0.0), running.tokens)
    lasting = max(correction * (steady(history) + more.kept) / most + backlog, running.tokens_lasting)
    replicas, after = settled(policy, fleet, (needed, lasting), sample, memory, past, start_s)
    why = _why(now, more.ahead, backlog, running.tokens, most, correction, sample, start_s)
    after = replace(after, history=history, margin=more, running=running, correction=correction)
    return Recommendation(replicas, needed, why, (least_engines(policy, sample, memory), policy.max_replicas)), after


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
