"""The PodDisruptionBudget over all engines of a service: what `kubectl drain` may take at a time."""

from mini_infer_contract.resources import LABEL_SERVICE, DisruptionBudget, InferenceService
from mini_infer_operator.objects.metadata import Manifest, child_metadata
from mini_infer_operator.objects.names import engines_service_name

DEFAULT_MAX_UNAVAILABLE = 1


def disruption_budget(service: InferenceService) -> Manifest | None:
    """Over all roles and revisions, so a rollout and an eviction together stay within it. None: the user wants none.

    An engine that is not ready may be evicted at any time: it serves nobody, and would keep its node from draining.
    """
    wanted = service.spec.disruption_budget or DisruptionBudget()
    if wanted.enabled is False:
        return None
    allowed = DEFAULT_MAX_UNAVAILABLE if wanted.max_unavailable is None else wanted.max_unavailable
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": child_metadata(service, engines_service_name(service.metadata.name), {}),
        "spec": {
            "maxUnavailable": allowed,
            "selector": {"matchLabels": {LABEL_SERVICE: service.metadata.name}},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
