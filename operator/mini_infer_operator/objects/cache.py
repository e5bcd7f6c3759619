"""Caches the API server's objects of our services, fed by watches, so that reconciling reads nothing. Requests nothing.

Two sources write here. The feed is the watches, which report each object's versions in order, and lists, each of which
is complete at its version. Answers to the operator's own writes arrive beside it, early or late. An answer is kept only
while it is newer than the object's version (or deletion) that the feed reported, and than the last list; and it must be
confirmed by the watch or by the next list. So a late answer never brings a deleted object back. client-go's
MutationCache follows the same rule.

Objects are kept as JSON: as dictionaries they take eight times the memory, and most are not looked at for minutes.
"""

from collections import defaultdict, deque
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from mini_infer_operator.objects.trim import trimmed
from mini_infer_operator.resource import KIND, LABEL_SERVICE, PRESET_KIND, SCALER_KIND

Object = dict[str, Any]
ServiceKey = tuple[str, str]
"""Namespace and name of an InferenceService."""
MOST_TOMBSTONES = 10_000
"""Deleted objects that are remembered, over all kinds. An answer is at most 30 s late (the client's time-out), and a
cluster does not delete this many of our objects in that time.
"""


@dataclass(frozen=True, slots=True)
class _Entry:
    version: int
    uid: str
    service: str
    content: bytes
    """The trimmed object as JSON, without its version."""

    def decoded(self) -> Object:
        """Returns a copy of the trimmed object."""
        found: Object = msgspec.json.decode(self.content)
        found["metadata"]["resourceVersion"] = str(self.version)
        return found

    def differs(self, before: "_Entry | None") -> bool:
        """Returns False if this is a version of the same object that differs in nothing that is read."""
        return before is None or (self.uid, self.service, self.content) != (before.uid, before.service, before.content)


