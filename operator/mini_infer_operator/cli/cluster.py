"""The requests behind the commands of `mini-infer` that look at a cluster, with the rights of whoever types them."""

from collections.abc import Mapping
from typing import Any

from mini_infer_operator.objects.kinds import path_of
from mini_infer_operator.resource import GROUP, KIND, LABEL_SERVICE, PLURAL, VERSION
from mini_infer_web.kubernetes_api import ApiError, ApiServer

FIELD_MANAGER = "mini-infer"
"""Of what a person changes by a command."""
Object = dict[str, Any]


class NotFoundError(Exception):
    """There is no such service, or no such kind; the message says what to type."""


async def services(server: ApiServer, namespace: str | None) -> list[Object]:
    """All services of a namespace, or of all."""
    try:
        return list((await server.request("GET", path_of(KIND, namespace)))["items"])
    except ApiError as error:
        if error.status != 404:
            raise
        raise NotFoundError(
            f"the cluster knows no {PLURAL}.{GROUP}: helm install mini-infer charts/mini-infer"
        ) from error


async def service(server: ApiServer, namespace: str, name: str) -> Object:
    """One service."""
    try:
        return await server.request("GET", path_of(KIND, namespace, name))
    except ApiError as error:
        if error.status != 404:
            raise
        raise NotFoundError(
            f"there is no InferenceService {name} in namespace {namespace}: mini-infer status -A shows all there are"
        ) from error


async def children(server: ApiServer, kind: str, namespace: str, name: str) -> list[Object]:
    """What belongs to a service, by its label."""
    query = {"labelSelector": f"{LABEL_SERVICE}={name}"}
    return list((await server.request("GET", path_of(kind, namespace), query=query))["items"])


async def warnings(server: ApiServer, namespace: str, names: set[str]) -> list[Object]:
    """Events of a namespace about the objects named; none where the reader may not list Events."""
    try:
        found = (await server.request("GET", f"/api/v1/namespaces/{namespace}/events"))["items"]
    except ApiError:
        return []
    return [event for event in found if event["involvedObject"].get("name") in names]


async def log_tail(server: ApiServer, namespace: str, pod: str, *, lines: int, previous: bool) -> str:
    """The last lines of a pod's engine; says why where they cannot be had."""
    query = {"tailLines": str(lines), "container": "engine", **({"previous": "true"} if previous else {})}
    try:
        async with await server.open("GET", f"/api/v1/namespaces/{namespace}/pods/{pod}/log", query=query) as response:
            return (await response.read()).decode(errors="replace")
    except ApiError as error:
        return f"(no log: {error.message})"


async def change_spec(server: ApiServer, namespace: str, name: str, change: Mapping[str, Any]) -> Object:
    """Merge `change` over a service's spec (RFC 7396)."""
    return await server.request(
        "PATCH",
        path_of(KIND, namespace, name),
        query={"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"},
        body={"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "spec": change},
        content_type="application/merge-patch+json",
    )
