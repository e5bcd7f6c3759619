"""Sends the operator's few requests to the API server, on plain dictionaries. Knows no policy."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from kubernetes.aio.dynamic import Resource, Subresource

from mini_infer_operator.objects.kinds import BY_NAME, path_of
from mini_infer_operator.resource import FIELD_MANAGER, STATUS_FIELD_MANAGER
from mini_infer_web.kubernetes_api import ApiError, ApiServer, Object, Verb, call_options

PAGE = 500
"""Objects in one page of a list."""
_REFUSALS = {400, 403, 413, 422}
_NOT_IN_SCHEMA = "failed to create typed patch object"
"""Message of a server-side apply (status 500) that sets a field missing in the schema. A retry would get the same
answer.
"""


class RefusedError(Exception):
    """The API server refused the request and would refuse it again. The message is the server's."""


class KubernetesApi:
    """Reads and writes objects by the dynamic client. Transient errors (409, 429, 5xx, network) are not converted."""

    def __init__(self, server: ApiServer, fit_status: Callable[[Object], Object] = lambda status: status) -> None:
        """`fit_status` removes from a status the fields that the CRD in the cluster does not have."""
        self._server = server
        self.fit_status = fit_status

    async def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """Returns the object, or None if it does not exist."""
        resource, options = resource_of(kind), {"name": name, "namespace": namespace, **call_options()}
        return await self._read_existing(f"GET {path_of(kind, namespace, name)}", _get(resource, options))

    async def list(self, kind: str, namespace: str | None, selector: str | None = None) -> tuple[list[Object], int]:
        """Returns all objects of a kind that match a label selector, and the resource version of that list."""
        resource, found = resource_of(kind), list[Object]()
        options = {"namespace": namespace, "label_selector": selector, "limit": PAGE, **call_options()}
        while True:
            answer = await self._read(f"GET {path_of(kind, namespace)}", _get(resource, dict(options)))
            found += answer["items"] or ()
            options["_continue"] = answer["metadata"].get("continue")
            if not options["_continue"]:
                return found, int(answer["metadata"]["resourceVersion"])

    async def create(self, manifest: Object) -> Object:
        """Creates an object. Raises an ApiError with status 409 if one of this name exists."""
        kind, options = manifest["kind"], {"body": manifest, "field_manager": FIELD_MANAGER, **call_options()}
        return await self._read(
            f"POST {path_of(kind, manifest['metadata']['namespace'])}",
            lambda client: client.create(resource_of(kind), **options),
        )

    async def merge(self, kind: str, namespace: str, name: str, change: Object) -> Object | None:
        """Merges `change` over the object (RFC 7396). Returns None if the object does not exist."""
        resource, options = resource_of(kind), {"name": name, "namespace": namespace, **call_options()}
        options |= {"body": change, "content_type": "application/merge-patch+json", "field_manager": FIELD_MANAGER}
        return await self._read_existing(
            f"PATCH {path_of(kind, namespace, name)}", lambda client: client.patch(resource, **options)
        )

    async def apply(self, manifest: Object) -> Object:
        """Creates the object by server-side apply, or sets the fields in `manifest`."""
        return await self._apply(manifest, FIELD_MANAGER)

    async def replace_spec(self, manifest: Object) -> Object:
        """Replaces `spec` by the manifest's; fields that others set are removed, and defaults are added."""
        kind, metadata = manifest["kind"], manifest["metadata"]
        options = {"name": metadata["name"], "namespace": metadata["namespace"], "field_manager": FIELD_MANAGER}
        options |= {"content_type": "application/strategic-merge-patch+json", **call_options()}
        change = {"spec": {"$patch": "replace", **manifest["spec"]}}
        return await self._read(
            f"PATCH {path_of(kind, metadata['namespace'], metadata['name'])}",
            lambda client: client.patch(resource_of(kind), body=change, **options),
        )

    async def apply_status(
        self, manifest: Object, *, manager: str = STATUS_FIELD_MANAGER, force: bool = True
    ) -> Object:
        """Applies the status subresource of an InferenceService or a scaler, with its own field manager.

        Without `force`, raises an ApiError with status 409 if another manager wrote another value.
        """
        return await self._apply(manifest, manager, "status", force=force)

    async def delete(self, kind: str, live: Mapping[str, Any]) -> None:
        """Deletes this very object (by uid) and its dependents. Does nothing if it is gone already."""
        metadata = live["metadata"]
        body = {"preconditions": {"uid": metadata["uid"]}, "propagationPolicy": "Background"}
        options = {"name": metadata["name"], "namespace": metadata["namespace"], "body": body, **call_options()}
        await self._read_existing(
            f"DELETE {path_of(kind, metadata['namespace'], metadata['name'])}",
            lambda client: client.delete(resource_of(kind), **options),
        )

    async def _apply(
        self, manifest: Object, manager: str, subresource: str | None = None, *, force: bool = True
    ) -> Object:
        kind, metadata = manifest["kind"], manifest["metadata"]
        options = {"body": manifest, "field_manager": manager, "force_conflicts": force, **call_options()}
        return await self._read(
            f"PATCH {path_of(kind, metadata['namespace'], metadata['name'], subresource)}",
            lambda client: client.server_side_apply(resource_of(kind, subresource), **options),
        )

    async def _read_existing(self, what: str, verb: Verb) -> Object | None:
        try:
            return await self._read(what, verb)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def _read(self, what: str, verb: Verb) -> Object:
        """Returns the answer as JSON. `what` is added to an error as a note."""
        try:
            return await self._server.read(verb)
        except ApiError as error:
            if error.status in _REFUSALS or _NOT_IN_SCHEMA in error.message:
                raise RefusedError(error.message) from error
            error.add_note(what)
            raise


def _get(resource: Resource | Subresource, options: Mapping[str, Any]) -> Verb:
    return lambda client: client.get(resource, **options)


@cache
def resource_of(kind: str, subresource: str | None = None) -> Resource | Subresource:
    """Returns the kind for the dynamic client, from our table: its discovery would send a request for every group."""
    row = BY_NAME[kind]
    resource = Resource(
        prefix="apis" if row.group else "api",
        group=row.group,
        api_version=row.version,
        kind=kind,
        name=row.plural,
        namespaced=True,
        subresources={"status": {"kind": kind, "name": f"{row.plural}/status", "namespaced": True}},
    )
    return resource.subresources[subresource] if subresource else resource
