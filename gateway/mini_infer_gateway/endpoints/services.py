"""Converts an InferenceService to what the gateway reads of it: its name, age and claimed model name. Pure."""

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
    """Returns the service of a stored InferenceService. Raises msgspec.ValidationError if `manifest` is none."""
    service = msgspec.convert(manifest, _InferenceService)
    name = f"{service.metadata.namespace}/{service.metadata.name}"
    return Service(name, service.metadata.creation_timestamp, service.spec.model.name or service.metadata.name)
