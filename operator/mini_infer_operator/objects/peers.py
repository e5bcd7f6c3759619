"""The Secret with which the peers of one service prove that they belong to it, and how engine pods mount it. Pure."""

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
"""A pod that was scheduled so long ago and has not made its containers may wait for the Secret."""
_MAKING: Final = ("ContainerCreating", "CreateContainerConfigError", "PodInitializing")


def peers_secret_name(service: str) -> str:
    """Of the Secret of one service, in its namespace."""
    return f"{service}-peers"


def peers_volume(service: InferenceService) -> dict[str, Any]:
    """The volume of an engine pod; without the Secret its containers are not started."""
    return {"name": _VOLUME, "secret": {"secretName": peers_secret_name(service.metadata.name)}}


def peers_secret(service: InferenceService, root: PeerSecret) -> Manifest:
    """The Secret, whose value depends on the root secret and on the service's name alone."""
    namespace, name = service.metadata.namespace, service.metadata.name
    key = root.for_service(f"{namespace}/{name}").hex()
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": child_metadata(service, peers_secret_name(name), {}),
        "type": "Opaque",
        "data": {_KEY: b64encode(key.encode()).decode()},
    }


def wants_peers_secret(manifests: Iterable[Manifest]) -> bool:
    """Returns True if a revision among these mounts the Secret; those of older operators do not."""
    templates = (manifest["data"]["template"] for manifest in manifests if manifest["kind"] == "ControllerRevision")
    return any(ANNOTATION_PEER_AUTH in template.get("metadata", {}).get("annotations", {}) for template in templates)


def may_miss_secret(pod: Mapping[str, Any], now: datetime) -> bool:
    """Returns True if the pod may wait for the Secret: it does not say what a volume that cannot be mounted lacks."""
    if ANNOTATION_PEER_AUTH not in pod["metadata"].get("annotations", {}):
        return False
    created = datetime.fromisoformat(pod["metadata"]["creationTimestamp"])
    statuses = pod.get("status", {}).get("containerStatuses", ())
    reasons = {status.get("state", {}).get("waiting", {}).get("reason") for status in statuses}
    return bool(reasons) and reasons <= {*_MAKING} and now - created >= MISSED_AFTER
