"""Which engines go where fewer are wanted, and when: gateways stop sending first, then running requests end. Pure.

Nothing here tells an engine to drain, which it could not take back: it is labelled, gateways leave it alone, and if it
is wanted again after all the label goes. What still runs when its time is over ends within the pod's grace period.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from mini_infer_operator.observe import ObservedEngine, ObservedWorkload

UNROUTED_AFTER = timedelta(seconds=2)
"""All gateways have seen the label by then."""
UNKNOWN_AFTER = timedelta(seconds=5)
"""For an engine that does not say how many requests it runs."""


@dataclass(frozen=True, slots=True)
class Drained:
    """Replicas by revision as they may be asked for now, and the engines that are to go."""

    replicas: Mapping[str, int]
    going: frozenset[str]


def drain(
    wanted: Mapping[str, int], current: str, seen: Mapping[str, ObservedWorkload], most: int, now: datetime
) -> Drained:
    """`wanted`, where what shrinks waits for its engines to be drained, and `current` grows as far as `most` allows.

    Revisions that `wanted` does not name are to be removed, which is shrinking to none.
    """
    replicas, going = dict[str, int](), set[str]()
    for revision, workload in seen.items():
        target = wanted.get(revision, 0)
        chosen = victims(workload, target)
        waits = [engine for engine in chosen if not may_go(engine, now)]
        going |= {engine.name for engine in chosen if engine.ready}
        if waits:
            replicas[revision] = workload.replicas
        elif revision in wanted:
            replicas[revision] = target
    before = seen[current].replicas if current in seen else 0
    ours = replicas.pop(current, wanted[current])
    if ours > before:  # it grows as far as there is room beside what still waits
        ours = max(before, min(ours, most - sum(replicas.values())))
    return Drained({**replicas, current: max(0, ours)}, frozenset(going))


def victims(workload: ObservedWorkload, target: int) -> list[ObservedEngine]:
    """Which engines go where `target` replicas stay.

    First those that cannot answer, then those chosen before, then the youngest: a Deployment that shrinks takes pods
    that are not ready before all others, so nobody else may be chosen before them. A LeaderWorkerSet takes the highest
    indexes.
    """
    if workload.available_by_index is not None:
        return [engine for engine in workload.engines if engine.index is not None and engine.index >= target]

    def order(engine: ObservedEngine) -> tuple[bool, bool, float, str]:
        return engine.ready, engine.draining_since is None, -engine.created.timestamp(), engine.name

    return sorted(workload.engines, key=order)[: max(0, workload.replicas - target)]


def may_go(engine: ObservedEngine, now: datetime) -> bool:
    """Whether nothing is lost when the engine is told to end."""
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
