"""Renders the metadata of every child: name, labels, and the service that owns it."""

from collections.abc import Mapping
from typing import Any

from mini_infer_operator.objects.names import service_labels
from mini_infer_operator.resource import GROUP, KIND, VERSION, InferenceService

Manifest = dict[str, Any]


def child_metadata(service: InferenceService, name: str, labels: Mapping[str, str]) -> Manifest:
    """Returns the metadata of a child called `name`; `labels` are added to those that every child has."""
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
