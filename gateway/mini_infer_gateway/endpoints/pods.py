"""Converts a pod, as the API server stores it, to an endpoint, or to the reason why it is none. Pure.

The watch is in kubernetes_watch.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from mini_infer_contract.launch import EVENTS_PORT, HTTP_PORT, REPLAY_PORT, Endpoint, PendingEngine
from mini_infer_contract.resource_names import (
    ANNOTATION_MODEL,
    ANNOTATION_PEER_AUTH,
    LABEL_CURRENT_ROLE,
    LABEL_DRAINING,
    LABEL_GROUP,
    LABEL_REVISION,
    LABEL_ROLE,
    LABEL_SERVICE,
    LABEL_WORKER_INDEX,
)
from mini_infer_gateway.endpoints.base import Listed

DEFAULT_PORTS = {"http": HTTP_PORT, "events": EVENTS_PORT, "replay": REPLAY_PORT}
"""Ports of a pod whose container ports have no names. The transfer port counts only if named: a unified engine does not
listen on it.
"""
LEADER_INDEX = "0"
LONGEST_REASON = 300
"""Characters of a sentence of Kubernetes that are kept for each pod."""


class Metadata(msgspec.Struct, rename="camel"):
    """The fields of a pod's metadata that the gateway reads."""

    name: str = ""
    namespace: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    deletion_timestamp: str | None = None


class ContainerPort(msgspec.Struct, rename="camel"):
    """One port of a container."""

    container_port: int
    name: str = ""


class Container(msgspec.Struct):
    """The fields of a container that the gateway reads."""

    ports: list[ContainerPort] = []


class PodSpec(msgspec.Struct):
    """The fields of a pod's spec that the gateway reads."""

    containers: list[Container] = []


class Condition(msgspec.Struct):
    """One of a pod's conditions."""

    type: str
    status: str
    message: str | None = None


class Detail(msgspec.Struct):
    """The reason of a container's state, with a sentence."""

    reason: str | None = None
    message: str | None = None


class ContainerState(msgspec.Struct):
    """The state of a container that does not run."""

    waiting: Detail | None = None
    terminated: Detail | None = None


class ContainerStatus(msgspec.Struct):
    """The fields of a container's status that the gateway reads."""

    ready: bool = False
    state: ContainerState = msgspec.field(default_factory=ContainerState)


class PodStatus(msgspec.Struct, rename="camel"):
    """The fields of a pod's status that the gateway reads."""

    phase: str = ""
    pod_ip: str = msgspec.field(default="", name="podIP")
    conditions: list[Condition] = []
    init_container_statuses: list[ContainerStatus] = []
    container_statuses: list[ContainerStatus] = []


class Pod(msgspec.Struct):
    """The fields of a pod that the gateway reads."""

    metadata: Metadata
    spec: PodSpec = msgspec.field(default_factory=PodSpec)
    status: PodStatus = msgspec.field(default_factory=PodStatus)


def listed_from_pod(pod: Pod) -> Listed | None:
    """Returns the pod's endpoint. None if it has no address yet, is finished, names no model, or is a group's worker.

    Only the leader of a group over several nodes answers requests. The age of its service, which decides the names that
    it may answer to, is not read from the pod.
    """
    labels, annotations = pod.metadata.labels, pod.metadata.annotations
    model = annotations.get(ANNOTATION_MODEL, "")
    if labels.get(LABEL_WORKER_INDEX, LEADER_INDEX) != LEADER_INDEX:
        return None
    if not pod.status.pod_ip or pod.status.phase in ("Succeeded", "Failed") or not model:
        return None
    ports = {port.name: port.container_port for container in pod.spec.containers for port in container.ports}
    if "http" not in ports:
        # Names that say nothing leave the contract's ports; once `http` is named, what is not named is not there.
        ports = DEFAULT_PORTS
    draining = labels.get(LABEL_DRAINING) == "true" or pod.metadata.deletion_timestamp is not None
    host = f"[{pod.status.pod_ip}]" if ":" in pod.status.pod_ip else pod.status.pod_ip
    endpoint = Endpoint(
        name=f"{pod.metadata.namespace}/{pod.metadata.name}",
        url=f"http://{host}:{ports['http']}",
        model=model,
        service=f"{pod.metadata.namespace}/{labels[LABEL_SERVICE]}" if LABEL_SERVICE in labels else "",
        role=_role(labels),
        revision=labels.get(LABEL_REVISION, ""),
        events=f"tcp://{host}:{ports['events']}" if "events" in ports else "",
        replay=f"tcp://{host}:{ports['replay']}" if "replay" in ports else "",
        transfer=f"tcp://{host}:{ports['transfer']}" if "transfer" in ports else "",
        group=labels.get(LABEL_GROUP, ""),
        # Nothing else is taken from a pod: the root secret's own keys are for endpoints that the operator of the
        # gateway lists, and a service's keys are worth something in its own namespace alone.
        peer_auth="service" if annotations.get(ANNOTATION_PEER_AUTH) == "service" else "",
        draining=draining,
    )
    ready = any(condition.type == "Ready" and condition.status == "True" for condition in pod.status.conditions)
    return Listed(endpoint, ready=ready and not draining)


@dataclass(frozen=True, slots=True)
class SeenPod:
    """The endpoint of a pod, and the reason why it is not ready."""

    listed: Listed | None
    pending: PendingEngine | None


def seen_pod(manifest: dict[str, Any]) -> SeenPod | None:
    """Returns what a pod shows; None if it is of no interest. Raises msgspec.ValidationError if it is no pod."""
    pod = msgspec.convert(manifest, Pod)
    listed, pending = listed_from_pod(pod), pending_from_pod(pod)
    return SeenPod(listed, pending) if listed or pending else None


def pending_from_pod(pod: Pod) -> PendingEngine | None:
    """Returns the engine of a pod that is not ready, with the reason. None if it is ready, ends, or is a group's
    worker.
    """
    labels, status = pod.metadata.labels, pod.status
    if labels.get(LABEL_WORKER_INDEX, LEADER_INDEX) != LEADER_INDEX or status.phase == "Succeeded":
        return None
    ready = any(condition.type == "Ready" and condition.status == "True" for condition in status.conditions)
    if ready or labels.get(LABEL_DRAINING) == "true" or pod.metadata.deletion_timestamp is not None:
        return None
    return PendingEngine(
        name=f"{pod.metadata.namespace}/{pod.metadata.name}",
        service=f"{pod.metadata.namespace}/{labels[LABEL_SERVICE]}" if LABEL_SERVICE in labels else "",
        role=_role(labels),
        revision=labels.get(LABEL_REVISION, ""),
        reason=_reason(status)[:LONGEST_REASON],
    )


def _role(labels: dict[str, str]) -> str:
    """Returns the role that the pod's engine has now."""
    return labels.get(LABEL_CURRENT_ROLE) or labels.get(LABEL_ROLE, "unified")


def _reason(status: PodStatus) -> str:
    """Returns why a pod is not ready: the first of its containers' states and its conditions that says so."""
    for container in (*status.init_container_statuses, *status.container_statuses):
        detail = container.state.waiting or container.state.terminated
        if detail and not container.ready and detail.reason not in (None, "Completed"):
            return f"{detail.reason}: {detail.message}" if detail.message else str(detail.reason)
    for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready"):
        for condition in status.conditions:
            if condition.type == kind and condition.status != "True" and condition.message:
                return condition.message
    return status.phase or "Pending"
