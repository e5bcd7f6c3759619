"""What the API server holds, read: observed counts, frozen templates, and comparison. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mini_infer_contract.resources import LABEL_REVISION, LABEL_ROLE, parse_quantity
from mini_infer_operator.objects.failures import failures_of
from mini_infer_operator.observe import Observed, ObservedWorkload

Object = Mapping[str, Any]
_QUANTITY_MAPS = {"requests", "limits"}


def observed_of(deployments: Iterable[Object], pods: Iterable[Object], default_image: str) -> Observed:
    """Counts from the Deployments; reasons why engines are not ready from Deployments and pods."""
    staying = [deployment for deployment in deployments if "deletionTimestamp" not in deployment["metadata"]]
    workloads = [
        ObservedWorkload(
            role=_label(deployment, LABEL_ROLE),
            revision=_label(deployment, LABEL_REVISION),
            replicas=deployment["spec"].get("replicas", 1),
            available=deployment.get("status", {}).get("availableReplicas", 0),
        )
        for deployment in staying
    ]
    return Observed(workloads, failures_of(staying, pods), default_image)


def frozen_templates(deployments: Iterable[Object], revisions: Iterable[Object]) -> dict[tuple[str, str], Object]:
    """The pod template of each revision: as frozen, or as it runs where the frozen one was deleted."""
    templates = {_revision_key(d): d["spec"]["template"] for d in deployments}
    return templates | {_revision_key(r): r["data"]["template"] for r in revisions}


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
