"""Collects services and engines for the console's fleet page, from what the gateway sees. Pure; reads, never writes."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mini_infer_contract.launch import PendingEngine
from mini_infer_gateway.console.history import History, Sample
from mini_infer_gateway.console.viewer import Viewer
from mini_infer_gateway.endpoints.base import Reports
from mini_infer_gateway.endpoints.service_status import ServiceCondition, ServiceRole, ServiceStatus
from mini_infer_gateway.fleet.backlog import Backlog
from mini_infer_gateway.fleet.endpoint_state import EndpointState
from mini_infer_gateway.fleet.load import LoadLedger
from mini_infer_gateway.fleet.registry import Fleet
from mini_infer_gateway.index.prefix_index import PrefixIndex
from mini_infer_gateway.routing.base import PREFILL

NO_STATUS = ServiceStatus()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceRow:
    """One service as the console shows it."""

    name: str
    models: list[str]
    """Names under which clients reach it."""
    engines: dict[str, int]
    """Number of its engines by state."""
    status: ServiceStatus
    """The status that its operator wrote; empty if the source of endpoints has none."""
    revisions: dict[str, int] = field(default_factory=dict)
    """Number of its engines by revision: more than one is a rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """One engine as the console shows it."""

    name: str
    service: str
    model: str
    role: str
    revision: str
    state: str
    reason: str
    """The reason why it is not ready, in words; "" if it is."""
    url: str = ""
    group: str = ""
    transfer: str = ""
    breaker: str = ""
    """The cause for which its circuit is open; "" if it is closed."""
    retry_in_s: float = 0.0
    """Seconds until an open circuit lets a request through."""
    failures: int = 0
    index: str = ""
    """The way in which the gateway knows the cache: exact, stale, approximate or none."""
    events: str = ""
    not_tokenized_here: str = ""
    cached_blocks: int = 0
    in_flight: int = 0
    now: Sample | None = None
    history: list[Sample] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A prefill engine and the decode engines of its group that it computes prompts for."""

    service: str
    revision: str
    prefill: list[str]
    decode: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """The whole page."""

    services: list[ServiceRow]
    engines: list[EngineRow] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    waiting_here: dict[str, int] = field(default_factory=dict)
    """Requests that wait at the gateway, by model."""
    in_flight: int = 0


@dataclass(frozen=True, slots=True)
class Sources:
    """The parts of the gateway that the page is made of."""

    fleet: Fleet
    ledger: LoadLedger
    index: PrefixIndex
    backlog: Backlog
    history: History


def fleet_view(sources: Sources, reports: Reports, viewer: Viewer, now_s: float, *, with_history: bool) -> FleetView:
    """Returns the page for a viewer. Without the right to see everything, it has services alone, and no load."""
    fleet = sources.fleet
    pending = {engine.name: engine for engine in reports.pending}
    engines = [
        engine_row(sources, state, pending.get(name), now_s, with_history=with_history)
        for name, state in sorted(fleet.endpoints.items())
    ]
    engines += [pending_row(engine) for name, engine in sorted(pending.items()) if name not in fleet.endpoints]
    services = service_rows(engines, fleet.catalog.by_name, reports.services)
    if not viewer.everything:
        return FleetView(services=[_for_tenants(service) for service in services])
    return FleetView(
        services=services,
        engines=engines,
        pairs=pairs(engines),
        waiting_here=sources.backlog.depths(),
        in_flight=sum(engine.in_flight for engine in engines),
    )


def engine_row(
    sources: Sources, state: EndpointState, pending: PendingEngine | None, now_s: float, *, with_history: bool
) -> EngineRow:
    """Returns one endpoint as a row. `pending` is what its source says of it, if it is not ready."""
    endpoint, breaker = state.endpoint, state.breaker
    name, phase = endpoint.name, state.phase(now_s)
    return EngineRow(
        name=name,
        service=endpoint.service,
        model=endpoint.model,
        role=state.role,
        revision=endpoint.revision,
        state=phase,
        reason=why_not_ready(state, phase, pending, now_s),
        url=endpoint.url,
        group=endpoint.group,
        transfer=endpoint.transfer,
        breaker=breaker.cause.value if breaker.cause else "",
        retry_in_s=round(max(0.0, breaker.retry_at_s - now_s), 1) if breaker.cause else 0.0,
        failures=breaker.failures,
        index=state.index_kind(now_s),
        events=state.subscriber.events_state,
        not_tokenized_here=sources.fleet.why_not_tokenized_here(name),
        cached_blocks=sources.index.cached_blocks(name),
        in_flight=sources.ledger.in_flight(name),
        now=sources.history.latest(name),
        history=sources.history.samples(name) if with_history else [],
    )


def pending_row(engine: PendingEngine) -> EngineRow:
    """Returns an engine that is no endpoint as a row."""
    return EngineRow(
        name=engine.name,
        service=engine.service,
        model="",
        role=engine.role,
        revision=engine.revision,
        state="starting",
        reason=engine.reason,
    )


_BREAKER_WORDS: Mapping[str, str] = {
    "unreachable": "connections to it fail or break",
    "status": "it answers requests with server errors",
    "timeout": "it accepted a request and was silent for too long",
    "silent": "its load reports have stopped",
    "transfer": "other engines could not fetch the KV cache that it computed for them",
    "slow": "its first bytes take far longer than those of its peers",
}


def why_not_ready(state: EndpointState, phase: str, pending: PendingEngine | None, now_s: float) -> str:
    """Returns the reason for an endpoint's phase as a sentence; "" if it is ready."""
    if phase == "ready":
        return ""
    if phase == "draining":
        return "it finishes what it has and takes no new requests"
    if phase == "starting":
        return pending.reason if pending and pending.reason else "its source reports that it is not ready"
    if phase == "broken" and state.breaker.cause:
        words = _BREAKER_WORDS[state.breaker.cause.value]
        left_s = state.breaker.retry_at_s - now_s
        again = f"; tried again in {left_s:.0f} s" if left_s > 0.5 else "; the next request tries it"
        return f"its circuit is open: {words}{again}"
    if phase == "overloaded":
        left_s = state.overloaded_until_s - now_s
        return f"it answered 429, and is chosen last for {left_s:.1f} s"
    return "a prefill engine whose load reports do not arrive"


