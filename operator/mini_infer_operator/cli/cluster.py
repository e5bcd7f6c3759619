"""Sends the requests of the `mini-infer` commands that look at a cluster, with the rights of the user who runs them."""

from collections.abc import Mapping
from typing import Any

from mini_infer_operator.objects.kinds import path_of
from mini_infer_operator.resource import GROUP, KIND, LABEL_SERVICE, PLURAL, VERSION
from mini_infer_web.kubernetes_api import ApiError, ApiServer

FIELD_MANAGER = "mini-infer"
"""Field manager of fields that a user changes by a command."""
Object = dict[str, Any]


class NotFoundError(Exception):
    """The service or the kind does not exist; the message says what to type."""


async def services(server: ApiServer, namespace: str | None) -> list[Object]:
    """Returns all services of a namespace, or of all namespaces. Raises NotFoundError if the CRD is not installed."""
    try:
        return list((await server.request("GET", path_of(KIND, namespace)))["items"])
    except ApiError as error:
        if error.status != 404:
            raise
        raise NotFoundError(
            f"the cluster knows no {PLURAL}.{GROUP}: helm install mini-infer charts/mini-infer"
        ) from error


async def service(server: ApiServer, namespace: str, name: str) -> Object:
    """Returns one service. Raises NotFoundError if there is none of this name."""
    try:
        return await server.request("GET", path_of(KIND, namespace, name))
    except ApiError as error:
        if error.status != 404:
            raise
        raise NotFoundError(
            f"there is no InferenceService {name} in namespace {namespace}: mini-infer status -A shows all there are"
        ) from error


async def children(server: ApiServer, kind: str, namespace: str, name: str) -> list[Object]:
    """Returns the objects of a kind that carry a service's label."""
    query = {"labelSelector": f"{LABEL_SERVICE}={name}"}
    return list((await server.request("GET", path_of(kind, namespace), query=query))["items"])


async def warnings(server: ApiServer, namespace: str, names: set[str]) -> list[Object]:
    """Returns a namespace's events about the named objects; none if the user may not list Events."""
    try:
        found = (await server.request("GET", f"/api/v1/namespaces/{namespace}/events"))["items"]
    except ApiError:
        return []
    return [event for event in found if event["involvedObject"].get("name") in names]


async def log_tail(server: ApiServer, namespace: str, pod: str, *, lines: int, previous: bool) -> str:
    """Returns the last lines of a pod's engine container, or a line that says why there is no log."""
    query = {"tailLines": str(lines), "container": "engine", **({"previous": "true"} if previous else {})}
    try:
        async with await server.open("GET", f"/api/v1/namespaces/{namespace}/pods/{pod}/log", query=query) as response:
            return (await response.read()).decode(errors="replace")
    except ApiError as error:
        return f"(no log: {error.message})"


async def change_spec(server: ApiServer, namespace: str, name: str, change: Mapping[str, Any]) -> Object:
    """Merges `change` into a service's spec (RFC 7396). Returns the service."""
    return await _merge(server, namespace, name, {"spec": change})


async def annotate(server: ApiServer, namespace: str, name: str, annotations: Mapping[str, str | None]) -> Object:
    """Sets annotations of a service, and removes those that are None. Returns the service."""
    return await _merge(server, namespace, name, {"metadata": {"annotations": annotations}})


async def _merge(server: ApiServer, namespace: str, name: str, change: Mapping[str, Any]) -> Object:
    return await server.request(
        "PATCH",
        path_of(KIND, namespace, name),
        query={"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"},
        body={"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, **change},
        content_type="application/merge-patch+json",
    )
