"""The interface of endpoint sources: each publishes the whole list whenever it changes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from mini_infer_contract.launch import Endpoint, PendingEngine
from mini_infer_gateway.endpoints.canary import Canary
from mini_infer_gateway.endpoints.service_status import ServiceStatus


@dataclass(frozen=True, slots=True)
class Listed:
    """An existing endpoint, and whether its source reports it as ready."""

    endpoint: Endpoint
    ready: bool = True


@dataclass(frozen=True, slots=True)
class Service:
    """An InferenceService's identity and model name, from the object itself, which only its owner can write."""

    name: str
    """The service as namespace/name."""
    created: str
    """RFC 3339 time of creation: the oldest service owns a bare model name that several claim."""
    model: str
    """The served model name that the service's spec claims."""
    starts_on_demand: bool = False
    """True if it may have no engine, and one is started when a request waits for it."""
    canary: Canary | None = None
    """The revision that is being judged, or that was rolled back and is going; None if there is none."""


class Publish(Protocol):
    """Takes the whole list of endpoints, and of services if the source knows them independently of their endpoints."""

    def __call__(self, listed: Sequence[Listed], services: Sequence[Service] | None = None) -> None:
        """Replaces the lists. `services` None: trust what endpoints say about their services."""


class EndpointSource(Protocol):
    """A source of endpoints. It runs until cancelled; its first call of `publish` means that it has synced."""

    async def run(self, publish: Publish) -> None:
        """Calls `publish` with all endpoints, once at the start and after each change."""


@dataclass(frozen=True, slots=True)
class Reports:
    """The state of services and of engines that are no endpoints: for people, routing does not read it."""

    services: Mapping[str, ServiceStatus] = field(default_factory=dict)
    """The status of services by namespace/name."""
    pending: Sequence[PendingEngine] = ()


NO_REPORTS = Reports()


@runtime_checkable
class Reporting(Protocol):
    """A source that knows more of services than their endpoints."""

    def reports(self) -> Reports:
        """Returns what the source has last seen."""
        ...