def service_rows(
    engines: Iterable[EngineRow], by_name: Mapping[str, Iterable[str]], statuses: Mapping[str, ServiceStatus]
) -> list[ServiceRow]:
    """Returns a row for each service that has engines or a status."""
    members: dict[str, list[EngineRow]] = {}
    for engine in engines:
        members.setdefault(engine.service, []).append(engine)
    rows = []
    for name in sorted(members.keys() | statuses.keys()):
        own = members.get(name, [])
        names = {engine.name for engine in own}
        models = {model for model, endpoints in by_name.items() if model != name and names.intersection(endpoints)}
        rows.append(
            ServiceRow(
                name=name,
                models=sorted(models),
                engines=dict(Counter(engine.state for engine in own)),
                status=statuses.get(name, NO_STATUS),
                revisions=dict(Counter(engine.revision for engine in own if engine.revision)),
            )
        )
    return rows


def pairs(engines: Iterable[EngineRow]) -> list[Pair]:
    """Returns the groups of engines in which prompts are computed apart."""
    groups: dict[tuple[str, str], list[EngineRow]] = {}
    for engine in engines:
        if engine.role != "unified":
            groups.setdefault((engine.service, engine.revision), []).append(engine)
    return [
        Pair(
            service=service,
            revision=revision,
            prefill=[engine.name for engine in members if engine.role == PREFILL],
            decode=[engine.name for engine in members if engine.role != PREFILL],
        )
        for (service, revision), members in sorted(groups.items())
    ]


def _for_tenants(service: ServiceRow) -> ServiceRow:
    """Returns the part of a service that tells nothing of other tenants: its name, models, and whether it is ready."""
    status = service.status
    conditions = [
        ServiceCondition(type=one.type, status=one.status, reason=one.reason)
        for one in status.conditions
        if one.type in ("Ready", "Available")
    ]
    roles = [ServiceRole(name=role.name, ready=role.ready) for role in status.roles]
    shown = ServiceStatus(conditions=conditions, model=status.model, roles=roles)
    states = {"ready": service.engines.get("ready", 0)}
    return ServiceRow(name=service.name, models=service.models, engines=states, status=shown)
