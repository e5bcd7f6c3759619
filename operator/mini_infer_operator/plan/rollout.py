"""How many engines of which revision: new ones come up before old ones go. Pure counting; knows no Kubernetes."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Count:
    """Engines of one revision."""

    replicas: int
    """Asked for."""
    available: int
    """Of those, ready for long enough to be relied on."""
    worked: bool = True
    """Whether one of this revision was ever available; False: it never served anybody."""
    expired: bool = False
    """Whether those that are not available have been so for longer than the deadline, and none of them recovered."""

    @property
    def hopeful(self) -> int:
        """Engines that serve or may serve again soon."""
        return self.available if self.expired or not self.worked else self.replicas


@dataclass(frozen=True, slots=True)
class Limits:
    """How far a rollout may stray from the wanted number."""

    surge: int = 1
    """Engines above it."""
    unavailable: int = 0
    """Engines below it that are able to answer."""


def next_replicas(wanted: int, revision: str, seen: Mapping[str, Count], limits: Limits) -> dict[str, int]:
    """Replicas for each revision that should exist now; called again whenever `seen` changes, until it settles.

    Old engines go only when available new ones stand in for them, so what can answer never drops below
    `wanted - limits.unavailable` by our doing, and asked-for engines never exceed `wanted + limits.surge`. An old
    engine that is not ready may recover, so it counts, until the deadline has passed or where its revision never
    worked; and while no new engine is available, one engine stays of a revision that worked. A revision that is not in
    the answer is to be removed. The answer is in the order in which it is to be carried out: what shrinks before what
    grows, so that the limit holds in between too.
    """
    current = seen.get(revision, Count(0, 0))
    needed = max(0, wanted - limits.unavailable - min(current.available, wanted))
    old = {name: seen[name] for name in sorted(seen, key=lambda name: (-seen[name].available, name))}
    old.pop(revision, None)

    kept = dict.fromkeys(old, 0)
    for worth in ("available", "hopeful"):  # first those that serve: a Deployment that shrinks keeps them
        for name, count in old.items():
            more = min(getattr(count, worth), count.replicas) - kept[name]
            kept[name] += max(0, min(more, needed - sum(kept.values())))
    if needed and not current.available and not any(kept.values()):
        last = next((name for name, count in old.items() if count.worked and count.replicas), None)
        kept |= {last: 1} if last is not None else {}

    room = max(0, wanted + limits.surge - sum(kept.values()))
    return {name: count for name, count in kept.items() if count} | {revision: min(wanted, room)}
