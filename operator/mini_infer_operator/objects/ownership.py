"""Whose a live object is, and which revision it belongs to. Pure.

As all controllers of Kubernetes do, ours adopts an object without a controller that carries its labels and selector:
that is what `kubectl delete --cascade=orphan` leaves, and what `mini-infer plan | kubectl apply` makes.
"""

from collections.abc import Mapping
from typing import Any

from mini_infer_operator.resource import LABEL_REVISION, LABEL_ROLE, LABEL_SERVICE, InferenceService

Object = Mapping[str, Any]


def belongs(live: Object, service: InferenceService) -> bool:
    """Whether `live` is this service's, or nobody's and may be adopted by it."""
    owners = live["metadata"].get("ownerReferences", ())
    if any(owner.get("uid") == service.metadata.uid for owner in owners):
        return True
    if any(owner.get("controller") for owner in owners):
        return False
    return identity_labels(live).get(LABEL_SERVICE) == service.metadata.name


def revision_key(live: Object) -> tuple[str, str]:
    """Role and revision of a Deployment, a LeaderWorkerSet or a ControllerRevision."""
    labels = identity_labels(live)
    return str(labels.get(LABEL_ROLE, "")), str(labels.get(LABEL_REVISION, ""))


def identity_labels(live: Object) -> Mapping[str, Any]:
    """The labels that say what an object is, read where nobody can change them; its own labels where it has no such.

    A Deployment's selector and a ControllerRevision's data are immutable. Of a LeaderWorkerSet, the labels of its pods:
    to change these would make its pods anew.
    """
    selector = live.get("spec", {}).get("selector") or {}
    if "matchLabels" in selector:
        return dict(selector["matchLabels"])
    if LABEL_SERVICE in selector:  # of a Service
        return dict(selector)
    leader = live.get("spec", {}).get("leaderWorkerTemplate", {}).get("leaderTemplate", {})
    if LABEL_SERVICE in (labels := leader.get("metadata", {}).get("labels", {})):
        return dict(labels)
    frozen = (live.get("data") or {}).get("template", {}).get("metadata", {}).get("labels", {})
    return dict(frozen if LABEL_SERVICE in frozen else live["metadata"].get("labels", {}))
