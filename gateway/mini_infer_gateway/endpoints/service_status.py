"""The part of an InferenceService's status that the console shows; routing reads none of it."""

from typing import Any

import msgspec


class ServiceCondition(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """One condition of an InferenceService's status, with the fields of metav1.Condition that people read."""

    type: str
    status: str
    reason: str = ""
    message: str = ""
    last_transition_time: str = ""


class ServiceRole(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The engines of one role of an InferenceService, as its status counts them."""

    name: str
    replicas: int = 0
    ready: str = ""
    """Ready and wanted engines, such as 1/2."""
    gpus: int = 0


class ServiceStatus(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The fields of the status that are shown."""

    conditions: list[ServiceCondition] = []
    model: str | None = None
    revision: str | None = None
    replicas: int = 0
    ready_replicas: int = 0
    roles: list[ServiceRole] = []


def read_status(status: dict[str, Any] | None) -> ServiceStatus:
    """Returns the status; empty if it cannot be read, since what people are shown must not change the routing."""
    try:
        return msgspec.convert(status or {}, ServiceStatus)
    except msgspec.ValidationError:
        return ServiceStatus()
