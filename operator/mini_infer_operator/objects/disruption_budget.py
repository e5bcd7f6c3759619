"""Renders PodDisruptionBudgets for a service's engines: they limit how many `kubectl drain` evicts at once."""

from mini_infer_operator.objects.metadata import Manifest, child_metadata
from mini_infer_operator.objects.names import engines_service_name, role_name
from mini_infer_operator.resource import LABEL_ROLE, LABEL_SERVICE, DisruptionBudget, InferenceService

DEFAULT_MAX_UNAVAILABLE = 1


def disruption_budgets(service: InferenceService, *, is_fluid: bool = False) -> list[Manifest]:
    """Returns one budget for each role, over all its revisions; [] if the spec disables them.

    There is one for all roles if engines switch them (`is_fluid`): budgets by the role that a pod started with would
    let all engines go that have a role now, and a budget of part of a Deployment's pods counts its other ones as lost.

    A budget over all revisions keeps a rollout and an eviction together within the limit. An engine that is not ready
    may be evicted at any time: it serves no one, and would keep its node from draining.

    Any pod of an engine over several nodes may be evicted, and the engine is lost with it. Pods of the other engines
    are then safe until it is whole again. Kubernetes counts pods, and each evicted pod may be of another engine: so a
    percentage of the engines is divided by the pods of one engine.
    """
    settings = service.spec.disruption_budget or DisruptionBudget()
    if settings.enabled is False:
        return []
    allowed = DEFAULT_MAX_UNAVAILABLE if settings.max_unavailable is None else settings.max_unavailable
    name, of_service = service.metadata.name, {LABEL_SERVICE: service.metadata.name}
    nodes = {role: (spec.parallelism and spec.parallelism.nodes) or 1 for role, spec in service.roles.items()}
    selected = {role_name(name, role): (of_service | {LABEL_ROLE: role}, count) for role, count in nodes.items()}
    if is_fluid or "unified" in service.roles:  # the latter also over prefill and decode engines that an edit replaces
        selected = {engines_service_name(name): (of_service, nodes.get("unified") or max(nodes.values()))}
    return [
        _budget(service, budget, selector, _of_pods(allowed, count)) for budget, (selector, count) in selected.items()
    ]


def _of_pods(allowed: int | str, nodes: int) -> int | str:
    """Converts a limit on engines of `nodes` pods each to one on pods. A percentage above 0 stays 1 at least."""
    if isinstance(allowed, int) or nodes == 1:
        return allowed
    percent = int(allowed.removesuffix("%"))
    return f"{max(min(percent, 1), percent // nodes)}%"


def _budget(service: InferenceService, name: str, selector: dict[str, str], allowed: int | str) -> Manifest:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": child_metadata(service, name, {}),
        "spec": {
            "maxUnavailable": allowed,
            "selector": {"matchLabels": selector},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
