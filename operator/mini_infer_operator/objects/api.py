"""The few requests that the operator makes of the API server, on plain dictionaries. Knows no policy."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from mini_infer_contract.kubernetes_access import find_access
from mini_infer_contract.kubernetes_client import ApiError, KubernetesClient
from mini_infer_operator.objects.kinds import path_of
from mini_infer_operator.resource import FIELD_MANAGER, STATUS_FIELD_MANAGER

Object = dict[str, Any]


_REFUSALS = {400, 403, 413, 422}
_NOT_IN_SCHEMA = "failed to create typed patch object"
"""What a server-side apply says with status 500 where a field is not in the schema: it will be said again."""


class RefusedError(Exception):
    """The API server understood and said no: the same request will be refused again. The message is the server's."""


class KubernetesApi:
    """A connection to the API server. What passes by itself (409, 429, 5xx, network) is raised as it came."""

    def __init__(
        self, client: KubernetesClient, fit_status: Callable[[Object], Object] = lambda status: status
    ) -> None:
        """`fit_status`: a status as the CRD in the cluster takes it."""
        self._client = client
        self.fit_status = fit_status

    @classmethod
    async def connect(cls) -> "KubernetesApi":
        """By the pod's service account, else by KUBECONFIG or ~/.kube/config."""
        return cls(KubernetesClient(await asyncio.to_thread(find_access)))

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """The object, or None if there is none."""
        return await self._request("GET", path_of(kind, namespace, name), missing_ok=True)

    async def list(self, kind: str, namespace: str | None, selector: str | None = None) -> list[Object]:
        """All objects of a kind that match a label selector."""
        query = {"labelSelector": selector} if selector else None
        answer = await self._request("GET", path_of(kind, namespace), query=query) or {}
        return list(answer["items"])

    async def create(self, manifest: Object) -> Object:
        """Make a new object; a conflict (409) if there is one of this name."""
        path = path_of(manifest["kind"], manifest["metadata"]["namespace"])
        return await self._request("POST", path, query={"fieldManager": FIELD_MANAGER}, body=manifest) or {}

    async def merge(self, kind: str, namespace: str, name: str, change: Object) -> Object | None:
        """Merge `change` over the object (RFC 7396); None if there is none."""
        path, content_type = path_of(kind, namespace, name), "application/merge-patch+json"
        return await self._request("PATCH", path, body=change, content_type=content_type, missing_ok=True)

    async def apply(self, manifest: Object) -> Object:
        """Server-side apply: create the object, or make the fields in `manifest` so."""
        metadata = manifest["metadata"]
        path = path_of(manifest["kind"], metadata["namespace"], metadata["name"])
        return await self._apply(path, manifest, FIELD_MANAGER)

    async def replace_spec(self, manifest: Object) -> Object:
        """Make `spec` what the manifest says and nothing beside it but defaults, whoever set what."""
        metadata = manifest["metadata"]
        path = path_of(manifest["kind"], metadata["namespace"], metadata["name"])
        change = {"spec": {"$patch": "replace", **manifest["spec"]}}
        query, content_type = {"fieldManager": FIELD_MANAGER}, "application/strategic-merge-patch+json"
        return await self._request("PATCH", path, query=query, body=change, content_type=content_type) or {}

    async def apply_status(
        self, manifest: Object, *, manager: str = STATUS_FIELD_MANAGER, force: bool = True
    ) -> Object:
        """The same for the status subresource of an InferenceService, with a field manager of its own.

        Without force an ApiError with status 409 where another manager wrote another value.
        """
        metadata = manifest["metadata"]
        path = path_of(manifest["kind"], metadata["namespace"], metadata["name"], "status")
        return await self._apply(path, manifest, manager, force=force)

    async def delete(self, kind: str, live: Mapping[str, Any]) -> None:
        """Delete this very object (by uid) and what it owns; fine if it is gone already."""
        metadata = live["metadata"]
        options = {"preconditions": {"uid": metadata["uid"]}, "propagationPolicy": "Background"}
        path = path_of(kind, metadata["namespace"], metadata["name"])
        await self._request("DELETE", path, body=options, missing_ok=True)

    async def _apply(self, path: str, manifest: Object, manager: str, *, force: bool = True) -> Object:
        query = {"fieldManager": manager, "force": "true" if force else "false"}
        content_type = "application/apply-patch+yaml"  # JSON is YAML
        return await self._request("PATCH", path, query=query, body=manifest, content_type=content_type) or {}

    async def _request(self, method: str, path: str, *, missing_ok: bool = False, **options: Any) -> Object | None:
        try:
            return await self._client.request(method, path, **options)
        except ApiError as error:
            if error.status == 404 and missing_ok:
                return None
            if error.status in _REFUSALS or _NOT_IN_SCHEMA in error.message:
                raise RefusedError(error.message) from error
            error.add_note(f"{method} {path}")
            raise
