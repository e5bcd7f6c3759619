"""Two that want one Lease, against a small API server that keeps versions as the real one does."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web

from mini_infer_operator.controller import lease as lease_module
from mini_infer_operator.controller.lease import DURATION_S, LeaderLease, LeaseView, may_take
from mini_infer_web.kubernetes_api import ApiServer as Connection
from tests.support.api_servers import server_at


@pytest.mark.parametrize(
    ("view", "now_s", "free"),
    [
        (None, 0.0, True),
        (LeaseView("", "1", 0.0), 0.1, True),
        (LeaseView("me", "1", 0.0), 0.1, True),
        (LeaseView("other", "1", 0.0), DURATION_S - 0.1, False),
        (LeaseView("other", "1", 0.0), DURATION_S, True),
    ],
    ids=["there is none", "given back", "ours", "held", "its holder is silent"],
)
def test_when_a_lease_is_free(view: LeaseView | None, now_s: float, free: bool) -> None:
    assert may_take(view, "me", now_s) is free


class ApiServer:
    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.away = False

    async def serve(self, request: web.Request) -> web.Response:
        if self.away:
            return web.json_response({"message": "away"}, status=503)
        if request.method == "GET":
            return web.json_response(self.lease or {"message": "none"}, status=200 if self.lease else 404)
        body = await request.json()
        version = self.lease["metadata"]["resourceVersion"] if self.lease else None
        if body["metadata"].get("resourceVersion") != version:
            return web.json_response({"message": "conflict"}, status=409)
        body["metadata"]["resourceVersion"] = str(int(version or 0) + 1)
        self.lease = body
        return web.json_response(body)


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[ApiServer, Connection]]:
    for name, value in {"RENEW_EVERY_S": 0.05, "RETRY_S": 0.03}.items():
        monkeypatch.setattr(lease_module, name, value)
    api = ApiServer()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", api.serve)
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    async with server_at(f"http://127.0.0.1:{port}") as client:
        yield api, client
    await runner.cleanup()


class Pod:
    """One that wants to work; `both` counts how many do at once."""

    def __init__(self, client: Connection, name: str, working: set[str]) -> None:
        self.name, self._working = name, working
        self.lease = LeaderLease(client, "n", "l", name, self._gained, self._lost)
        self.task = asyncio.create_task(self.lease.run())

    def _gained(self) -> None:
        assert not self._working, "two work at once"
        self._working.add(self.name)

    async def _lost(self) -> None:
        self._working.discard(self.name)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what is waited for knows no event
            await asyncio.sleep(0.005)


async def test_one_works_and_the_other_takes_over_when_it_ends(
    server: tuple[ApiServer, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "DURATION_S", 600.0)  # a busy machine may stop us both for longer than ten
    monkeypatch.setattr(lease_module, "GIVE_UP_S", 300.0)
    working: set[str] = set()
    first = Pod(server[1], "a", working)
    await until(lambda: working == {"a"})
    second = Pod(server[1], "b", working)
    await asyncio.sleep(0.2)
    assert working == {"a"}
    await first.stop()
    await until(lambda: working == {"b"})
    await second.stop()
    assert working == set()


async def test_a_leader_stops_before_another_starts_when_it_cannot_renew_its_lease(
    server: tuple[ApiServer, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    working: set[str] = set()
    pod = Pod(server[1], "a", working)
    await until(lambda: working == {"a"})
    monkeypatch.setattr(lease_module, "GIVE_UP_S", 0.1)
    server[0].away = True
    await until(lambda: not working)
    monkeypatch.undo()
    server[0].away = False
    await until(lambda: working == {"a"})
    await pod.stop()
