"""Who may own a bare model name, and what happens when its owner changes. Pure; the time is passed in.

The catalog says who owns a name by the services' ages. A name whose owner gave it up is not another namespace's at
once: for a while nobody answers to it, and that is said, so that a claim that waited never takes over traffic in
silence.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

ANY_MODEL = "*"


@dataclass(frozen=True, slots=True)
class NameRules:
    """Which namespaces may own which bare names."""

    allowed: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """By model, ANY_MODEL for those that are not named; a name without an entry may be owned by all."""

    def allows(self, model: str, service: str) -> bool:
        """Whether `service`, a namespace/name, may own the bare name."""
        namespaces = self.allowed.get(model, self.allowed.get(ANY_MODEL))
        return namespaces is None or _namespace(service) in namespaces


@dataclass(frozen=True, slots=True)
class OwnerChange:
    """A bare name that went from one service to another, or is about to."""

    model: str
    before: str
    after: str
    is_held: bool
    """Nobody answers to it yet."""


class NameOwners:
    """The owners that this gateway has seen."""

    def __init__(self, hold_s: float) -> None:
        """`hold_s`: from the loss of an owner until a service of another namespace has the name."""
        self._hold_s = hold_s
        self._owners: dict[str, str] = {}
        self._held_since_s: dict[str, float] = {}

    def settle(self, owners: Mapping[str, str], now_s: float) -> tuple[frozenset[str], list[OwnerChange]]:
        """The names that nobody has for now, of those with these owners, and what has changed since the last call."""
        held, changes = set[str](), []
        for model, after in owners.items():
            before = self._owners.get(model, after)
            if before == after:
                self._own(model, after)
                continue
            is_new = model not in self._held_since_s
            since_s = self._held_since_s.setdefault(model, now_s)
            if _namespace(before) != _namespace(after) and now_s - since_s < self._hold_s:
                held.add(model)
                if is_new:
                    changes.append(OwnerChange(model, before, after, is_held=True))
                continue
            changes.append(OwnerChange(model, before, after, is_held=False))
            self._own(model, after)
        return frozenset(held), changes

    @property
    def is_holding(self) -> bool:
        """Some name is waiting for its time to be over."""
        return bool(self._held_since_s)

    def _own(self, model: str, service: str) -> None:
        self._owners[model] = service
        self._held_since_s.pop(model, None)


def read_rules(texts: Iterable[str]) -> NameRules:
    """Of `MODEL=NAMESPACE`, several for one name. ValueError: one has another form."""
    allowed: dict[str, frozenset[str]] = {}
    for text in texts:
        model, equals, namespace = text.rpartition("=")
        if not (model and equals and namespace) or "/" in namespace:
            raise ValueError(f"--model-namespaces {text!r}: write MODEL=NAMESPACE, or *=NAMESPACE for all other names")
        allowed[model] = allowed.get(model, frozenset()) | {namespace}
    return NameRules(allowed)


def _namespace(service: str) -> str:
    return service.partition("/")[0]
