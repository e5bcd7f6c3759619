"""A plan as manifests: for each revision a ControllerRevision and a Deployment, for the service one Service."""

from collections.abc import Mapping
from typing import Any

from mini_infer_contract.launch import HTTP_PORT
from mini_infer_contract.resources import GROUP, KIND, LABEL_SERVICE, VERSION, InferenceService
from mini_infer_operator.objects.names import engines_service_name, selector, service_labels, workload_name
from mini_infer_operator.objects.pod import pod_template
from mini_infer_operator.plan import Plan, Workload

Manifest = dict[str, Any]
Templates = Mapping[tuple[str, str], Mapping[str, Any]]
"""Pod templates as once rendered, by role and revision."""


def render(service: InferenceService, plan: Plan, frozen: Templates, pull_policy: str | None) -> list[Manifest]:
    """Everything that should exist, in the order in which it is to be written.

    A revision that has a frozen template keeps it, so a newer operator that would render it differently rolls nothing.
    """
    manifests = [_engines_service(service)]
    for workload in plan.workloads:
        template = frozen.get((workload.role, workload.revision))
        if template is None and workload.launch is not None:
            template = pod_template(service, workload.role, workload.revision, workload.launch, pull_policy)
        if template is None:
            continue  # an older revision whose template is lost: it stays as it is until it is removed
        manifests += [_controller_revision(service, workload, template), _deployment(service, workload, template)]
    return manifests


def _metadata(service: InferenceService, name: str, labels: Mapping[str, str]) -> Manifest:
    metadata = {"name": name, "namespace": service.metadata.namespace, "labels": {**service_labels(service), **labels}}
    if not service.metadata.uid:  # not stored in a cluster: `mini-infer plan` shows what would be
        return metadata
    owner = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "name": service.metadata.name,
        "uid": service.metadata.uid,
        "controller": True,
    }
    return {**metadata, "ownerReferences": [owner]}


def _controller_revision(service: InferenceService, workload: Workload, template: Mapping[str, Any]) -> Manifest:
    name = workload_name(service.metadata.name, workload.role, workload.revision)
    return {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": _metadata(service, name, selector(service, workload.role, workload.revision)),
        "revision": 1,  # content is found by name; there is no order among revisions
        "data": {"template": template},
    }


def _deployment(service: InferenceService, workload: Workload, template: Mapping[str, Any]) -> Manifest:
    labels = selector(service, workload.role, workload.revision)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(service, workload_name(service.metadata.name, workload.role, workload.revision), labels),
        "spec": {
            "replicas": workload.replicas,
            "selector": {"matchLabels": labels},
            "template": template,
        },
    }


def _engines_service(service: InferenceService) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(service, engines_service_name(service.metadata.name), {}),
        "spec": {
            "selector": {LABEL_SERVICE: service.metadata.name},
            "ports": [{"name": "http", "port": HTTP_PORT, "targetPort": "http", "protocol": "TCP"}],
        },
    }
