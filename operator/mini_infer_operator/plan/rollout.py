"""How many engines of which revision: new ones come up before old ones go, roles in step. Pure; knows no Kubernetes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Count:
    """Engines of one revision, in one role."""

    replicas: int
    """Asked for."""
    available: int
    """Of those, ready for long enough to be relied on."""
    worked: bool = True
    """Whether one of this revision was ever available; False: it never served anybody."""
    expired: bool = False
    """Whether those that are not available have been so for longer than the deadline, and none of them recovered."""
    available_by_index: Sequence[bool] | None = None
    """Where the highest index goes first whatever it does (LeaderWorkerSet): each engine, by index. None: those that
    are not available go first (Deployment)."""

    @property
    def hopeful(self) -> int:
        """Engines that serve or may serve again soon."""
        return self.available if self.expired or not self.worked else self.replicas

    def replicas_with(self, available: int) -> int:
        """The fewest replicas that still have so many available engines, or all that are available."""
        if self.available_by_index is None:
            return min(available, self.replicas)
        needed = min(available, self.available)
        for replicas in range(self.replicas + 1):
            if sum(self.available_by_index[:replicas]) >= needed:
                return max(replicas, min(available, self.replicas))
        return self.replicas


@dataclass(frozen=True, slots=True)
class Limits:
    """How far a rollout may stray from the wanted number."""

    surge: int = 1
    """Engines above it."""
    unavailable: int = 0
    """Engines below it that are able to answer."""


@dataclass(frozen=True, slots=True)
class RoleState:
    """One role of a service: what is wanted of it, and what there is of each revision."""

    wanted: int
    seen: Mapping[str, Count]
    limits: Limits = Limits()
    is_starved: bool = False
    """Whether new engines of it find no room."""


def next_replicas_of_roles(revision: str, roles: Mapping[str, RoleState]) -> dict[str, dict[str, int]]:
    """Replicas that should exist now, by role and revision; `next_replicas` for each role, with roles in step.

    Engines of different roles work together only within one revision. So old ones of a role go as far as the new
    revision is available in every role: with a third of its decode engines and half of its prefill engines, a third of
    the old ones of both. The role that is furthest behind is held up by none, so a rollout always goes on. Where a role
    finds no room for new engines the others do not wait for it: what they could let go may be what it waits for. Old
    engines of a role that the new revision wants none of stay until it is complete.
    """
    order = _most_available_first(revision, roles)
    starved = any(role.is_starved for role in roles.values())
    complete = starved or all(_new(role, revision) >= role.wanted for role in roles.values())
    result = {}
    for name, role in roles.items():
        shares = [] if starved else [_share(role.wanted, other, revision) for other in roles.values()]
        covered = min([_new(role, revision), *shares])
        seen = {each: role.seen[each] for each in order if each in role.seen}
        if role.wanted or complete:
            result[name] = next_replicas(role.wanted, revision, seen, role.limits, covered)
        else:
            kept = {each: count.replicas_with(count.available) for each, count in seen.items() if each != revision}
            result[name] = {each: count for each, count in kept.items() if count} | {revision: 0}
    return result


def next_replicas(
    wanted: int, revision: str, seen: Mapping[str, Count], limits: Limits, covered: int | None = None
) -> dict[str, int]:
    """Replicas of one role for each revision that should exist now; called again whenever `seen` changes.

    Old engines go only when available new ones stand in for them, so what can answer never drops below
    `wanted - limits.unavailable` by our doing, and asked-for engines never exceed `wanted + limits.surge`. An old
    engine that is not ready may recover, so it counts, until the deadline has passed or where its revision never
    worked; and while no new engine is available, one engine stays of a revision that worked. A revision that is not in
    the answer is to be removed. The answer is in the order in which it is to be carried out: what shrinks before what
    grows, so that the limit holds in between too.

    Old revisions that come first in `seen` are kept first. `covered`: how many of the available new engines count, all
    if left out. Where the highest index goes first whatever it does, more stay than are wanted until the lower ones are
    available.
    """
    current = seen.get(revision, Count(0, 0))
    covered = current.available if covered is None else covered
    needed = max(0, wanted - limits.unavailable - min(covered, wanted))
    old = {name: count for name, count in seen.items() if name != revision}

    kept = dict.fromkeys(old, 0)
    for worth in ("available", "hopeful"):  # first those that serve: a Deployment that shrinks keeps them
        for name, count in old.items():
            more = min(getattr(count, worth), count.replicas) - kept[name]
            kept[name] += max(0, min(more, needed - sum(kept.values())))
    if needed and not current.available and not any(kept.values()):
        last = next((name for name, count in old.items() if count.worked and count.replicas), None)
        kept |= {last: 1} if last is not None else {}
    kept = {name: old[name].replicas_with(count) for name, count in kept.items()}

    room = max(0, wanted + limits.surge - sum(kept.values()))
    ours = min(wanted, room)
    if ours < current.replicas:
        ours = current.replicas_with(ours)
    return {name: count for name, count in kept.items() if count} | {revision: ours}


def _most_available_first(revision: str, roles: Mapping[str, RoleState]) -> list[str]:
    """Revisions in one order for all roles, so that what is kept of an old revision is kept in all its roles."""
    names = sorted({name for role in roles.values() for name in role.seen})

    def worth(name: str) -> tuple[int, int]:
        available = [role.seen[name].available for role in roles.values() if name in role.seen]
        return -min(available), -sum(available)

    return sorted(names, key=worth)


def _new(role: RoleState, revision: str) -> int:
    return role.seen.get(revision, Count(0, 0)).available


def _share(wanted: int, other: RoleState, revision: str) -> int:
    """How many of `wanted` engines there may be where another role is as far as it is, rounded down."""
    return wanted * min(_new(other, revision), other.wanted) // other.wanted if other.wanted else wanted
