"""The Deployment that runs the engines of one role and revision; it is scaled, and never rolled in place."""

from collections.abc import Mapping
from typing import Any

from mini_infer_operator.objects.metadata import Manifest, child_metadata
from mini_infer_operator.objects.names import selector, workload_name
from mini_infer_operator.plan.limits import RolloutTimes
from mini_infer_operator.plan.plan import Workload
from mini_infer_operator.resource import InferenceService


def deployment(
    service: InferenceService, workload: Workload, template: Mapping[str, Any], times: RolloutTimes
) -> Manifest:
    """Returns the Deployment of one role and revision."""
    labels = selector(service, workload.role, workload.revision)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": child_metadata(
            service, workload_name(service.metadata.name, workload.role, workload.revision), labels
        ),
        "spec": {
            "replicas": workload.replicas,
            "minReadySeconds": int(times.min_ready.total_seconds()),
            # must be above minReadySeconds; our own deadline is in the service's status
            "progressDeadlineSeconds": int((times.deadline + times.min_ready).total_seconds()),
            "selector": {"matchLabels": labels},
            "template": template,
        },
    }
