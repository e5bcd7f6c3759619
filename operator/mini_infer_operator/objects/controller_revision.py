"""The ControllerRevision that keeps a revision's pod templates as they were first rendered (docs/adr/0003)."""

from collections.abc import Mapping
from typing import Any

from mini_infer_operator.objects.metadata import Manifest, child_metadata
from mini_infer_operator.objects.names import selector, workload_name
from mini_infer_operator.plan.plan import Workload
from mini_infer_operator.resource import InferenceService


def controller_revision(service: InferenceService, workload: Workload, frozen: Mapping[str, Any]) -> Manifest:
    """Returns the ControllerRevision of one role and revision; `frozen` is the result of `pod.frozen_pods`."""
    name = workload_name(service.metadata.name, workload.role, workload.revision)
    return {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": child_metadata(service, name, selector(service, workload.role, workload.revision)),
        "revision": 1,  # content is found by name; there is no order among revisions
        "data": dict(frozen),
    }
