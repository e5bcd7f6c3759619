"""The few requests that the operator makes of the API server, on plain dictionaries. Knows paths, no policy."""

import json
from collections.abc import Mapping
from typing import Any

from kubernetes.aio import client, config
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.dynamic import DynamicClient

from mini_infer_contract.resources import FIELD_MANAGER, GROUP, PLURAL, STATUS_FIELD_MANAGER, VERSION

SERVICES_PATH = f"apis/{GROUP}/{VERSION}"
_PATHS = {
    "Service": ("api/v1", "services"),
    "Pod": ("api/v1", "pods"),
    "Deployment": ("apis/apps/v1", "deployments"),
    "ControllerRevision": ("apis/apps/v1", "controllerrevisions"),
    "InferenceService": (SERVICES_PATH, PLURAL),
}
REQUEST_TIMEOUT_S = 30.0

Object = dict[str, Any]


class RefusedError(Exception):
    """The API server understood and said no (400, 403, 422): the same request will be refused again."""


def path_of(kind: str, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
    """The path of an object, or of a list; without a namespace: of the list over all namespaces."""
    prefix, plural = _PATHS[kind]
    parts = [prefix, *(("namespaces", namespace) if namespace else ()), plural]
    return "/".join([*parts, *(part for part in (name, subresource) if part)])


class KubernetesApi:
    """A connection to the API server. What passes by itself (409, 429, 5xx, network) is raised as it came."""

    def __init__(self, api_client: Any) -> None:
        self._client = api_client
        # Without discovery, which would want a cache file: we know our paths.
        self._dynamic = DynamicClient(api_client)  # type: ignore[no-untyped-call]

    @classmethod
    async def connect(cls) -> "KubernetesApi":
        """By the pod's service account, else by KUBECONFIG or ~/.kube/config."""
        try:
            config.load_incluster_config()  # type: ignore[no-untyped-call]
        except config.ConfigException:
            await config.load_kube_config()  # type: ignore[no-untyped-call]
        return cls(client.ApiClient())

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """The object, or None if there is none."""
        return await self._request("get", path_of(kind, namespace, name), missing_ok=True)

    async def list(self, kind: str, namespace: str | None, selector: str | None = None) -> list[Object]:
        """All objects of a kind that match a label selector."""
        answer = await self._request("get", path_of(kind, namespace), label_selector=selector) or {}
        return list(answer["items"])

    async def apply(self, manifest: Object) -> Object:
        """Server-side apply: create the object, or make the fields in `manifest` so."""
        metadata = manifest["metadata"]
        path = path_of(manifest["kind"], metadata["namespace"], metadata["name"])
        return await self._apply(path, manifest, FIELD_MANAGER)

    async def apply_status(self, manifest: Object) -> Object:
        """The same for the status subresource of an InferenceService, with a field manager of its own."""
        metadata = manifest["metadata"]
        path = path_of(manifest["kind"], metadata["namespace"], metadata["name"], "status")
        return await self._apply(path, manifest, STATUS_FIELD_MANAGER)

    async def delete(self, kind: str, live: Mapping[str, Any]) -> None:
        """Delete this very object (by uid) and what it owns; fine if it is gone already."""
        metadata = live["metadata"]
        options = {"preconditions": {"uid": metadata["uid"]}, "propagationPolicy": "Background"}
        path = path_of(kind, metadata["namespace"], metadata["name"])
        await self._request("delete", path, body=options, missing_ok=True)

    async def _apply(self, path: str, manifest: Object, manager: str) -> Object:
        parameters: dict[str, Any] = {
            "content_type": "application/apply-patch+yaml",
            "field_manager": manager,
            "force_conflicts": True,
        }
        return await self._request("patch", path, body=manifest, **parameters) or {}

    async def _request(self, method: str, path: str, *, missing_ok: bool = False, **parameters: Any) -> Object | None:
        try:
            response = await self._dynamic.request(
                method, path, serialize=False, _request_timeout=REQUEST_TIMEOUT_S, **parameters
            )
            return dict(await response.json())
        except ApiException as error:
            if error.status == 404 and missing_ok:
                return None
            if error.status in {400, 403, 422}:
                raise RefusedError(_message(error)) from error
            raise


def _message(error: ApiException) -> str:
    """What the API server says, without the HTTP around it."""
    try:
        return str(json.loads(error.body or "")["message"])
    except (TypeError, ValueError, KeyError):
        return f"{error.status} {error.reason}"
