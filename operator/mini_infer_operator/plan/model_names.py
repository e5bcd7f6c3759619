"""Whose a bare model name is where several services claim it (docs/model-names.md): the gateway's rule. Pure."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

ServiceKey = tuple[str, str]
"""Namespace and name of an InferenceService."""


class ModelNames:
    """Which services claim which name, kept up to date service by service."""

    def __init__(self) -> None:
        self._claims: dict[ServiceKey, tuple[str, str]] = {}  # service -> model name, creation time
        self._of_name: dict[str, set[ServiceKey]] = defaultdict(set)

    def update(self, key: ServiceKey, stored: Mapping[str, Any] | None) -> set[ServiceKey]:
        """`stored` is the service now, None where it is gone. Returns the others whose status this may change."""
        before, after = self._claims.get(key), _claim(key, stored)
        if before == after:
            return set()
        touched: set[ServiceKey] = set()
        if before is not None:
            self._of_name[before[0]].discard(key)
            touched |= self._of_name[before[0]]
            if not self._of_name[before[0]]:
                del self._of_name[before[0]]
            del self._claims[key]
        if after is not None:
            touched |= self._of_name[after[0]]
            self._of_name[after[0]].add(key)
            self._claims[key] = after
        return touched

    def claimants(self, model: str) -> list[str]:
        """`namespace/name` of all services that claim the name, its owner first: the oldest, then the first by name."""
        keys = self._of_name.get(model, ())
        return [f"{key[0]}/{key[1]}" for key in sorted(keys, key=lambda key: (self._claims[key][1], *key))]


def _claim(key: ServiceKey, stored: Mapping[str, Any] | None) -> tuple[str, str] | None:
    if stored is None or "deletionTimestamp" in stored["metadata"]:
        return None
    model = (stored.get("spec") or {}).get("model")
    name = model.get("name") if isinstance(model, Mapping) else None
    return str(name or key[1]), str(stored["metadata"].get("creationTimestamp", ""))
