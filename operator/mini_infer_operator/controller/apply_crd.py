"""`mini-infer-operator --apply-crd`: brings the cluster's CRDs to this operator's version. Used by the chart's hook."""

import asyncio
import sys
from typing import Any

from mini_infer_operator.crd import custom_resource_definitions
from mini_infer_operator.resource import FIELD_MANAGER
from mini_infer_web.kubernetes_api import REQUEST_ERRORS, ApiServer

ESTABLISHED_WITHIN_S = 60.0


def apply_crd() -> int:
    """Applies the CRDs and waits until they are served. Returns the exit code."""
    try:
        asyncio.run(_apply())
    except REQUEST_ERRORS as error:
        print(f"mini-infer-operator --apply-crd: {error or type(error).__name__}", file=sys.stderr)
        return 1
    return 0


async def _apply() -> None:
    async with ApiServer() as server:
        for crd in custom_resource_definitions():
            await _apply_one(server, crd)


async def _apply_one(server: ApiServer, crd: dict[str, Any]) -> None:
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{crd['metadata']['name']}"
    query = {"fieldManager": FIELD_MANAGER, "force": "true"}
    live = await server.request("PATCH", path, query=query, body=crd, content_type="application/apply-patch+yaml")
    async with asyncio.timeout(ESTABLISHED_WITHIN_S):
        while not any(
            c["type"] == "Established" and c["status"] == "True" for c in live.get("status", {}).get("conditions", ())
        ):
            await asyncio.sleep(0.2)
            live = await server.request("GET", path)
    print(f"{crd['metadata']['name']}: applied")
