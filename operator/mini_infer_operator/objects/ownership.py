"""Determines the service that a live object belongs to, and its revision. Pure.

Like all controllers of Kubernetes, ours adopts an object without a controller that has its labels and selector:
`kubectl delete --cascade=orphan` leaves such objects, and `mini-infer plan | kubectl apply` creates them.
"""

from collections.abc import Mapping
from typing import Any

from mini_infer_operator.resource import LABEL_REVISION, LABEL_ROLE, LABEL_SERVICE, InferenceService

Object = Mapping[str, Any]


def belongs(live: Object, service: InferenceService) -> bool:
    """Returns True if `live` belongs to this service, or has no controller and the service may adopt it."""
    owners = live["metadata"].get("ownerReferences", ())
    if any(owner.get("uid") == service.metadata.uid for owner in owners):
        return True
    if any(owner.get("controller") for owner in owners):
        return False
    return identity_labels(live).get(LABEL_SERVICE) == service.metadata.name


def revision_key(live: Object) -> tuple[str, str]:
    """Returns the role and revision of a Deployment, a LeaderWorkerSet or a ControllerRevision."""
    labels = identity_labels(live)
    return str(labels.get(LABEL_ROLE, "")), str(labels.get(LABEL_REVISION, ""))


def identity_labels(live: Object) -> Mapping[str, Any]:
    """Returns the labels that identify an object, from an immutable place if it has one, or else its own labels.

    A Deployment's selector and a ControllerRevision's data are immutable. A LeaderWorkerSet's are the labels of its
    pods: changing these would recreate the pods.
    """
    selector = live.get("spec", {}).get("selector") or {}
    if "batch.kubernetes.io/controller-uid" in selector.get("matchLabels", {}):  # of a Job, which has chosen it itself
        return dict(live["metadata"].get("labels", {}))
    if "matchLabels" in selector:
        return dict(selector["matchLabels"])
    if LABEL_SERVICE in selector:  # of a Service
        return dict(selector)
    leader = live.get("spec", {}).get("leaderWorkerTemplate", {}).get("leaderTemplate", {})
    if LABEL_SERVICE in (labels := leader.get("metadata", {}).get("labels", {})):
        return dict(labels)
    frozen = (live.get("data") or {}).get("template", {}).get("metadata", {}).get("labels", {})
    return dict(frozen if LABEL_SERVICE in frozen else live["metadata"].get("labels", {}))
