"""How many engines of which revision: new ones come up before old ones go. Pure counting; knows no Kubernetes."""

from collections.abc import Mapping
from dataclasses import dataclass

SURGE = 1
"""Engines above the wanted number while a rollout runs. GPUs are scarce, so one."""


@dataclass(frozen=True, slots=True)
class Count:
    """Engines of one revision: asked for, and of those able to answer."""

    replicas: int
    available: int


def next_replicas(wanted: int, revision: str, seen: Mapping[str, Count]) -> dict[str, int]:
    """Replicas for each revision that should exist now; called again whenever `seen` changes, until it settles.

    An old engine goes only when a new one can answer for it, so what can answer never drops below `wanted` by our
    doing; asked-for engines never exceed `wanted + SURGE`. Old engines that cannot answer are worth nothing and go at
    once. A revision that is not in the answer is to be removed. The answer is in the order in which it is to be carried
    out: what shrinks before what grows, so that the limit holds in between too.
    """
    current = seen.get(revision, Count(0, 0))
    still_needed = max(0, wanted - current.available)
    kept: dict[str, int] = {}
    others = [(name, count) for name, count in seen.items() if name != revision]
    for name, count in sorted(others, key=lambda item: (-item[1].available, item[0])):
        keep = min(count.available, count.replicas, still_needed)
        if keep:
            kept[name] = keep
            still_needed -= keep
    room = wanted + SURGE - sum(kept.values())
    return {**kept, revision: min(wanted, room)}
