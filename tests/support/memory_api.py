"""The operator's requests to an API server, answered from memory: as much of its behaviour as `ClusterBackend` sees."""

import copy
import itertools
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from mini_infer_operator.objects.api import KubernetesApi, RefusedError
from mini_infer_operator.resource import KIND, STATUS_FIELD_MANAGER
from mini_infer_web.kubernetes_api import ApiError
from tests.support.services import changed

Object = dict[str, Any]


class MemoryApi(KubernetesApi):
    """Stores objects by kind, namespace and name. An object gets a new version only if a write changes it."""

    def __init__(self) -> None:
        self.fit_status = lambda status: status
        self.objects: dict[tuple[str, str, str], Object] = {}
        self.writes = 0
        """Number of writes that changed something."""
        self.refused: set[str] = set()
        """Kinds whose writes are refused."""
        self._numbers = itertools.count(1)

    async def get(self, kind: str, namespace: str, name: str) -> Object | None:
        return copy.deepcopy(self.objects.get((kind, namespace, name)))

    async def list(self, kind: str, namespace: str | None, selector: str | None = None) -> tuple[list[Object], int]:
        found = [
            copy.deepcopy(one) for (of, at, _), one in self.objects.items() if of == kind and namespace in (None, at)
        ]
        return found, next(self._numbers)

    async def create(self, manifest: Object) -> Object:
        if _key(manifest) in self.objects:
            raise ApiError(409, "AlreadyExists", f"{manifest['metadata']['name']} already exists")
        return self._write(manifest)

    async def apply(self, manifest: Object) -> Object:
        return self._write(manifest)

    async def replace_spec(self, manifest: Object) -> Object:
        return self._store(self.objects[_key(manifest)] | {"spec": manifest["spec"]})

    async def merge(self, kind: str, namespace: str, name: str, change: Object) -> Object | None:
        live = self.objects.get((kind, namespace, name))
        return None if live is None else self._store(changed(change, live))

    async def apply_status(
        self, manifest: Object, *, manager: str = STATUS_FIELD_MANAGER, force: bool = True
    ) -> Object:
        return self._store(self.objects[_key(manifest)] | {"status": manifest["status"]})

    async def delete(self, kind: str, live: Mapping[str, Any]) -> None:
        metadata = live["metadata"]
        if self.objects.pop((kind, metadata["namespace"], metadata["name"]), None) is not None:
            self.writes += 1

    def start_engines(self) -> None:
        """Makes all pods of all Deployments available, as a controller manager and kubelets do in a while."""
        for (kind, _, _), one in self.objects.items():
            if kind == "Deployment":
                count = one["spec"]["replicas"]
                one["status"] = {"replicas": count, "readyReplicas": count, "availableReplicas": count}
                one["metadata"]["resourceVersion"] = str(next(self._numbers))

    def _write(self, manifest: Object) -> Object:
        if manifest["kind"] in self.refused:
            raise RefusedError(f"{manifest['kind']} exceeded quota")
        live = self.objects.get(_key(manifest))
        return self._store(changed(manifest, live) if live is not None else manifest)

    def _store(self, new: Object) -> Object:
        key = _key(new)
        before = self.objects.get(key)
        if before == new:
            return copy.deepcopy(new)
        self.writes += 1
        metadata = dict(new["metadata"])
        metadata["resourceVersion"] = str(next(self._numbers))
        if before is None:
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            metadata |= {"uid": f"uid-{metadata['resourceVersion']}", "generation": 1, "creationTimestamp": now}
        elif before.get("spec") != new.get("spec"):
            metadata["generation"] = before["metadata"]["generation"] + 1
        self.objects[key] = copy.deepcopy(new) | {"metadata": metadata}
        return copy.deepcopy(self.objects[key])


def _key(found: Object) -> tuple[str, str, str]:
    metadata = found["metadata"]
    return found.get("kind", KIND), metadata["namespace"], metadata["name"]
