"""Computes how many engines of each revision should exist: new ones start before old ones stop, with roles in step.
Pure; knows no Kubernetes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Count:
    """The number of engines of one revision, in one role."""

    replicas: int
    """The number of engines asked for."""
    available: int
    """The number of engines that have been ready for long enough to be relied on."""
    worked: bool = True
    """True if an engine of this revision was ever available; False if the revision never served a request."""
    expired: bool = False
    """True if the unavailable engines have been so for longer than the deadline, and none of them recovered."""
    available_by_index: Sequence[bool] | None = None
    """The availability of each engine by index, if scale-down removes the highest index first whatever its state
    (LeaderWorkerSet); None if it removes unavailable engines first (Deployment).
    """

    @property
    def hopeful(self) -> int:
        """The number of engines that serve or may serve again soon."""
        return self.available if self.expired or not self.worked else self.replicas

    def replicas_with(self, available: int) -> int:
        """Returns the fewest replicas that still include `available` available engines, or all that are available."""
        if self.available_by_index is None:
            return min(available, self.replicas)
        needed = min(available, self.available)
        for replicas in range(self.replicas + 1):
            if sum(self.available_by_index[:replicas]) >= needed:
                return max(replicas, min(available, self.replicas))
        return self.replicas


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest distance of a rollout from the wanted number of engines."""

    surge: int = 1
    """Engines that may exist above the wanted number."""
    unavailable: int = 0
    """Engines able to answer that may be missing below the wanted number."""


@dataclass(frozen=True, slots=True)
class RoleState:
    """One role of a service: the number of engines wanted, and the existing engines of each revision."""

    desired: int
    seen: Mapping[str, Count]
    limits: Limits = Limits()
    is_starved: bool = False
    """True if no node has room for a new engine of the role."""
    most_new: int | None = None
    """The most engines of the new revision while it is judged as a canary; None without a limit."""


def next_replicas_of_roles(
    revision: str, roles: Mapping[str, RoleState], kept_first: str | None = None
) -> dict[str, dict[str, int]]:
    """Returns the replicas that should exist now, by role and revision: `next_replicas` for each role, with roles in
    step.

    Engines of different roles work together only within one revision. So old engines of a role are removed only as far
    as the new revision is available in every role: with a third of its decode engines and half of its prefill engines
    available, a third of the old ones of both. The role that is furthest behind waits for no other, so a rollout always
    goes on. If a role finds no room for new engines, the others do not wait for it: the room that it needs may be what
    they could free. If the new revision has no engines of a role, the old engines of that role stay until the new
    revision is complete.

    `kept_first` is the old revision that is kept before all others; the one that has most available if None. While a
    role limits the engines of the new revision, old ones stay beside those that the surge has room for, and
    `kept_first` gets more engines if the role is scaled up.
    """
    order = sorted(_most_available_first(revision, roles), key=lambda name: name != kept_first)
    starved = any(role.is_starved for role in roles.values())
    complete = starved or all(_new(role, revision) >= role.desired for role in roles.values())
    result = {}
    for name, role in roles.items():
        shares = [] if starved else [_share(role.desired, other, revision) for other in roles.values()]
        covered = min([_new(role, revision), *shares])
        if role.most_new is not None:
            extra = role.limits.unavailable + (0 if role.is_starved else role.limits.surge)
            covered = max(0, min(covered, role.most_new - extra))
        seen = {each: role.seen[each] for each in order if each in role.seen}
        if role.desired or complete:
            result[name] = next_replicas(role.desired, revision, seen, role.limits, covered)
            if role.most_new is not None:
                result[name][revision] = min(result[name][revision], role.most_new)
                needed = max(0, role.desired - role.limits.unavailable - min(covered, role.desired))
                result[name] = _with_growth(result[name], revision, kept_first, role, needed)
        else:
            kept = {each: count.replicas_with(count.available) for each, count in seen.items() if each != revision}
            result[name] = {each: count for each, count in kept.items() if count} | {revision: 0}
    return result


def next_replicas(
    desired: int, revision: str, seen: Mapping[str, Count], limits: Limits, covered: int | None = None
) -> dict[str, int]:
    """Returns the replicas of one role that should exist now, by revision; called again whenever `seen` changes.

    Old engines are removed only when available new ones replace them, so a rollout itself never lowers the engines able
    to answer below `desired - limits.unavailable`, and the engines asked for never exceed `desired + limits.surge`. An
    old engine that is not ready may recover, so it counts, unless the deadline has passed or its revision never worked.
    While no new engine is available, one engine stays of a revision that worked. A revision that is missing in the
    result is to be removed. The result is in the order in which it is to be carried out: what shrinks before what
    grows, so that the limit holds in between too.

    Old revisions that come first in `seen` are kept first. `covered` is how many of the available new engines count;
    all if left out. Where scale-down removes the highest index first whatever its state, more engines than wanted may
    stay until those with lower indexes are available.
    """
    current = seen.get(revision, Count(0, 0))
    covered = current.available if covered is None else covered
    needed = max(0, desired - limits.unavailable - min(covered, desired))
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

    allowed = max(0, desired + limits.surge - sum(kept.values()))
    ours = min(desired, allowed)
    if ours < current.replicas:
        ours = current.replicas_with(ours)
    return {name: count for name, count in kept.items() if count} | {revision: ours}


def _with_growth(
    counts: dict[str, int], revision: str, stable: str | None, role: RoleState, needed: int
) -> dict[str, int]:
    """Returns the counts with as many engines of the stable revision as are `needed` beside a canary, if the role was
    scaled up since that had all of them. The canary keeps the engines that it has.
    """
    count = role.seen.get(stable) if stable is not None else None
    if stable is None or count is None or count.expired or not count.worked:
        return counts
    others = sum(replicas for name, replicas in counts.items() if name not in {stable, revision})
    most = role.desired + role.limits.surge - others
    grown = min(needed - others, most - min(counts[revision], role.seen.get(revision, Count(0, 0)).replicas))
    if grown <= max(count.replicas, counts.get(stable, 0)):
        return counts
    ours = max(0, min(counts[revision], most - grown))
    return {name: n for name, n in counts.items() if name not in {stable, revision}} | {stable: grown, revision: ours}


def _most_available_first(revision: str, roles: Mapping[str, RoleState]) -> list[str]:
    """Returns the revisions in one order for all roles, so that an old revision is kept in all its roles or in none."""
    names = sorted({name for role in roles.values() for name in role.seen})

    def worth(name: str) -> tuple[int, int]:
        available = [role.seen[name].available for role in roles.values() if name in role.seen]
        return -min(available), -sum(available)

    return sorted(names, key=worth)


def _new(role: RoleState, revision: str) -> int:
    return role.seen.get(revision, Count(0, 0)).available


def _share(desired: int, other: RoleState, revision: str) -> int:
    """Returns how many of `desired` engines may be replaced, in proportion to the progress of the `other` role, rounded
    down.
    """
    return desired * min(_new(other, revision), other.desired) // other.desired if other.desired else desired
