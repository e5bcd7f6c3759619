"""Trims objects to the parts that reconciling reads, before they are kept in memory. Pure."""

from collections.abc import Mapping
from typing import Any

from mini_infer_operator.resource import FIELD_MANAGER

_POD_METADATA = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp", "deletionTimestamp", "labels")
_POD_SPEC = ("nodeName", "terminationGracePeriodSeconds")
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_WITH_DRIFT = {"Deployment", "LeaderWorkerSet", "Service", "PodDisruptionBudget", "NetworkPolicy"}
_NO_COPY = {"managedFields", "annotations"}


def trimmed(kind: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the object without the parts that are never read.

    For kinds that drift.py examines, `managedFields` keeps the fields of `spec` that managers other than the operator
    wrote, and `metadata.ownFields` lists those that the operator owns. For all kinds `metadata.lastApplied` is the time
    of the operator's own last write.
    """
    metadata = found["metadata"]
    if kind == "Pod":
        spec = {key: found["spec"][key] for key in _POD_SPEC if key in found["spec"]}
        short = {key: metadata[key] for key in _POD_METADATA if key in metadata}
        short["annotations"] = _annotations(metadata)
        return {"metadata": short, "spec": spec, "status": found.get("status", {})}
    short = {key: value for key, value in metadata.items() if key not in _NO_COPY}
    short["annotations"] = _annotations(metadata)
    fields = metadata.get("managedFields", ())
    ours = [entry["time"] for entry in fields if entry.get("manager") == FIELD_MANAGER and "time" in entry]
    if ours:
        short["lastApplied"] = max(ours)
    if kind in _WITH_DRIFT:
        written = [entry for entry in fields if "f:spec" in entry.get("fieldsV1", {})]
        short["managedFields"] = [
            {"manager": entry.get("manager", ""), "fieldsV1": {"f:spec": entry["fieldsV1"]["f:spec"]}}
            for entry in written
            if entry.get("manager") != FIELD_MANAGER
        ]
        if short["managedFields"]:
            short["ownFields"] = [e["fieldsV1"]["f:spec"] for e in written if e.get("manager") == FIELD_MANAGER]
    return {**found, "metadata": short}


def _annotations(metadata: Mapping[str, Any]) -> dict[str, str]:
    return {key: value for key, value in (metadata.get("annotations") or {}).items() if key != _LAST_APPLIED}
