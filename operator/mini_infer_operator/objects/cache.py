"""What the API server holds for our services, kept by watches, so that reconciling reads nothing. Sends no requests.

Objects are kept as JSON: as dictionaries they take eight times the memory, and most are not looked at for minutes.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from mini_infer_contract.resources import KIND, LABEL_SERVICE, SCALER_KIND
from mini_infer_operator.objects.trim import trimmed

Object = dict[str, Any]
ServiceKey = tuple[str, str]
"""Namespace and name of an InferenceService."""


@dataclass(frozen=True, slots=True)
class _Entry:
    version: int
    uid: str
    service: str
    content: bytes


class ObjectCache:
    """Objects by kind, namespace and name, and by the service that they belong to."""

    def __init__(self) -> None:
        self._entries: dict[str, dict[tuple[str, str], _Entry]] = defaultdict(dict)
        self._of_service: dict[tuple[str, str, str], set[str]] = defaultdict(set)
        self._unrepairable: dict[tuple[str, str, str], int] = {}
        self.unserved: set[str] = set()
        """Kinds that this cluster does not know."""

    def put(self, kind: str, found: Mapping[str, Any]) -> ServiceKey | None:
        """Keep this version, unless a newer one is known. Returns whose object it is, or None if it is no news."""
        metadata = found["metadata"]
        key = (metadata["namespace"], metadata["name"])
        version, service = int(metadata["resourceVersion"]), service_of(kind, found)
        before = self._entries[kind].get(key)
        if before is not None and before.uid == metadata["uid"] and version <= before.version:
            return None
        if before is not None and before.service != service:
            self.drop(kind, *key)
        self._entries[kind][key] = _Entry(version, metadata["uid"], service, msgspec.json.encode(trimmed(kind, found)))
        self._of_service[kind, key[0], service].add(key[1])
        return key[0], service

    def drop(self, kind: str, namespace: str, name: str) -> ServiceKey | None:
        """It is gone. Returns whose object it was, or None if it was not known."""
        entry = self._entries[kind].pop((namespace, name), None)
        self._unrepairable.pop((kind, namespace, name), None)
        if entry is None:
            return None
        index = (kind, namespace, entry.service)
        self._of_service[index].discard(name)
        if not self._of_service[index]:
            del self._of_service[index]
        return namespace, entry.service

    def replace(self, kind: str, namespace: str | None, found: Iterable[Mapping[str, Any]]) -> set[ServiceKey]:
        """A list shows these: all there are, in one namespace or in all. Returns whose objects changed, or are gone."""
        changed, listed = set[ServiceKey | None](), set[tuple[str, str]]()
        for item in found:
            listed.add((item["metadata"]["namespace"], item["metadata"]["name"]))
            changed.add(self.put(kind, item))
        known = [key for key in self._entries[kind] if namespace is None or key[0] == namespace]
        changed |= {self.drop(kind, *key) for key in known if key not in listed}
        return {key for key in changed if key is not None}

    def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """A copy of the object, trimmed, or None if it is not known."""
        entry = self._entries[kind].get((namespace, name))
        return None if entry is None else dict(msgspec.json.decode(entry.content))

    def of_service(self, kind: str, namespace: str, service: str) -> list[Object]:
        """Copies of all objects of a kind that carry the service's label, by name."""
        names = self._of_service.get((kind, namespace, service), ())
        return [msgspec.json.decode(self._entries[kind][namespace, name].content) for name in sorted(names)]

    def set_unrepairable(self, kind: str, namespace: str, name: str) -> None:
        """A repair of this very version changed nothing."""
        entry = self._entries[kind].get((namespace, name))
        if entry is not None:
            self._unrepairable[kind, namespace, name] = entry.version

    def is_unrepairable(self, kind: str, namespace: str, name: str) -> bool:
        """Whether a repair of this very version was tried, and changed nothing."""
        entry = self._entries[kind].get((namespace, name))
        return entry is not None and self._unrepairable.get((kind, namespace, name)) == entry.version

    def keys(self, kind: str) -> list[tuple[str, str]]:
        """Namespaces and names of all objects of a kind."""
        return list(self._entries[kind])


def service_of(kind: str, found: Mapping[str, Any]) -> str:
    """The name of the service that an object belongs to; "" if it says none."""
    metadata = found["metadata"]
    if kind == KIND:
        return str(metadata["name"])
    if kind == SCALER_KIND:
        return str(found["spec"]["service"])
    return str(metadata.get("labels", {}).get(LABEL_SERVICE, ""))
