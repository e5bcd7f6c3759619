"""Maps the model names that clients use to endpoints. Pure; docs/model-names.md has the rule for users."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mini_infer_contract.launch import Endpoint
from mini_infer_gateway.endpoints.base import Service
from mini_infer_gateway.fleet.name_owners import NameRules

Members = Mapping[str, Sequence[Endpoint]]
"""Endpoints by their service's namespace/name; "" for those without a service."""


@dataclass(frozen=True, slots=True)
class Catalog:
    """The names that clients may use, and the endpoints that serve each."""

    by_name: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Endpoint names by every valid name; empty while a known service has no pod."""
    owners: Mapping[str, str] = field(default_factory=dict)
    """Bare names with the services that own them."""
    listed: tuple[str, ...] = ()
    """Names that /v1/models lists: served names, and namespace/name if the served name belongs to another service."""
    on_demand: frozenset[str] = frozenset()
    """Names whose service starts an engine when a request waits for one."""

    @classmethod
    def of(
        cls,
        endpoints: Iterable[Endpoint],
        services: Sequence[Service] | None = None,
        orphaned: Sequence[Service] = (),
        rules: NameRules = NameRules(),  # noqa: B008 - it is frozen
    ) -> "Catalog":
        """Returns the catalog of these endpoints, ready or not: a service that restarts keeps its name.

        With `services`, a bare name goes to the oldest service whose own spec claims it, whatever its pods report; if
        None, each endpoint's statement about its service is trusted. `orphaned` are deleted services whose endpoints
        still exist: they keep names that no other service claims. `rules` restrict which service may claim a name.
        """
        members: dict[str, list[Endpoint]] = {}
        for endpoint in endpoints:
            members.setdefault(endpoint.service, []).append(endpoint)
        service_names = members.keys() | {service.name for service in services or ()}
        claims = _described(members) if services is None else _claimed(services, orphaned, members)
        owners = _owners((claim for claim in claims if rules.allows(*claim)), service_names)
        by_name = {model: _serving(members.get(service, ()), model) for model, service in owners.items()}
        sleepers = {service.name for service in services or () if service.starts_on_demand}
        listed = [model for model, names in by_name.items() if names or owners[model] in sleepers]
        named = {owners[model] for model in listed}
        leaving = set() if services is None else members.keys() - {service.name for service in services}
        leaving = {service for service in leaving if all(endpoint.draining for endpoint in members[service])}
        listed += [service for service in members if service and service not in named | leaving]
        for service in service_names - {""}:
            by_name[service] = tuple(endpoint.name for endpoint in members.get(service, ()))
        on_demand = sleepers | {model for model, service in owners.items() if service in sleepers}
        return cls(by_name, owners, tuple(sorted(listed)), frozenset(on_demand))

    def without(self, models: frozenset[str]) -> "Catalog":
        """Returns the catalog with no endpoint for these bare names."""
        if not models:
            return self
        by_name = {name: () if name in models else endpoints for name, endpoints in self.by_name.items()}
        listed = tuple(name for name in self.listed if name not in models)
        return Catalog(by_name, self.owners, listed, self.on_demand - models)


def orphaned(
    earlier: Iterable[Service], services: Iterable[Service], endpoints: Iterable[Endpoint]
) -> tuple[Service, ...]:
    """Returns the services among `earlier` that are deleted while engines of theirs stay.

    `kubectl delete --cascade=orphan` leaves such pods: they continue to run, and are adopted when the service is
    created again. Pods that drain are terminating with their service.
    """
    there = {service.name for service in services}
    staying = {endpoint.service for endpoint in endpoints if not endpoint.draining}
    return tuple({s.name: s for s in earlier if s.name not in there and s.name in staying}.values())


def _owners(claims: Iterable[tuple[str, str]], services: Iterable[str]) -> dict[str, str]:
    """Returns the service that owns each bare name: the first claim counts.

    No service may claim another one's namespace/name.
    """
    reserved = set(services)
    owners: dict[str, str] = {}
    for model, service in claims:
        if model not in reserved:
            owners.setdefault(model, service)
    return owners


def _claimed(services: Sequence[Service], orphaned: Sequence[Service], members: Members) -> Iterator[tuple[str, str]]:
    """Yields (name, service) by the specs of the services, the oldest first.

    Names that only pods still serve come after them: a rollout that changes the served name keeps the old one alive,
    unless another service's spec claims it. The claims of deleted services come last.
    """
    ranked = sorted(services, key=lambda service: _rank(service.created, service.name))
    yield from ((service.model, service.name) for service in ranked)
    for service in ranked:
        yield from ((endpoint.model, service.name) for endpoint in members.get(service.name, ()))
    yield from ((service.model, service.name) for service in orphaned)


def _described(members: Members) -> Iterator[tuple[str, str]]:
    """Yields (name, service) by what the endpoints report, the oldest service first."""
    ages = {
        service: min((endpoint.service_created for endpoint in endpoints if endpoint.service_created), default="")
        for service, endpoints in members.items()
    }
    for service in sorted(members, key=lambda service: _rank(ages[service], service)):
        yield from ((endpoint.model, service) for endpoint in members[service])


def _rank(created: str, name: str) -> tuple[bool, str, str]:
    """Returns a sort key: the oldest first, unknown age last, equals by namespace/name."""
    return not created, created, name


def _serving(endpoints: Iterable[Endpoint], model: str) -> tuple[str, ...]:
    """Returns the endpoints that serve `model`: pods of a service differ while a rollout changes the served name."""
    return tuple(endpoint.name for endpoint in endpoints if endpoint.model == model)
