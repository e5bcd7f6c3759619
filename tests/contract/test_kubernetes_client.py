"""What is sent to an API server, and what becomes of its answers."""

from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from mini_infer_contract.kubernetes_access import ClusterAccess
from mini_infer_contract.kubernetes_client import ApiError, KubernetesClient


class Server:
    """Answers with `responses` in turn and remembers what it was asked."""

    def __init__(self) -> None:
        self.responses: list[web.Response] = []
        self.requests: list[tuple[str, str, str, str]] = []

    async def handle(self, request: web.Request) -> web.Response:
        asked = (request.method, request.path_qs, request.headers.get("Authorization", ""), request.content_type)
        self.requests.append(asked)
        return self.responses.pop(0)


@pytest.fixture
async def connected() -> AsyncIterator[tuple[Server, KubernetesClient]]:
    server, app = Server(), web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    access = ClusterAccess(f"http://127.0.0.1:{runner.addresses[0][1]}", lambda: "Bearer t", None)
    client = KubernetesClient(access)
    yield server, client
    await client.close()
    await runner.cleanup()


async def test_a_request_carries_the_token_the_query_and_the_bodys_type(
    connected: tuple[Server, KubernetesClient],
) -> None:
    server, client = connected
    server.responses += [web.json_response({"kind": "Pod"}), web.json_response({})]
    assert await client.request("GET", "/api/v1/pods", query={"labelSelector": "a in (b,c)"}) == {"kind": "Pod"}
    await client.request("PATCH", "/x", body={"a": 1}, content_type="application/apply-patch+yaml")
    assert server.requests[0][:3] == ("GET", "/api/v1/pods?labelSelector=a+in+(b,c)", "Bearer t")
    assert server.requests[1][3] == "application/apply-patch+yaml"


async def test_an_error_says_what_the_server_says(connected: tuple[Server, KubernetesClient]) -> None:
    server, client = connected
    status = {"kind": "Status", "reason": "Forbidden", "message": "exceeded quota: q"}
    server.responses += [web.json_response(status, status=403), web.Response(text="upstream is away\n", status=502)]
    with pytest.raises(ApiError) as refused:
        await client.request("GET", "/x")
    assert (refused.value.status, refused.value.reason, refused.value.message) == (
        403,
        "Forbidden",
        "exceeded quota: q",
    )
    with pytest.raises(ApiError, match=r"^502: upstream is away$"):
        await client.request("GET", "/x")


async def test_a_redirect_takes_the_token_nowhere(connected: tuple[Server, KubernetesClient]) -> None:
    server, client = connected
    server.responses.append(web.Response(status=307, headers={"Location": "http://127.0.0.1:1/"}, text="{}"))
    async with await client.open("GET", "/x") as response:
        assert response.status == 307
    assert len(server.requests) == 1


async def test_each_request_is_counted_with_its_status(connected: tuple[Server, KubernetesClient]) -> None:
    server, connected_client = connected
    seen: list[tuple[str, str, dict[str, str], int | None]] = []
    client = KubernetesClient(
        connected_client._access,
        lambda method, path, query, status: seen.append((method, path, dict(query), status)),
    )
    server.responses += [web.json_response({}), web.json_response({"message": "no"}, status=403)]
    async with client:
        await client.request("GET", "/a", query={"watch": "true"})
        with pytest.raises(ApiError):
            await client.request("POST", "/b", body={})
    gone = KubernetesClient(ClusterAccess("http://127.0.0.1:9", lambda: None, None), client._seen)
    async with gone:
        with pytest.raises(OSError, match=r"127\.0\.0\.1"):
            await gone.request("GET", "/c")
    assert seen == [("GET", "/a", {"watch": "true"}, 200), ("POST", "/b", {}, 403), ("GET", "/c", {}, None)]
