"""The CRD on a real API server: what it refuses and what it says."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from mini_infer_operator.objects.kinds import path_of
from mini_infer_web.kubernetes_api import ApiError, ApiServer
from tests.support.api_servers import server_of
from tests.support.control_plane import ControlPlane
from tests.support.services import VALID, VALID_PRESET, changed, failing_examples, failing_presets

pytestmark = [pytest.mark.cluster]
EXAMPLES = failing_examples()


@pytest.fixture
async def api(control_plane: ControlPlane) -> AsyncIterator[ApiServer]:
    async with server_of(control_plane.kubeconfig) as api:
        yield api


async def create(api: ApiServer, document: dict[str, Any], namespace: str | None = "default") -> None:
    """As kubectl does it: unknown fields are errors. Nothing is stored."""
    query = {"dryRun": "All", "fieldValidation": "Strict"}
    await api.request("POST", path_of(document["kind"], namespace), body=document, query=query)


async def test_the_api_server_accepts_a_valid_service(api: ApiServer) -> None:
    await create(api, VALID)


@pytest.mark.parametrize("example", EXAMPLES, ids=[str(example["change"])[:100] for example in EXAMPLES])
async def test_the_api_server_refuses_a_service_when_it_breaks_a_rule(api: ApiServer, example: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        await create(api, changed(example["change"]))
    answer = caught.value.message
    assert caught.value.status in {400, 422}
    assert example["path"] in answer
    assert example.get("message", "") in answer


async def test_the_api_server_accepts_a_valid_preset(api: ApiServer) -> None:
    await create(api, VALID_PRESET, namespace=None)


@pytest.mark.parametrize("example", failing_presets(), ids=lambda example: str(example["change"])[:100])
async def test_the_api_server_refuses_a_preset_when_it_breaks_a_rule(api: ApiServer, example: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        await create(api, changed(example["change"], VALID_PRESET), namespace=None)
    assert caught.value.status in {400, 422}
    assert example["path"] in caught.value.message
    assert example.get("message", "") in caught.value.message
