"""PodDisruptionBudgets over a service's engines: what `kubectl drain` may take at a time."""

from mini_infer_contract.resources import LABEL_ROLE, LABEL_SERVICE, DisruptionBudget, InferenceService
from mini_infer_operator.objects.metadata import Manifest, child_metadata
from mini_infer_operator.objects.names import engines_service_name, role_name

DEFAULT_MAX_UNAVAILABLE = 1


def disruption_budgets(service: InferenceService) -> list[Manifest]:
    """One over all revisions of each role, so a rollout and an eviction together stay within it. [] if unwanted.

    An engine that is not ready may be evicted at any time: it serves nobody, and would keep its node from draining.
    """
    wanted = service.spec.disruption_budget or DisruptionBudget()
    if wanted.enabled is False:
        return []
    allowed = DEFAULT_MAX_UNAVAILABLE if wanted.max_unavailable is None else wanted.max_unavailable
    name, of_service = service.metadata.name, {LABEL_SERVICE: service.metadata.name}
    if "unified" in service.roles:  # also over prefill and decode engines that an edit replaces
        return [_budget(service, engines_service_name(name), of_service, allowed)]
    return [
        _budget(service, role_name(name, role), {**of_service, LABEL_ROLE: role}, allowed) for role in service.roles
    ]


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
