"""What was seen of a service's engines: plain data, made by a backend and read by planning and status. Pure.

Whatever planning has to remember stands here as a time that somebody else keeps (the API server, a supervised process),
so an operator that was just started plans as one that runs for days.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ObservedWorkload:
    """The engines of one role and revision, as seen."""

    role: str
    revision: str
    replicas: int
    """Asked for."""
    available: int
    """Able to answer."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why some engines do not get ready."""

    reason: str
    """Out of the closed set (contract)."""
    message: str
    """Who fails, and Kubernetes' or the engine's own words."""


@dataclass(frozen=True, slots=True)
class Observed:
    """All that planning and status need to know of the world."""

    workloads: Sequence[ObservedWorkload] = ()
    failures: Sequence[Failure] = ()
    """Why engines do not come up, the most telling first."""
    default_image: str = "local"
    """The engine's image of services that name none."""
