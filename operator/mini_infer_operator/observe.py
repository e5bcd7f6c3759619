"""What was seen of a service's engines: plain data, made by a backend and read by planning and status. Pure.

Whatever planning has to remember stands here as a time that somebody else keeps (the API server, a supervised process),
so an operator that was just started plans as one that runs for days.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class ObservedEngine:
    """One engine that can be told from its siblings."""

    name: str
    ready: bool
    created: datetime
    draining_since: datetime | None = None
    """Since when gateways leave it alone, because it is to go."""
    running: int | None = None
    """Requests that it runs, as it says itself; None: it was not asked, or did not answer."""
    grace_s: float = 300.0
    """How long it may take to end its requests."""
    index: int | None = None
    """Where the highest index goes first: which this is. None: somebody may choose who goes."""


@dataclass(frozen=True, slots=True)
class ObservedWorkload:
    """The engines of one role and revision, as seen."""

    role: str
    revision: str
    replicas: int
    """Asked for."""
    ready: int
    """Able to answer now."""
    available: int
    """Able to answer, and so for at least the service's minReadySeconds."""
    worked: bool = True
    """Whether one of them was ever available."""
    unready_since: datetime | None = None
    """Since when nothing has changed for those that are not ready: the youngest of them. None: all are ready."""
    progressed_at: datetime | None = None
    """When the last of them was created or became ready."""
    available_at: datetime | None = None
    """When the next of those that are ready becomes available; None where somebody else tells."""
    unschedulable_since: datetime | None = None
    """Since when one of them finds no node with room for it."""
    available_by_index: Sequence[bool] | None = None
    """Where the highest index goes first: which are available. None: those that cannot answer go first."""
    engines: Sequence[ObservedEngine] = ()
    """Each of them; empty where they need not be drained before they go."""


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
    look_again_s: float = float("inf")
    """When there may be something else to see although nothing tells."""
    claimants: Sequence[str] = ()
    """Services that claim this one's model name, as namespace/name, the owner first; empty where nobody looked."""
