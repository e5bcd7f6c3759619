"""The CRD on a real API server: what it refuses and what it says."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from kubernetes.aio import client, config
from kubernetes.aio.client.exceptions import ApiException

from mini_infer_operator.objects.api import KubernetesApi, path_of
from tests.support.control_plane import ControlPlane
from tests.support.services import VALID, changed, failing_examples

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("cluster")]
EXAMPLES = failing_examples()


@pytest.fixture
async def api(control_plane: ControlPlane) -> AsyncIterator[KubernetesApi]:
    await config.load_kube_config(str(control_plane.kubeconfig))
    api = KubernetesApi(client.ApiClient())
    yield api
    await api.close()


async def create(api: KubernetesApi, document: dict[str, Any]) -> None:
    """As kubectl does it: unknown fields are errors. Nothing is stored."""
    await api._dynamic.request(
        "post",
        path_of("InferenceService", "default"),
        body=document,
        dry_run="All",
        query_params=[("fieldValidation", "Strict")],
        serialize=False,
    )


async def test_a_valid_service_is_taken(api: KubernetesApi) -> None:
    await create(api, VALID)


@pytest.mark.parametrize("example", EXAMPLES, ids=[str(example["change"])[:100] for example in EXAMPLES])
async def test_a_broken_rule_is_refused(api: KubernetesApi, example: dict[str, Any]) -> None:
    with pytest.raises(ApiException) as caught:
        await create(api, changed(example["change"]))
    answer = (caught.value.body or "").replace("\\u003c", "<").replace('\\"', '"')
    assert caught.value.status in {400, 422}
    assert example["path"] in answer
    assert example.get("message", "") in answer
