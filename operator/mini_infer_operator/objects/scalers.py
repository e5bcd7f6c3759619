"""Resolves InferenceScalers: which role's replicas each one sets, and its status. Pure; sends no requests."""

from collections.abc import Mapping, Sequence
from typing import Any

from mini_infer_operator.resource import LABEL_ROLE, LABEL_SERVICE

Object = Mapping[str, Any]


def scaled_spec(spec: Mapping[str, Any], scalers: Sequence[Object]) -> dict[str, Any]:
    """Returns a service's spec with its scalers' replicas in place of the roles' own."""
    scaled = dict(spec)
    for role, scaler in _by_role(scalers).items():
        replicas = scaler["spec"].get("replicas")
        if isinstance(spec.get(role), Mapping) and replicas is not None:
            scaled[role] = {**spec[role], "replicas": replicas}
    return scaled


def initial_replicas(scaler: Object, spec: Mapping[str, Any]) -> int | None:
    """Returns the replicas that a scaler without a number starts with: its role's. None if it has one, or no such role.

    Autoscalers treat an object without a number as switched off.
    """
    role = spec.get(scaler["spec"]["role"])
    if scaler["spec"].get("replicas") is not None or not isinstance(role, Mapping):
        return None
    return int(role.get("replicas", 1))


def scaler_status(
    scaler: Object, scalers: Sequence[Object], spec: Mapping[str, Any], status: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the status of `scaler`, one of the `scalers` of a service with this spec and status."""
    service, role = scaler["spec"]["service"], scaler["spec"]["role"]
    if not isinstance(spec.get(role), Mapping):
        return {"message": f"InferenceService {service} has no {role} engines"}
    scaling = spec[role].get("scaling")
    if isinstance(scaling, Mapping) and scaling.get("owner") != "Autoscaler":
        return {"message": f"the planner sets the number of {role} engines of {service} (scaling.owner)"}
    first = _by_role(scalers)[role]["metadata"]["name"]
    if first != scaler["metadata"]["name"]:
        return {"message": f"InferenceScaler {first} sets the number of {role} engines of {service} already"}
    counted = {item["name"]: item.get("replicas", 0) for item in status.get("roles", ())}
    return {"replicas": counted.get(role, 0), "selector": f"{LABEL_SERVICE}={service},{LABEL_ROLE}={role}"}


def lost_scaler_status(scaler: Object) -> dict[str, Any]:
    """Returns the status of a scaler whose service does not exist."""
    namespace, service = scaler["metadata"]["namespace"], scaler["spec"]["service"]
    return {"message": f"there is no InferenceService {service} in namespace {namespace}"}


def _by_role(scalers: Sequence[Object]) -> dict[str, Object]:
    """Returns the scaler in force for each role: the oldest if there are several."""
    order = sorted(scalers, key=lambda s: (s["metadata"].get("creationTimestamp", ""), s["metadata"]["name"]))
    return {scaler["spec"]["role"]: scaler for scaler in reversed(order)}
