"""Chooses the engines that are removed on scale-down, and when: gateways stop routing to them first, then their running
requests end. Pure.

Nothing here asks an engine to drain, because a drain cannot be taken back. Instead the engine's pod is labelled and
gateways stop routing to it; the label is removed if the engine is needed again. Requests that still run when the drain
time is over end within the pod's grace period.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from mini_infer_operator.observe import ObservedEngine, ObservedWorkload

UNROUTED_AFTER = timedelta(seconds=2)
"""The time after which all gateways have seen the draining label."""
UNKNOWN_AFTER = timedelta(seconds=5)
"""The drain time of an engine that does not report how many requests it runs."""


@dataclass(frozen=True, slots=True)
class Drained:
    """The replicas that each revision may have now, and the names of the engines that are draining."""

    replicas: Mapping[str, int]
    going: frozenset[str]


def drain(
    desired: Mapping[str, int], current: str, seen: Mapping[str, ObservedWorkload], most: int, now: datetime
) -> Drained:
    """Returns the `desired` replicas, changed so that a revision shrinks only once its engines are drained.

    The `current` revision grows as far as `most` engines in all allow. Revisions that `desired` does not name are to be
    removed, which is shrinking to none.
    """
    replicas, going = dict[str, int](), set[str]()
    for revision, workload in seen.items():
        target = desired.get(revision, 0)
        chosen = victims(workload, target)
        waits = [engine for engine in chosen if not may_go(engine, now)]
        going |= {engine.name for engine in chosen if engine.ready}
        if waits:
            replicas[revision] = workload.replicas
        elif revision in desired:
            replicas[revision] = target
    before = seen[current].replicas if current in seen else 0
    ours = replicas.pop(current, desired[current])
    if ours > before:  # it grows as far as there is room beside what still waits
        ours = max(before, min(ours, most - sum(replicas.values())))
    return Drained({**replicas, current: max(0, ours)}, frozenset(going))


def victims(workload: ObservedWorkload, target: int) -> list[ObservedEngine]:
    """Returns the engines that are removed if `target` replicas stay.

    Engines that are not ready come first, then those already draining, then the youngest: a Deployment that shrinks
    removes pods that are not ready before all others, so no other engine may be chosen before them. A LeaderWorkerSet
    removes the highest indexes.
    """
    if workload.available_by_index is not None:
        return [engine for engine in workload.engines if engine.index is not None and engine.index >= target]

    def order(engine: ObservedEngine) -> tuple[bool, bool, float, str]:
        return engine.ready, engine.draining_since is None, -engine.created.timestamp(), engine.name

    return sorted(workload.engines, key=order)[: max(0, workload.replicas - target)]


def may_go(engine: ObservedEngine, now: datetime) -> bool:
    """True if the engine can be stopped without losing a request, or its grace period is over."""
    if not engine.ready:
        return True
    if engine.draining_since is None:
        return False
    waited = now - engine.draining_since
    if waited >= timedelta(seconds=engine.grace_s):
        return True
    if engine.running is None:
        return waited >= UNKNOWN_AFTER
    return engine.running == 0 and waited >= UNROUTED_AFTER
