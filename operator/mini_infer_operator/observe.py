"""Describes the observed engines of a service as plain data, made by a backend and read by planning and status. Pure.

Everything that planning has to remember is a time that is stored elsewhere (by the API server, or by a supervised
process), so an operator that was just started plans like one that has run for days.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from mini_infer_operator.resource import ModelCacheStatus


@dataclass(frozen=True, slots=True)
class ObservedEngine:
    """One engine that can be told apart from its siblings."""

    name: str
    ready: bool
    created: datetime
    draining_since: datetime | None = None
    """The time at which gateways were asked to stop routing to the engine, because it is to be removed; None if it
    stays.
    """
    running: int | None = None
    """The number of running requests that the engine reports; None if it was not asked, or did not answer."""
    grace_s: float = 300.0
    """Seconds that the engine may take to finish its requests."""
    index: int | None = None
    """The engine's index, if scale-down removes the highest index first; None if the removed engine can be chosen."""
    started_as: str = ""
    """The role of the workload that made the engine, which may have another now; empty if it cannot switch."""


@dataclass(frozen=True, slots=True)
class SwitchableEngine:
    """An engine that may change its role while it runs."""

    name: str
    role: str
    """The role that it has now."""
    revision: str
    ready: bool
    load: float = 0.0
    """The work that it still has, in requests; the least loaded engine switches first."""


@dataclass(frozen=True, slots=True)
class ObservedWorkload:
    """The engines of one role and revision, as observed."""

    role: str
    revision: str
    replicas: int
    """The number of engines asked for."""
    ready: int
    """The number of engines that can answer now."""
    available: int
    """The number of engines that have been able to answer for at least the service's minReadySeconds."""
    worked: bool = True
    """True if one of the engines was ever available."""
    unready_since: datetime | None = None
    """The time since which nothing has changed for engines that are not ready (the youngest counts); None if all are
    ready.
    """
    progressed_at: datetime | None = None
    """The time at which the last engine was created or became ready."""
    available_at: datetime | None = None
    """The time at which the next ready engine becomes available; None if the backend is notified of it."""
    unschedulable_since: datetime | None = None
    """The time since which an engine has found no node with room for it."""
    available_by_index: Sequence[bool] | None = None
    """The availability of each engine by index, if scale-down removes the highest index first; None if it removes
    engines that cannot answer first.
    """
    engines: Sequence[ObservedEngine] = ()
    """Every engine of the workload; empty if none needs to drain before it is removed."""
    restarts: int = 0
    """Times that its present engines have ended by themselves and were started again."""
    last_end: str = ""
    """The end of one of them in the words of Kubernetes or of the engine; empty if none ended."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason for which some engines do not become ready."""

    reason: str
    """The reason, out of the closed set of the contract."""
    message: str
    """The name of the failing engine or pod, with Kubernetes' or the engine's own words."""


@dataclass(frozen=True, slots=True)
class RevisionWindow:
    """The requests of one revision over all gateways: of the present step, and answers of the whole canary."""

    requests: int = 0
    errors: int = 0
    rejected: int = 0
    copies: int = 0
    ttft: Sequence[int] = ()
    """Counts in the buckets of `contract.scaling`, as the next two."""
    itl: Sequence[int] = ()
    whole: Sequence[int] = ()
    replays: int = 0
    unscored: int = 0
    divergence_sum: float = 0.0
    memory_growth_bytes: int = 0
    """The largest growth of one engine's memory in the last minute, if it grew all the time; else 0."""


@dataclass(frozen=True, slots=True)
class ObservedCanary:
    """Both revisions side by side, as gateways report them."""

    new: RevisionWindow = RevisionWindow()
    stable: RevisionWindow = RevisionWindow()
    is_reported: bool = False
    """True if a gateway has reported lately."""
    revision: str = ""
    """The new revision that the figures are about."""
    step: int = 0
    """Index of the step that they are about."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything that planning and status need to know about what runs."""

    workloads: Sequence[ObservedWorkload] = ()
    failures: Sequence[Failure] = ()
    """Reasons for which engines do not start, the most informative first."""
    default_image: str = "local"
    """The engine image of services that name none."""
    look_again_s: float = float("inf")
    """Seconds until a new observation may differ although no event announces it."""
    claimants: Sequence[str] = ()
    """Services that claim this one's model name, as namespace/name, the owner first; empty if claims were not checked.
    """
    model_impl: str | None = None
    """The code by which the newest ready engine computes the model; None if none reports it."""
    model_cache: ModelCacheStatus | None = None
    """The copy of the model on its volume; None if the spec asks for none."""
    canary: ObservedCanary = ObservedCanary()
    """The figures of a canary, as gateways report them."""
    switchable: Sequence[SwitchableEngine] = ()
    """Engines that may switch between prefill and decode; empty if the planner may not switch the service's roles."""
