"""InferenceScalers: whose number of engines they set, and what they are told. Pure; knows no requests."""

from collections.abc import Mapping, Sequence
from typing import Any

from mini_infer_operator.resource import LABEL_ROLE, LABEL_SERVICE

Object = Mapping[str, Any]


def scaled_spec(spec: Mapping[str, Any], scalers: Sequence[Object]) -> dict[str, Any]:
    """A service's spec with the numbers of its scalers in place of its roles' own."""
    scaled = dict(spec)
    for role, scaler in _by_role(scalers).items():
        replicas = scaler["spec"].get("replicas")
        if isinstance(spec.get(role), Mapping) and replicas is not None:
            scaled[role] = {**spec[role], "replicas": replicas}
    return scaled


def initial_replicas(scaler: Object, spec: Mapping[str, Any]) -> int | None:
    """What a scaler that says no number begins with: its role's. None where it says one, or has no role to count.

    Autoscalers take an object without a number for one that is switched off.
    """
    role = spec.get(scaler["spec"]["role"])
    if scaler["spec"].get("replicas") is not None or not isinstance(role, Mapping):
        return None
    return int(role.get("replicas", 1))


def scaler_status(
    scaler: Object, scalers: Sequence[Object], spec: Mapping[str, Any], status: Mapping[str, Any]
) -> dict[str, Any]:
    """What one of the `scalers` of a service with this spec and status is told."""
    service, role = scaler["spec"]["service"], scaler["spec"]["role"]
    if not isinstance(spec.get(role), Mapping):
        return {"message": f"InferenceService {service} has no {role} engines"}
    first = _by_role(scalers)[role]["metadata"]["name"]
    if first != scaler["metadata"]["name"]:
        return {"message": f"InferenceScaler {first} sets the number of {role} engines of {service} already"}
    counted = {item["name"]: item.get("replicas", 0) for item in status.get("roles", ())}
    return {"replicas": counted.get(role, 0), "selector": f"{LABEL_SERVICE}={service},{LABEL_ROLE}={role}"}


def _by_role(scalers: Sequence[Object]) -> dict[str, Object]:
    """Of several for one role the oldest counts."""
    order = sorted(scalers, key=lambda s: (s["metadata"].get("creationTimestamp", ""), s["metadata"]["name"]))
    return {scaler["spec"]["role"]: scaler for scaler in reversed(order)}
