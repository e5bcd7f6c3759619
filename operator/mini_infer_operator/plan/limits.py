"""Turns `spec.rollout` into numbers, defaults included. Pure."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from mini_infer_operator.observe import ObservedWorkload
from mini_infer_operator.plan.rollout import Limits
from mini_infer_operator.resource import InferenceService, Rollout

DEFAULT_SURGE = 1
"""One engine more than wanted: GPUs are scarce."""
DEFAULT_MIN_READY = timedelta(seconds=10)
DEFAULT_DEADLINE = timedelta(seconds=600)
FULL_CLUSTER_AFTER = timedelta(seconds=5)
"""The time after which a new engine that finds no node shows that there is no room beside the old ones."""

_NO_ROLLOUT = Rollout()


@dataclass(frozen=True, slots=True)
class RolloutTimes:
    """The two waits of a rollout: until an engine counts as available, and until lack of progress counts as failure."""

    min_ready: timedelta
    deadline: timedelta


DEFAULT_TIMES = RolloutTimes(DEFAULT_MIN_READY, DEFAULT_DEADLINE)


def times_of(service: InferenceService) -> RolloutTimes:
    """Returns the waits of the whole service, with defaults for those that the spec leaves out."""
    rollout = service.spec.rollout or _NO_ROLLOUT
    min_ready, deadline = rollout.min_ready_seconds, rollout.progress_deadline_seconds
    return RolloutTimes(
        DEFAULT_MIN_READY if min_ready is None else timedelta(seconds=min_ready),
        DEFAULT_DEADLINE if deadline is None else timedelta(seconds=deadline),
    )


def limits_of(rollout: Rollout | None, desired: int, current: ObservedWorkload | None, now: datetime) -> Limits:
    """Returns the limits of a role with `desired` engines; `current` are the engines of the revision that the spec asks
    for.

    If the user does not say how many engines may be unavailable, it is 0, but 1 once a new engine finds no room: on a
    full cluster (the normal state of GPUs) a rollout could never begin otherwise.
    """
    rollout = rollout or _NO_ROLLOUT
    surge = DEFAULT_SURGE if rollout.max_surge is None else _count(rollout.max_surge, desired, round_up=True)
    if rollout.max_unavailable is not None:
        unavailable = _count(rollout.max_unavailable, desired, round_up=False)
    else:
        unavailable = 1 if full_cluster_at(current, now) else 0
    if surge == unavailable == 0:  # percentages of few engines round to nothing
        unavailable = 1
    return Limits(surge, unavailable)


def full_cluster_at(current: ObservedWorkload | None, now: datetime) -> bool:
    """True if a new engine has found no node for long enough to conclude that the cluster is full."""
    since = current.unschedulable_since if current else None
    return since is not None and now - since >= FULL_CLUSTER_AFTER


def _count(value: int | str, desired: int, *, round_up: bool) -> int:
    if isinstance(value, int):
        return value
    hundredths = int(value.removesuffix("%")) * desired
    return -(-hundredths // 100) if round_up else hundredths // 100
