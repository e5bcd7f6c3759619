"""The part of an InferenceService's status that the gateway reads: for the console, and the canary for routing."""

from typing import Any

import msgspec

from mini_infer_gateway.endpoints.canary import Canary


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


class CanaryStatus(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The canary of an InferenceService, as its status describes it."""

    phase: str = ""
    revision: str = ""
    stable_revision: str = ""
    weight: int = 0
    mirror: int = 0
    replay: bool = False
    message: str = ""


class ServiceStatus(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The fields of the status that are shown."""

    conditions: list[ServiceCondition] = []
    model: str | None = None
    revision: str | None = None
    replicas: int = 0
    ready_replicas: int = 0
    roles: list[ServiceRole] = []
    canary: CanaryStatus | None = None


def read_status(status: dict[str, Any] | None) -> ServiceStatus:
    """Returns the status; empty if it cannot be read, since what people are shown must not change the routing."""
    try:
        return msgspec.convert(status or {}, ServiceStatus)
    except msgspec.ValidationError:
        return ServiceStatus()


def canary_of(status: ServiceStatus) -> Canary | None:
    """Returns the revision that gets only a share of the requests; None if all revisions are equal.

    One that was rolled back gets no requests for as long as engines of it are left.
    """
    found = status.canary
    if found is None or not found.revision or found.phase not in ("Running", "RolledBack"):
        return None
    if found.phase == "RolledBack":
        return Canary(found.revision)
    return Canary(found.revision, _share(found.weight), _share(found.mirror), found.replay)


def _share(percent: int) -> float:
    return min(100, max(0, percent)) / 100
