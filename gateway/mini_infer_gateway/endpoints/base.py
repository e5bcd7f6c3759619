"""What every source of endpoints gives: the whole list, each time it changes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mini_infer_contract.launch import Endpoint


@dataclass(frozen=True, slots=True)
class Listed:
    """An endpoint that exists, and whether its source says that it serves."""

    endpoint: Endpoint
    ready: bool = True


@dataclass(frozen=True, slots=True)
class Service:
    """An InferenceService, as nobody but its owner can write it."""

    name: str
    """namespace/name."""
    created: str
    """RFC 3339: the oldest service owns a bare model name that several claim."""
    model: str
    """The served model name that its spec claims."""


class Publish(Protocol):
    """Takes the whole list of endpoints, and of services where the source knows them apart from their endpoints."""

    def __call__(self, listed: Sequence[Listed], services: Sequence[Service] | None = None) -> None:
        """`services` None: the endpoints' own word on their services is to be trusted."""


class EndpointSource(Protocol):
    """Runs until cancelled; the first call of `publish` means that the source has synced."""

    async def run(self, publish: Publish) -> None:
        """Calls `publish` with all endpoints, once at the start and after each change."""
