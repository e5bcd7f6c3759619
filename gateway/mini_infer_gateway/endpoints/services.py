"""Converts an InferenceService to what the gateway reads of it: name, age, claimed model name and status. Pure."""

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from mini_infer_gateway.endpoints.base import Service
from mini_infer_gateway.endpoints.service_status import ServiceStatus, canary_of, read_status


class _Metadata(msgspec.Struct, rename="camel"):
    name: str
    namespace: str
    creation_timestamp: str = ""


class _Model(msgspec.Struct):
    name: str | None = None


class _Spec(msgspec.Struct):
    model: _Model = msgspec.field(default_factory=_Model)
    unified: Any = None
    prefill: Any = None
    decode: Any = None

    @property
    def starts_on_demand(self) -> bool:
        """True if the planner may stop all engines of a role. The API server has checked the fields' types."""
        roles = [role.get("scaling") for role in (self.unified, self.prefill, self.decode) if isinstance(role, dict)]
        planned = [one for one in roles if isinstance(one, dict) and one.get("owner") != "Autoscaler"]
        return any(one.get("minReplicas") == 0 for one in planned)


class _InferenceService(msgspec.Struct):
    metadata: _Metadata
    spec: _Spec = msgspec.field(default_factory=_Spec)


def service_of(manifest: dict[str, Any]) -> Service:
    """Returns the service of a stored InferenceService. Raises msgspec.ValidationError if `manifest` is none."""
    service = msgspec.convert(manifest, _InferenceService)
    name = f"{service.metadata.namespace}/{service.metadata.name}"
    model = service.spec.model.name or service.metadata.name
    return Service(name, service.metadata.creation_timestamp, model, service.spec.starts_on_demand)


@dataclass(frozen=True, slots=True)
class SeenService:
    """An InferenceService's identity and canary for routing, and its status for people."""

    service: Service
    status: ServiceStatus


def seen_service(manifest: dict[str, Any]) -> SeenService:
    """Returns the service and its status. Raises msgspec.ValidationError if `manifest` is no InferenceService."""
    status = read_status(manifest.get("status"))
    return SeenService(replace(service_of(manifest), canary=canary_of(status)), status)
