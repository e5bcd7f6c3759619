"""What is sent to an API server, and what becomes of its answers."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from mini_infer_contract.kubernetes_access import AccessError, ClusterAccess, ExecPlugin
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


PLUGIN = """#!/bin/sh
cd "$(dirname "$0")"
echo run >>runs
if [ -e fails ]; then echo "no session" >&2; exit 1; fi
while [ -e slow ]; do sleep 0.01; done
echo '{"status": {"token": "t'$(wc -l <runs)'", "expirationTimestamp": "2020-01-01T00:00:00Z"}}'
"""


def plugin_access(folder: Path, server: str) -> ClusterAccess:
    (folder / "plugin").write_text(PLUGIN)
    (folder / "plugin").chmod(0o755)
    plugin = ExecPlugin({"apiVersion": "client.authentication.k8s.io/v1", "command": "./plugin"}, folder)
    return ClusterAccess(server, plugin.authorization, None, plugin, plugin.forget)


def wait_for(path: Path) -> None:
    deadline_s = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


async def test_other_work_goes_on_when_a_credential_plugin_is_slow(
    connected: tuple[Server, KubernetesClient], tmp_path: Path
) -> None:
    server, other = connected
    server.responses.append(web.json_response({}))
    (tmp_path / "slow").touch()
    async with KubernetesClient(plugin_access(tmp_path, other._access.server)) as client:
        request = asyncio.create_task(client.request("GET", "/x"))
        await asyncio.to_thread(wait_for, tmp_path / "runs")
        assert not request.done()
        (tmp_path / "slow").unlink()  # a loop that the plugin blocks never gets here
        await request
    assert server.requests[0][2] == "Bearer t1"


async def test_a_request_is_an_access_error_when_the_plugin_fails_and_the_next_one_tries_again(
    connected: tuple[Server, KubernetesClient], tmp_path: Path
) -> None:
    server, other = connected
    server.responses.append(web.json_response({}))
    (tmp_path / "fails").touch()
    async with KubernetesClient(plugin_access(tmp_path, other._access.server)) as client:
        with pytest.raises(AccessError, match="no session"):
            await client.request("GET", "/x")
        (tmp_path / "fails").unlink()
        await client.request("GET", "/x")
    assert [request[2] for request in server.requests] == ["Bearer t2"]


async def test_a_credential_plugin_is_killed_when_the_request_is_cancelled(
    connected: tuple[Server, KubernetesClient], tmp_path: Path
) -> None:
    (tmp_path / "slow").touch()
    access = plugin_access(tmp_path, connected[1]._access.server)
    async with KubernetesClient(access) as client:
        request = asyncio.create_task(client.request("GET", "/x"))
        await asyncio.to_thread(wait_for, tmp_path / "runs")
        assert access.plugin is not None
        with access.plugin._starting:  # it runs before Popen has returned
            process = access.plugin._process
        assert process is not None
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        async with asyncio.timeout(20):
            assert await asyncio.to_thread(process.wait) == -signal.SIGKILL
    assert request.cancelled()


async def test_credentials_are_read_again_when_the_api_server_refuses_them(
    connected: tuple[Server, KubernetesClient],
) -> None:
    server, other = connected
    server.responses.append(web.json_response({"message": "no"}, status=401))
    forgotten: list[float] = []
    access = ClusterAccess(
        other._access.server, lambda: "Bearer old", None, forget=lambda: forgotten.append(time.monotonic())
    )
    async with KubernetesClient(access) as client:
        with pytest.raises(ApiError, match="401"):
            await client.request("GET", "/x")
    assert len(forgotten) == 1


@pytest.mark.parametrize("body", ["<html>", "[1]", "5", ""])
async def test_an_answer_is_an_api_error_when_it_is_no_json_object(
    connected: tuple[Server, KubernetesClient], body: str
) -> None:
    server, client = connected
    server.responses.append(web.Response(text=body))
    with pytest.raises(ApiError, match="no JSON object"):
        await client.request("GET", "/x")
