"""Decides which service owns a bare model name that several claim, by the gateway's rule (model-names.md). Pure."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

ServiceKey = tuple[str, str]
"""The namespace and name of an InferenceService."""


class ModelNames:
    """An index of the services that claim each model name, kept up to date service by service."""

    def __init__(self) -> None:
        self._claims: dict[ServiceKey, tuple[str, str]] = {}  # service -> model name, creation time
        self._of_name: dict[str, set[ServiceKey]] = defaultdict(set)

    def update(self, key: ServiceKey, stored: Mapping[str, Any] | None) -> set[ServiceKey]:
        """Records the service as it is now (None if it was deleted). Returns the other services whose status this may
        change.
        """
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
        """Returns all services that claim the name, as `namespace/name`, the owner first: the oldest, then the first by
        name.
        """
        keys = self._of_name.get(model, ())
        return [f"{key[0]}/{key[1]}" for key in sorted(keys, key=lambda key: (self._claims[key][1], *key))]


def _claim(key: ServiceKey, stored: Mapping[str, Any] | None) -> tuple[str, str] | None:
    if stored is None or "deletionTimestamp" in stored["metadata"]:
        return None
    model = (stored.get("spec") or {}).get("model")
    name = model.get("name") if isinstance(model, Mapping) else None
    return str(name or key[1]), str(stored["metadata"].get("creationTimestamp", ""))
