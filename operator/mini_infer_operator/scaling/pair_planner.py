"""Plans prefill and decode engines that can take each other's role: their sum, and who gets how many of it. Pure."""

from collections.abc import Mapping
from dataclasses import replace
from math import ceil

from mini_infer_operator.scaling.correction import corrected
from mini_infer_operator.scaling.demand import backlog_engines, utilisation, work_of
from mini_infer_operator.scaling.forecast import forecast_percentile, level, margin, recent, steady
from mini_infer_operator.scaling.plan_state import DECODE, PAIR, PREFILL, Fleet, Memory, Recommendation, RoleMemory
from mini_infer_operator.scaling.policy import ScalingPolicy, Windows
from mini_infer_operator.scaling.role_split import Part, split
from mini_infer_operator.scaling.signals import EngineRates, Sample
from mini_infer_operator.scaling.windows import least_engines, settled

SWITCH_EVERY_S = 5.0
"""Seconds between two switches of roles: the effect of one shows in the next samples."""


def plan_pair(
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
    kept_for = dict[str, float]()
    pair, lasting = {role: fleets.get(role, Fleet(0, 0)) for role in (PREFILL, DECODE)}, dict[str, float]()
    patience = memory.roles.get(PAIR, RoleMemory()).patience
    for role in (PREFILL, DECODE):
        targets, past = policies[role].targets, memory.roles.get(role, RoleMemory())
        most[role] = utilisation(role, targets, rates, memory.prompt_tokens)
        history = past.history.add(sample.at_s, work.of(role) / most[role])
        backlog = backlog_engines(role, sample, targets, rates, pair[role].ready, start_s)
        running = past.running.observed(role, sample, rates, targets, memory.prompt_tokens, start_s, patience)
        is_calm = not backlog and pair[role].ready >= pair[role].replicas
        correction = corrected(past.correction, role, sample, targets, is_calm=is_calm)
        unit = memory.request_work / most[role]
        arriving = correction * recent(history, unit)
        needs[role] = arriving + backlog if role == PREFILL else max(running.rows_now, running.tokens_now)
        lasting[role] = max(arriving + backlog, running.rows, running.tokens)
        kept_for[role] = arriving + backlog if role == PREFILL else max(running.rows, running.tokens_lasting)
        roles[role] = replace(past, history=history, correction=correction, running=running)
    past, busy = memory.roles.get(PAIR, RoleMemory()), sum(work.of(role) / most[role] for role in pair)
    history = past.history.add(sample.at_s, busy)
    percentile = forecast_percentile(max(policies[role].targets.percentile for role in pair))
    is_same = history.values is past.history.values
    unit = memory.request_work / min(most.values())
    more = past.margin if is_same else margin(history, start_s, percentile, unit, past.patience)
    both = _both(policies, start_s)
    fleet = Fleet(sum(one.replicas for one in pair.values()), sum(one.ready for one in pair.values()))
    needed = max(level(history, unit), sum(lasting.values())) + more.ahead
    kept = max(steady(history), sum(kept_for.values())) + more.kept
    total, after = settled(both, fleet, (needed, kept), sample, memory, past, start_s, roles=2)
    least = {role: least_engines(policies[role], sample, memory) for role in pair}
    useful = sum(max(least[role], min(policies[role].max_replicas, ceil(lasting[role] + more.kept))) for role in pair)
    total = min(total, max(useful, fleet.replicas))  # what one role may not have does not help the other
    why = (
        f"{needs[PREFILL]:.2f} engines are needed for prompts and {needs[DECODE]:.2f} for tokens, "
        f"{more.ahead:.2f} more may be within a start of {start_s:.0f} s, and engines of both roles can switch"
    )
    bounds = {role: (least[role], policies[role].max_replicas) for role in pair}
    found = {role: Recommendation(pair[role].replicas, needs[role], why, bounds[role]) for role in pair}
    roles[PAIR] = replace(after, history=history, margin=more)
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
    is_default = all(one.windows.down_s is None for one in pair)
    windows = Windows(
        max(one.windows.up_s for one in pair),
        None if is_default else max(one.windows.down_after_s(start_s) for one in pair),
        max(one.windows.zero_s for one in pair),
    )
    least, most = sum(one.min_replicas for one in pair), sum(one.max_replicas for one in pair)
    return ScalingPolicy(least, most, pair[0].targets, windows)
