"""An InferenceService as the gateway reads it: who it is, how old, and which model name it claims. Pure."""

from typing import Any

import msgspec

from mini_infer_gateway.endpoints.base import Service


class _Metadata(msgspec.Struct, rename="camel"):
    name: str
    namespace: str
    creation_timestamp: str = ""


class _Model(msgspec.Struct):
    name: str | None = None


class _Spec(msgspec.Struct):
    model: _Model = msgspec.field(default_factory=_Model)


class _InferenceService(msgspec.Struct):
    metadata: _Metadata
    spec: _Spec = msgspec.field(default_factory=_Spec)


def service_of(manifest: dict[str, Any]) -> Service:
    """The service that a stored InferenceService is. msgspec.ValidationError where it is none."""
    service = msgspec.convert(manifest, _InferenceService)
    name = f"{service.metadata.namespace}/{service.metadata.name}"
    return Service(name, service.metadata.creation_timestamp, service.spec.model.name or service.metadata.name)
