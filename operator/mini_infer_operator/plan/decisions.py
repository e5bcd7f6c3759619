"""Describes what a plan changes, for Events: one sentence for each decision. Pure."""

from dataclasses import dataclass

from mini_infer_operator.observe import Observed
from mini_infer_operator.plan.plan import Plan
from mini_infer_operator.plan.role_switches import with_switches


@dataclass(frozen=True, slots=True)
class Decision:
    """One change that a plan makes."""

    reason: str
    message: str


def decisions(observed: Observed, plan: Plan) -> list[Decision]:
    """Returns the changes from what was observed to what is planned; an empty list if the plan is what runs."""
    seen = {(workload.role, workload.revision): workload.replicas for workload in observed.workloads}
    planned = {(workload.role, workload.revision) for workload in plan.workloads}
    made = [
        Decision("RoleSwitched", f"engine {switch.name} serves as {switch.after} from now on, not as {switch.before}")
        for switch in plan.switches
    ]
    seen |= {(w.role, w.revision): w.replicas for w in with_switches(observed.workloads, plan.switches)}
    for workload in plan.workloads:
        name = f"{workload.role} revision {workload.revision}"
        before = seen.get((workload.role, workload.revision))
        if before is None:
            image = f", image {workload.launch.image}" if workload.launch else ""
            made.append(Decision("RevisionStarted", f"{name} starts with {engines(workload.replicas)}{image}"))
        elif before != workload.replicas:
            direction = "ScaledUp" if workload.replicas > before else "ScaledDown"
            made.append(Decision(direction, f"{name} goes from {before} to {engines(workload.replicas)}"))
    made += [
        Decision("RevisionRemoved", f"{role} revision {revision} is removed, with {engines(replicas)}")
        for (role, revision), replicas in sorted(seen.items())
        if (role, revision) not in planned
    ]
    return made


def engines(count: int) -> str:
    """`1 engine`, `2 engines`."""
    return f"{count} engine" if count == 1 else f"{count} engines"
