"""Maps plugin names to plugins, and makes a router from a policy that names them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from mini_infer_gateway.routing.base import Filter, Picker, Producer, Scorer
from mini_infer_gateway.routing.filters.canary_share import CanaryShare
from mini_infer_gateway.routing.filters.circuit_closed import CircuitClosed
from mini_infer_gateway.routing.filters.not_attempted import NotAttempted
from mini_infer_gateway.routing.filters.ready import Ready
from mini_infer_gateway.routing.filters.role import Role
from mini_infer_gateway.routing.pairing import Pairing
from mini_infer_gateway.routing.pickers.highest_score import HighestScore
from mini_infer_gateway.routing.pickers.round_robin import RoundRobin
from mini_infer_gateway.routing.router import Router
from mini_infer_gateway.routing.scorers.cache_room import CacheRoom
from mini_infer_gateway.routing.scorers.cached_prefix import CachedPrefix
from mini_infer_gateway.routing.scorers.decode_slots import DecodeSlots
from mini_infer_gateway.routing.scorers.queue_wait import QueueWait

FILTERS: Mapping[str, Callable[..., Filter]] = {
    "ready": Ready,
    "role": Role,
    "not_attempted": NotAttempted,
    "canary_share": CanaryShare,
    "circuit_closed": CircuitClosed,
}
SCORERS: Mapping[str, Callable[..., Scorer]] = {
    "cached_prefix": CachedPrefix,
    "queue_wait": QueueWait,
    "decode_slots": DecodeSlots,
    "cache_room": CacheRoom,
}
PICKERS: Mapping[str, Callable[..., Picker]] = {"highest_score": HighestScore, "round_robin": RoundRobin}


@dataclass(frozen=True, slots=True)
class Plugin:
    """One plugin of a policy."""

    name: str
    weight: float = 1.0
    """The weight of a scorer."""
    parameters: Mapping[str, float] = field(default_factory=dict)
    """Arguments of its constructor that differ from the defaults."""


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A policy: the filters, scorers and picker by which an endpoint is chosen."""

    scorers: tuple[Plugin, ...] = ()
    picker: Plugin = field(default_factory=lambda: Plugin("highest_score"))
    filters: tuple[Plugin, ...] = tuple(map(Plugin, FILTERS))


def make_router(
    spec: PolicySpec, producers: tuple[Producer, ...], random: Random, pairing: Pairing | None = None
) -> Router:
    """Returns the router of a policy. Raises ValueError if the policy names an unknown plugin or parameter."""
    return Router(
        filters=[_make("filter", FILTERS, plugin) for plugin in spec.filters],
        producers=producers,
        scorers=[(_make("scorer", SCORERS, plugin), plugin.weight) for plugin in spec.scorers],
        picker=_make("picker", PICKERS, spec.picker),
        random=random,
        pairing=pairing,
    )


def _make(kind: str, plugins: Mapping[str, Callable[..., Any]], plugin: Plugin) -> Any:
    if plugin.name not in plugins:
        raise ValueError(f"there is no {kind} {plugin.name!r}: choose of {', '.join(plugins)}")
    try:
        return plugins[plugin.name](**plugin.parameters)
    except TypeError as error:
        raise ValueError(f"{kind} {plugin.name!r} does not take {dict(plugin.parameters)}: {error}") from error
