"""Which answers of the API server are a user's to solve, and which pass by themselves."""

from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from mini_infer_operator.objects.api import KubernetesApi, RefusedError
from mini_infer_operator.objects.kinds import path_of
from mini_infer_web.kubernetes_api import ApiError
from tests.support.api_servers import server_at

MANIFEST = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s", "namespace": "n"}}


@pytest.fixture
async def answers() -> AsyncIterator[tuple[KubernetesApi, list[web.Response], list[str]]]:
    """A client, the responses it will get, and the requests that it made."""
    responses: list[web.Response] = []
    requests: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        requests.append(f"{request.method} {request.path_qs} {request.content_type}")
        return responses.pop(0)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    async with server_at(f"http://127.0.0.1:{runner.addresses[0][1]}") as server:
        yield KubernetesApi(server), responses, requests
    await runner.cleanup()


Answers = tuple[KubernetesApi, list[web.Response], list[str]]


@pytest.mark.parametrize("status", [400, 403, 413, 422])
async def test_refused_error_has_the_api_servers_message(answers: Answers, status: int) -> None:
    api, responses, _ = answers
    responses.append(web.json_response({"message": "exceeded quota: x"}, status=status))
    with pytest.raises(RefusedError, match=r"^exceeded quota: x$"):
        await api.apply(MANIFEST)


async def test_an_apply_is_refused_when_a_field_is_not_in_the_schema(answers: Answers) -> None:
    api, responses, _ = answers
    message = "failed to create typed patch object (n/s; /v1, Kind=Service): .spec.x: field not declared in schema"
    responses.append(web.json_response({"message": message}, status=500))
    with pytest.raises(RefusedError, match="not declared in schema"):
        await api.apply(MANIFEST)


@pytest.mark.parametrize("status", [401, 404, 409, 429, 500, 503, 504])
async def test_transient_api_errors_are_raised_unchanged(answers: Answers, status: int) -> None:
    api, responses, _ = answers
    responses += [web.json_response({"message": "later"}, status=status) for _ in range(2 if status == 401 else 1)]
    with pytest.raises(ApiError) as caught:
        await api.apply(MANIFEST)
    assert caught.value.status == status
    assert caught.value.__notes__ == ["PATCH /api/v1/namespaces/n/services/s"]


async def test_get_returns_none_and_delete_succeeds_when_the_object_is_missing(answers: Answers) -> None:
    api, responses, requests = answers
    responses += [web.json_response({}, status=404), web.json_response({}, status=404)]
    assert await api.get("Pod", "n", "p") is None
    await api.delete("Service", {"metadata": {"name": "s", "namespace": "n", "uid": "u"}})
    assert [line.split(" ")[0] for line in requests] == ["GET", "DELETE"]


async def test_writes_are_forced_server_side_applies_with_a_field_manager(answers: Answers) -> None:
    api, responses, requests = answers
    responses += [web.json_response({}), web.json_response({})]
    await api.apply(MANIFEST)
    await api.apply_status({"kind": "InferenceService", "metadata": {"name": "i", "namespace": "n"}})
    assert requests == [
        "PATCH /api/v1/namespaces/n/services/s"
        "?fieldManager=mini-infer-operator&force=true application/apply-patch+yaml",
        "PATCH /apis/serving.mini-infer.io/v1alpha1/namespaces/n/inferenceservices/i/status"
        "?fieldManager=mini-infer-operator-status&force=true application/apply-patch+yaml",
    ]


def test_api_paths_of_kinds() -> None:
    assert path_of("Deployment", "n", "d") == "/apis/apps/v1/namespaces/n/deployments/d"
    assert path_of("InferenceService", None) == "/apis/serving.mini-infer.io/v1alpha1/inferenceservices"
