"""What the API server holds, read: observed counts, frozen templates, reasons why pods fail, and comparison. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mini_infer_contract.resources import LABEL_REVISION, LABEL_ROLE, parse_quantity
from mini_infer_operator.observe import Observed, ObservedWorkload

Object = Mapping[str, Any]
HARMLESS_WAITS = {"ContainerCreating", "PodInitializing"}
_QUANTITY_MAPS = {"requests", "limits"}


def observed_of(deployments: Iterable[Object], pods: Iterable[Object], default_image: str) -> Observed:
    """Counts from the Deployments, failures from the pods."""
    workloads = [
        ObservedWorkload(
            role=_label(deployment, LABEL_ROLE),
            revision=_label(deployment, LABEL_REVISION),
            replicas=deployment["spec"].get("replicas", 1),
            available=deployment.get("status", {}).get("availableReplicas", 0),
        )
        for deployment in deployments
        if "deletionTimestamp" not in deployment["metadata"]
    ]
    failures = [f"{pod['metadata']['name']}: {why}" for pod in pods if (why := pod_failure(pod))]
    return Observed(workloads, sorted(failures)[:3], default_image)


def frozen_templates(deployments: Iterable[Object], revisions: Iterable[Object]) -> dict[tuple[str, str], Object]:
    """The pod template of each revision: as frozen, or as it runs where the frozen one was deleted."""
    templates = {_revision_key(d): d["spec"]["template"] for d in deployments}
    return templates | {_revision_key(r): r["data"]["template"] for r in revisions}


def pod_failure(pod: Object) -> str | None:
    """Why a pod does not get ready, if something is wrong with it, in Kubernetes' words."""
    if "deletionTimestamp" in pod["metadata"]:
        return None
    status = pod.get("status", {})
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"{condition.get('reason', 'Unschedulable')}: {condition.get('message', '')}"
    for container in status.get("containerStatuses", ()):
        waiting = container.get("state", {}).get("waiting")
        if waiting and waiting.get("reason") not in HARMLESS_WAITS:
            last = container.get("lastState", {}).get("terminated", {})
            ended = f" (it ended with exit code {last['exitCode']}, {last.get('reason', '')})" if last else ""
            return f"{waiting.get('reason')}: {waiting.get('message', '')}{ended}"
    if status.get("phase") == "Failed":
        return f"{status.get('reason', 'Failed')}: {status.get('message', '')}"
    return None


def is_owned(live: Object, uid: str) -> bool:
    """Whether `live` belongs to the service with this uid."""
    return any(owner.get("uid") == uid for owner in live["metadata"].get("ownerReferences", ()))


def contains(live: Any, desired: Any, *, quantities: bool = False) -> bool:
    """Whether writing `desired` would change nothing: all it says is in `live`, which may say more.

    Lists must agree in length and order. Quantities are compared by value (the API server turns 0.25 into 250m), and
    an empty value equals an absent one.
    """
    if isinstance(desired, Mapping):
        if not isinstance(live, Mapping):
            return not desired
        return all(contains(live.get(k), v, quantities=quantities or k in _QUANTITY_MAPS) for k, v in desired.items())
    if isinstance(desired, Sequence) and not isinstance(desired, str):
        live = live or []
        return len(live) == len(desired) and all(map(contains, live, desired))
    if quantities and live is not None:
        return parse_quantity(live) == parse_quantity(desired)
    return bool(live == desired or (live is None and desired == ""))


def _label(item: Object, label: str) -> str:
    return str(item["metadata"].get("labels", {}).get(label, ""))


def _revision_key(item: Object) -> tuple[str, str]:
    return _label(item, LABEL_ROLE), _label(item, LABEL_REVISION)
