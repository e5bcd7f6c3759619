"""Renders the Secret with which the peers of one service authenticate to each other, and its mount in pods. Pure."""

from base64 import b64encode
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from mini_infer_contract.peer_auth import PeerSecret
from mini_infer_operator.objects.metadata import Manifest, child_metadata
from mini_infer_operator.resource import ANNOTATION_PEER_AUTH, InferenceService

_KEY: Final = "key"
_MOUNT_PATH: Final = "/etc/mini-infer/peers"
_VOLUME: Final = "mini-infer-peers"
PEER_KEY_FILE: Final = f"{_MOUNT_PATH}/{_KEY}"
PEERS_MOUNT: Final = {"name": _VOLUME, "mountPath": _MOUNT_PATH, "readOnly": True}

MISSED_AFTER: Final = timedelta(seconds=30)
"""Age from which a pod that has not created its containers may be waiting for the Secret."""
_MAKING: Final = ("ContainerCreating", "CreateContainerConfigError", "PodInitializing")


def peers_secret_name(service: str) -> str:
    """Returns the name of the Secret of one service, in the service's namespace."""
    return f"{service}-peers"


def peers_volume(service: InferenceService) -> dict[str, Any]:
    """Returns the volume for an engine pod; without the Secret the pod's containers do not start."""
    return {"name": _VOLUME, "secret": {"secretName": peers_secret_name(service.metadata.name)}}


def peers_secret(service: InferenceService, root: PeerSecret) -> Manifest:
    """Returns the Secret; its key depends only on the root secret and on the service's namespace and name."""
    namespace, name = service.metadata.namespace, service.metadata.name
    key = root.for_service(f"{namespace}/{name}").hex()
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": child_metadata(service, peers_secret_name(name), {}),
        "type": "Opaque",
        "data": {_KEY: b64encode(key.encode()).decode()},
    }


def needs_peers_secret(manifests: Iterable[Manifest]) -> bool:
    """Returns True if a revision among these mounts the Secret; those of older operators do not."""
    templates = (manifest["data"]["template"] for manifest in manifests if manifest["kind"] == "ControllerRevision")
    return any(ANNOTATION_PEER_AUTH in template.get("metadata", {}).get("annotations", {}) for template in templates)


def may_miss_secret(pod: Mapping[str, Any], now: datetime) -> bool:
    """Returns True if the pod may wait for the Secret; a pod's status does not say which volume is missing."""
    if ANNOTATION_PEER_AUTH not in pod["metadata"].get("annotations", {}):
        return False
    created = datetime.fromisoformat(pod["metadata"]["creationTimestamp"])
    statuses = pod.get("status", {}).get("containerStatuses", ())
    reasons = {status.get("state", {}).get("waiting", {}).get("reason") for status in statuses}
    return bool(reasons) and reasons <= {*_MAKING} and now - created >= MISSED_AFTER
