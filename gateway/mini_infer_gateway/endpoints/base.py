"""What every source of endpoints gives: the whole list, each time it changes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from mini_infer_contract.launch import Endpoint


@dataclass(frozen=True, slots=True)
class Listed:
    """An endpoint that exists, and whether its source says that it serves."""

    endpoint: Endpoint
    ready: bool = True


Publish = Callable[[Sequence[Listed]], None]


class EndpointSource(Protocol):
    """Runs until cancelled; the first call of `publish` means that the source has synced."""

    async def run(self, publish: Publish) -> None:
        """Calls `publish` with all endpoints, once at the start and after each change."""
