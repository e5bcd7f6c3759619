"""What `spec.rollout` means in numbers, defaults included. Pure."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from mini_infer_operator.observe import ObservedWorkload
from mini_infer_operator.plan.rollout import Limits
from mini_infer_operator.resource import InferenceService, Rollout

DEFAULT_SURGE = 1
"""GPUs are scarce, so one engine more than wanted."""
DEFAULT_MIN_READY = timedelta(seconds=10)
DEFAULT_DEADLINE = timedelta(seconds=600)
FULL_CLUSTER_AFTER = timedelta(seconds=5)
"""A new engine that finds no node for this long shows that there is no room beside the old ones."""


@dataclass(frozen=True, slots=True)
class RolloutTimes:
    """How long to wait for what."""

    min_ready: timedelta
    deadline: timedelta


DEFAULT_TIMES = RolloutTimes(DEFAULT_MIN_READY, DEFAULT_DEADLINE)


def times_of(service: InferenceService) -> RolloutTimes:
    """Of the whole service."""
    rollout = service.spec.rollout or Rollout()
    min_ready, deadline = rollout.min_ready_seconds, rollout.progress_deadline_seconds
    return RolloutTimes(
        DEFAULT_MIN_READY if min_ready is None else timedelta(seconds=min_ready),
        DEFAULT_DEADLINE if deadline is None else timedelta(seconds=deadline),
    )


def limits_of(rollout: Rollout | None, wanted: int, current: ObservedWorkload | None, now: datetime) -> Limits:
    """For a role with `wanted` engines, `current` being those of the revision that the spec asks for.

    Where the user does not say how many may be missing it is none, but one where a new engine finds no room: on a full
    cluster (the normal state of GPUs) a rollout could never begin otherwise.
    """
    rollout = rollout or Rollout()
    surge = DEFAULT_SURGE if rollout.max_surge is None else _count(rollout.max_surge, wanted, round_up=True)
    if rollout.max_unavailable is not None:
        unavailable = _count(rollout.max_unavailable, wanted, round_up=False)
    else:
        unavailable = 1 if full_cluster_at(current, now) else 0
    if surge == unavailable == 0:  # percentages of few engines round to nothing
        unavailable = 1
    return Limits(surge, unavailable)


def full_cluster_at(current: ObservedWorkload | None, now: datetime) -> bool:
    """Whether there is no room for one engine more."""
    since = current.unschedulable_since if current else None
    return since is not None and now - since >= FULL_CLUSTER_AFTER


def _count(value: int | str, wanted: int, *, round_up: bool) -> int:
    if isinstance(value, int):
        return value
    hundredths = int(value.removesuffix("%")) * wanted
    return -(-hundredths // 100) if round_up else hundredths // 100