class ObjectCache:
    """Objects by kind, namespace and name, with an index by the service that they belong to."""

    def __init__(self) -> None:
        self._entries: dict[str, dict[tuple[str, str], _Entry]] = defaultdict(dict)
        self._of_service: dict[tuple[str, str, str], set[str]] = defaultdict(set)
        self._unrepairable: dict[tuple[str, str, str], int] = {}
        self._applied: dict[tuple[str, str, str], tuple[str, int, bytes]] = {}
        """The uid and version of an object that last contained its manifest, and that manifest's digest."""
        self._complete: dict[tuple[str, str | None], int] = {}
        """The resource version of the last list of a kind, in a namespace or in all (None)."""
        self._unconfirmed: dict[str, set[tuple[str, str]]] = defaultdict(set)
        """Objects by kind that were kept from an answer, and that the feed has not confirmed yet."""
        self._tombstones: dict[tuple[str, str, str, str], int] = {}
        """The version at which an object was deleted, by kind, namespace, name and uid."""
        self._buried: deque[tuple[str, str, str, str]] = deque()
        self.unserved: set[str] = set()
        """Kinds that this cluster does not serve, or that the operator has no rights to watch."""
        self.missed: set[str] = set()
        """Unserved kinds that a service needs."""

    def put(self, kind: str, found: Mapping[str, Any]) -> ServiceKey | None:
        """Keeps a version that the feed reports, unless a newer one, or the object's deletion, is known.

        Returns the service that the object belongs to, or None if nothing changed that is read.
        """
        key, uid, version = _identity(found)
        before = self._entries[kind].get(key)
        entry = self._keep(kind, found)
        if entry is not None and (entry.uid, entry.version) == (uid, version):
            self._unconfirmed[kind].discard(key)
        return (key[0], entry.service) if entry is not None and entry.differs(before) else None

    def written(self, kind: str, found: Mapping[str, Any]) -> ServiceKey | None:
        """Keeps the answer to a write of our own until the feed confirms it, or until a newer list lacks the object.

        Returns None if nothing changed that is read. Changes nothing if the feed has reported this version or a later
        one.
        """
        key, _, version = _identity(found)
        before = self._entries[kind].get(key)
        reported = max(self._complete.get((kind, key[0]), 0), self._complete.get((kind, None), 0))
        if version <= reported or (before is not None and version <= before.version):
            return None
        entry = self._keep(kind, found)
        if entry is None or entry is before:
            return None
        self._unconfirmed[kind].add(key)
        return (key[0], entry.service) if entry.differs(before) else None

    def drop(
        self, kind: str, namespace: str, name: str, *, uid: str | None = None, version: int | None = None
    ) -> ServiceKey | None:
        """Removes a deleted object; if `uid` or `version` are given, only the object that matches them.

        Returns the service that the object belonged to, or None if it was unknown or a newer object has its name.
        """
        entry = self._entries[kind].get((namespace, name))
        if entry is not None:
            uid, version = uid or entry.uid, entry.version if version is None else version
        if uid is not None and version is not None:
            self._bury((kind, namespace, name, uid), version)
        if entry is None or (version is not None and version < entry.version):
            return None
        return self._remove(kind, (namespace, name))

    def replace(
        self,
        kind: str,
        namespace: str | None,
        found: Iterable[Mapping[str, Any]],
        version: int | None = None,
        *,
        besides: Container[tuple[str, str]] = (),
    ) -> set[ServiceKey]:
        """Replaces the content, in one namespace or in all, by a list complete at `version`. Later answers stay.

        `besides` are namespaces and names that the watch reported while the list was in flight: they stay as reported.
        Returns the services of which objects changed or are gone.
        """
        listed = {key: item for item in found if (key := _identity(item)[0]) not in besides}
        changed = set[ServiceKey | None]()
        for key in [key for key in self._entries[kind] if namespace is None or key[0] == namespace]:
            entry = self._entries[kind][key]
            is_newer = version is not None and entry.version > version
            if key in besides or (is_newer and key in self._unconfirmed[kind]):
                continue
            if key not in listed or is_newer:  # confirmed and newer than a list: the API server was restored
                self._bury((kind, *key, entry.uid), entry.version if version is None else min(entry.version, version))
                changed.add(self._remove(kind, key))
        for key, item in listed.items():
            self._tombstones.pop((kind, *key, _identity(item)[1]), None)
            changed.add(self.put(kind, item))
        if version is not None:
            self._complete[kind, namespace] = version
        return {key for key in changed if key is not None}

    def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """Returns a copy of the trimmed object, or None if it is not known."""
        entry = self._entries[kind].get((namespace, name))
        return None if entry is None else entry.decoded()

    def of_service(self, kind: str, namespace: str, service: str) -> list[Object]:
        """Returns copies of all objects of a kind that belong to the service, sorted by name."""
        names = self._of_service.get((kind, namespace, service), ())
        return [self._entries[kind][namespace, name].decoded() for name in sorted(names)]

    def presets(self) -> list[Object] | None:
        """Returns copies of all InferencePresets; None if they are not served, or not watched."""
        return None if PRESET_KIND in self.unserved else self.of_service(PRESET_KIND, "", "")

    def set_unrepairable(self, kind: str, namespace: str, name: str) -> None:
        """Records that a repair of the object's current version changed nothing."""
        entry = self._entries[kind].get((namespace, name))
        if entry is not None:
            self._unrepairable[kind, namespace, name] = entry.version

    def is_unrepairable(self, kind: str, namespace: str, name: str) -> bool:
        """Returns True if a repair of the object's current version was tried and changed nothing."""
        entry = self._entries[kind].get((namespace, name))
        return entry is not None and self._unrepairable.get((kind, namespace, name)) == entry.version

    def set_applied(self, kind: str, found: Mapping[str, Any], digest: bytes) -> None:
        """Records that this version of an object contains the manifest with this digest."""
        key, uid, version = _identity(found)
        if key in self._entries[kind]:
            self._applied[kind, *key] = uid, version, digest

    def is_applied(self, kind: str, found: Mapping[str, Any], digest: bytes) -> bool:
        """Returns True if this version of an object is known to contain the manifest with this digest."""
        key, uid, version = _identity(found)
        return self._applied.get((kind, *key)) == (uid, version, digest)

    def keys(self, kind: str) -> list[tuple[str, str]]:
        """Returns the namespaces and names of all objects of a kind."""
        return list(self._entries[kind])

    def services_of(self, kind: str) -> set[ServiceKey]:
        """Returns the services that objects of this kind belong to, whether these exist or not."""
        return {(key[0], entry.service) for key, entry in self._entries[kind].items()}

    def _keep(self, kind: str, found: Mapping[str, Any]) -> _Entry | None:
        """Keeps this version unless a newer one, or the object's deletion, is known. Returns what is kept now."""
        key, uid, version = _identity(found)
        service, before = service_of(kind, found), self._entries[kind].get(key)
        if before is not None and before.uid == uid and version <= before.version:
            return before
        if version <= self._tombstones.get((kind, *key, uid), -1):
            return before
        if before is not None and before.service != service:
            self._remove(kind, key)
        entry = _Entry(version, uid, service, msgspec.json.encode(trimmed(kind, found)))
        self._entries[kind][key] = entry
        self._of_service[kind, key[0], service].add(key[1])
        return entry

    def _remove(self, kind: str, key: tuple[str, str]) -> ServiceKey:
        entry = self._entries[kind].pop(key)
        self._unrepairable.pop((kind, *key), None)
        self._applied.pop((kind, *key), None)
        self._unconfirmed[kind].discard(key)
        index = (kind, key[0], entry.service)
        self._of_service[index].discard(key[1])
        if not self._of_service[index]:
            del self._of_service[index]
        return key[0], entry.service

    def _bury(self, grave: tuple[str, str, str, str], version: int) -> None:
        if grave not in self._tombstones:
            self._buried.append(grave)
        self._tombstones[grave] = max(version, self._tombstones.get(grave, version))
        while len(self._buried) > MOST_TOMBSTONES:
            self._tombstones.pop(self._buried.popleft(), None)


def _identity(found: Mapping[str, Any]) -> tuple[tuple[str, str], str, int]:
    """Returns the namespace ("" if it has none) and name, the uid and the version of an object."""
    metadata = found["metadata"]
    return (metadata.get("namespace", ""), metadata["name"]), metadata["uid"], int(metadata["resourceVersion"])


def service_of(kind: str, found: Mapping[str, Any]) -> str:
    """Returns the name of the service that an object belongs to; "" if it names none."""
    metadata = found["metadata"]
    if kind == KIND:
        return str(metadata["name"])
    if kind == SCALER_KIND:
        return str(found["spec"]["service"])
    return str(metadata.get("labels", {}).get(LABEL_SERVICE, ""))
