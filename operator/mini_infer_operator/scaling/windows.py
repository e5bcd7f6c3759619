"""Lets a number of engines change only if it was needed, or not needed, for long enough. Pure."""

from dataclasses import replace
from math import ceil

from mini_infer_operator.scaling.plan_state import Fleet, Memory, RoleMemory
from mini_infer_operator.scaling.policy import ScalingPolicy
from mini_infer_operator.scaling.signals import Sample

UP_HYSTERESIS, DOWN_HYSTERESIS = 0.1, 0.3
"""Parts of an engine: the need must exceed the engines by the first before one is added, and must leave as much as the
second free on one fewer before one is removed.
"""
REGRET_WINDOWS, CALM_WINDOWS, MOST_PATIENCE = 5.0, 10.0, 3.0
"""An engine that is needed again within so many windows after one was removed lengthens the window, to twice its length
and to what would have kept that engine; so many windows without a removal halve it. The last is the greatest factor.
"""
LEAST_PATIENT_S = 240.0
"""The shortest window by which patience is counted, if the user set none: chance moves the number of requests over
minutes, however soon engines start. Windows of a minute let it turn up to 28 times in an hour of noise.
"""
LEAST_STARTING, STARTING_PER_READY = 4, 4
"""Engines that may be starting at a time: the first, or the second for each ready one if that is more. Engines that
never become ready cost no more than these. Bursts of five times the load are common: with two for each ready engine
they got their last engines in a second start (benchmarks/autoscaling.py).
"""


def is_awake(policy: ScalingPolicy, sample: Sample, memory: Memory) -> bool:
    """True unless there was no request for so long that the last engine may stop."""
    idle_s = 0.0 if memory.busy_s is None else sample.at_s - memory.busy_s
    return idle_s < policy.windows.zero_s or not sample.is_idle


def least_engines(policy: ScalingPolicy, sample: Sample, memory: Memory) -> int:
    """Returns the fewest engines of a role now."""
    return max(policy.min_replicas, int(is_awake(policy, sample, memory)))


def settled(
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
    awake = is_awake(policy, sample, memory)
    least = max(policy.min_replicas, roles * awake)
    now, lasting = (max(float(least), min(float(policy.max_replicas), one)) for one in needed)
    since_s = sample.at_s if past.seen_since_s is None else past.seen_since_s
    window_s = policy.windows.down_after_s(start_s)
    kept_s = max(window_s, policy.windows.up_s)
    needs = (*(need for need in past.needs if need[0] > sample.at_s - kept_s), (sample.at_s, now, lasting))
    is_held = past.added_s is not None and sample.at_s - past.added_s < past.patience * window_s
    held_since_s = sample.at_s if is_held else since_s
    replicas = _stabilised(fleet.replicas, needs, sample.at_s, held_since_s, window_s, policy.windows.up_s)
    if not awake:
        replicas = policy.min_replicas  # the wait without requests is over, which is a window of its own
    room = fleet.ready + max(LEAST_STARTING, STARTING_PER_READY * fleet.ready)
    replicas = max(policy.min_replicas, min(policy.max_replicas, replicas, max(fleet.replicas, room)))
    patient_s = window_s if policy.windows.down_s is not None else max(window_s, LEAST_PATIENT_S)
    patience, removed_s = _patience(past, fleet.replicas, replicas, sample.at_s, window_s, patient_s)
    added_s = sample.at_s if replicas > fleet.replicas else past.added_s
    after = replace(past, needs=needs, patience=patience, removed_s=removed_s, added_s=added_s, seen_since_s=since_s)
    return replicas, after


def _patience(
    past: RoleMemory, before: int, after: int, now_s: float, down_s: float, patient_s: float
) -> tuple[float, float | None]:
    """Returns the factor on the window `down_s`, and the time from which the next change of it counts. `patient_s` is
    the window by which its limits are counted.
    """
    if after < before:
        return past.patience, now_s
    since_s = now_s - past.removed_s if past.removed_s is not None else 0.0
    if past.removed_s is None:
        return past.patience, None
    if after > before and since_s < REGRET_WINDOWS * patient_s * past.patience:
        return min(MOST_PATIENCE * patient_s / down_s, max(2 * past.patience, past.patience + since_s / down_s)), None
    if since_s > CALM_WINDOWS * patient_s * past.patience:
        return max(1.0, past.patience / 2), now_s
    return past.patience, past.removed_s


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
