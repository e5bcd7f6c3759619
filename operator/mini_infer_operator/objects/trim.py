"""Trims objects to the parts that reconciling reads, before they are kept in memory. Pure.

A new version of an object that is the same once trimmed changes nothing for its service, and causes no pass.
"""

from collections.abc import Mapping
from typing import Any

from mini_infer_operator.resource import FIELD_MANAGER

_POD_METADATA = ("name", "namespace", "uid", "creationTimestamp", "deletionTimestamp", "labels")
_POD_SPEC = ("nodeName", "terminationGracePeriodSeconds")
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_WITH_DRIFT = {"Deployment", "LeaderWorkerSet", "Service", "PodDisruptionBudget", "NetworkPolicy"}
_NO_COPY = {"managedFields", "annotations", "resourceVersion"}
_STATUS_UNREAD = {"Service", "PodDisruptionBudget", "NetworkPolicy"}
_WORKLOADS = {"Deployment", "LeaderWorkerSet"}
_WORKLOAD_STATUS = ("readyReplicas", "availableReplicas")
_CONDITION = ("type", "status", "reason", "message")


def trimmed(kind: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the object without the parts that are never read, and without its version.

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
    kept = {**found, "metadata": short}
    if kind in _STATUS_UNREAD:
        kept.pop("status", None)
    elif kind in _WORKLOADS:
        kept["status"] = _workload_status(found.get("status") or {})
    return kept


def _workload_status(status: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the counts, and the conditions that planning or a failure's message reads, without their times."""
    conditions = [
        {key: condition[key] for key in _CONDITION if key in condition}
        for condition in status.get("conditions") or ()
        if condition["type"] == "ReplicaFailure" or condition.get("reason") == "NewReplicaSetAvailable"
    ]
    return {key: status[key] for key in _WORKLOAD_STATUS if key in status} | {"conditions": conditions}


def _annotations(metadata: Mapping[str, Any]) -> dict[str, str]:
    return {key: value for key, value in (metadata.get("annotations") or {}).items() if key != _LAST_APPLIED}
