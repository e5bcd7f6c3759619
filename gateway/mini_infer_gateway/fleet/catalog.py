"""Which endpoints a client means by a model name. Pure; the rule for users is in docs/model-names.md."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mini_infer_contract.launch import Endpoint


@dataclass(frozen=True, slots=True)
class Catalog:
    """Names as clients may write them, and who answers to each."""

    by_name: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Every name that works -> names of its endpoints."""
    listed: tuple[str, ...] = ()
    """Those that /v1/models shows: served names, and namespace/name where the served name is another service's."""

    @classmethod
    def of(cls, endpoints: Iterable[Endpoint]) -> "Catalog":
        """The catalog of these endpoints, ready or not: a service that restarts keeps its name."""
        services: dict[str, list[Endpoint]] = {}
        for endpoint in endpoints:
            services.setdefault(endpoint.service, []).append(endpoint)
        by_name: dict[str, list[str]] = {}
        listed: list[str] = []
        for service in sorted(services, key=lambda service: _age(service, services[service])):
            owns = False
            for model, names in _models(services[service]).items():
                if model not in by_name:
                    by_name[model], owns = names, True
                    listed.append(model)
            if service and not owns:
                listed.append(service)
        # Last, so that nobody takes over another's namespace/name by serving a model of that name.
        for service, members in services.items():
            if service:
                by_name[service] = [endpoint.name for endpoint in members]
        return cls({name: tuple(names) for name, names in by_name.items()}, tuple(sorted(listed)))


def _age(service: str, members: list[Endpoint]) -> tuple[bool, str, str]:
    """The oldest first; those of unknown age last; equals by namespace/name."""
    created = min((endpoint.service_created for endpoint in members if endpoint.service_created), default="")
    return not created, created, service


def _models(members: list[Endpoint]) -> dict[str, list[str]]:
    """Several only while a rollout changes the served name."""
    models: dict[str, list[str]] = {}
    for endpoint in members:
        models.setdefault(endpoint.model, []).append(endpoint.name)
    return models
