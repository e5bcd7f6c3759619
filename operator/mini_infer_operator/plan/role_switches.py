"""Chooses engines that change their role while they run, so that no other need start. Pure.

Prefill and decode engines that start alike differ only in the role that they report, and `POST /role` changes it in
milliseconds: new requests are those of the new role, and running ones end as they began.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from mini_infer_operator.launch import launch_of
from mini_infer_operator.observe import Observed, ObservedWorkload
from mini_infer_operator.resource import PAIRED_ROLES, InferenceService


@dataclass(frozen=True, slots=True)
class RoleSwitch:
    """An engine's change of role."""

    name: str
    revision: str
    before: str
    after: str
    ready: bool = True


def roles_are_interchangeable(service: InferenceService) -> bool:
    """True if the planner may switch engines between prefill and decode.

    It sets the numbers of both, and their engines start alike: the same options, resources and template, each on one
    node.
    """
    if not set(PAIRED_ROLES) <= set(service.roles):
        return False
    scalings = [service.roles[role].scaling for role in PAIRED_ROLES]
    if any(scaling is None or not scaling.is_planned for scaling in scalings):
        return False
    # An engine keeps the folder of its KV cache, whatever role that is named after.
    launches = [replace(launch_of(service, role, ""), role="", kv_disk_folder="") for role in PAIRED_ROLES]
    prefill, decode = launches
    return prefill == decode and prefill.nodes == 1


def choose_switches(service: InferenceService, observed: Observed, revision: str) -> list[RoleSwitch]:
    """Returns the switches by which one role gets engines that it lacks from the other, which has too many.

    Ready engines come first, the least loaded of them before others. Engines of other revisions stay as they are.
    """
    if not observed.switchable:
        return []
    seen = {w.role: w.replicas for w in observed.workloads if w.revision == revision}
    missing = {role: service.roles[role].replicas - seen[role] for role in PAIRED_ROLES if role in seen}
    if len(missing) < len(PAIRED_ROLES):
        return []
    after, before = sorted(missing, key=lambda role: -missing[role])
    count = max(0, min(missing[after], -missing[before]))
    candidates = [e for e in observed.switchable if (e.role, e.revision) == (before, revision)]
    candidates.sort(key=lambda engine: (not engine.ready, engine.load, engine.name))
    return [RoleSwitch(e.name, revision, before, after, e.ready) for e in candidates[:count]]


def with_switches(workloads: Sequence[ObservedWorkload], switches: Iterable[RoleSwitch]) -> list[ObservedWorkload]:
    """Returns the workloads as they are once these engines have switched.

    A switched engine that is ready counts as available: it has served before.
    """
    found = {(workload.role, workload.revision): workload for workload in workloads}
    for switch in switches:
        source, target = (found.get((role, switch.revision)) for role in (switch.before, switch.after))
        if source is None or target is None or not source.replicas:
            continue
        ready = int(switch.ready)
        found[source.role, source.revision] = replace(
            source,
            replicas=source.replicas - 1,
            ready=max(0, source.ready - ready),
            available=max(0, source.available - ready),
            engines=[engine for engine in source.engines if engine.name != switch.name],
        )
        found[target.role, target.revision] = replace(
            target,
            replicas=target.replicas + 1,
            ready=target.ready + ready,
            available=target.available + ready,
            worked=target.worked or switch.ready,
            engines=[*target.engines, *(engine for engine in source.engines if engine.name == switch.name)],
        )
    return [found[workload.role, workload.revision] for workload in workloads]
