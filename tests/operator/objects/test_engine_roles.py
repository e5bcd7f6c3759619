"""Roles that are sent to engines: once for each container, with proof, and again where an engine did not answer."""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from mini_infer_contract.peer_auth import PEER_HEADER, PeerSecret
from mini_infer_operator.objects import engine_roles
from mini_infer_operator.objects.engine_roles import EngineRoles
from mini_infer_operator.resource import LABEL_CURRENT_ROLE, LABEL_ROLE

SERVICE = ("default", "demo")
ROOT = PeerSecret(bytes(32))
TOKEN = ROOT.for_service("default/demo").http_token()


class Peers:
    async def root(self) -> PeerSecret:
        return ROOT


class Engine:
    """An engine at 127.0.0.1 that answers with `status`."""

    def __init__(self) -> None:
        self.status, self.text, self.taken = 200, "", list[tuple[str, str]]()

    async def answer(self, request: web.Request) -> web.Response:
        assert (request.method, request.path) == ("POST", "/role")
        self.taken.append(((await request.json())["role"], request.headers[PEER_HEADER]))
        return web.Response(status=self.status, text=self.text)


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Engine, EngineRoles]]:
    engine = Engine()
    app = web.Application()
    app.router.add_route("*", "/{any:.*}", engine.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setattr(engine_roles, "HTTP_PORT", runner.addresses[0][1])
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        yield engine, EngineRoles(session, Peers())  # type: ignore[arg-type]  # the one method that is called
    await runner.cleanup()


def pod(current: str | None = "decode", *, ready: bool = True, container: str = "c1", ip: str = "127.0.0.1") -> Any:
    labels = {LABEL_ROLE: "prefill"} | ({LABEL_CURRENT_ROLE: current} if current else {})
    status = {
        "podIP": ip,
        "conditions": [{"type": "Ready", "status": str(ready)}],
        "containerStatuses": [{"containerID": container, "restartCount": 0}],
    }
    return {"metadata": {"name": "p", "uid": "u", "labels": labels}, "status": status}


@pytest.mark.parametrize(
    ("passes", "expected"),
    [
        pytest.param([pod()], ["decode"], id="a switch"),
        pytest.param([pod(), pod()], ["decode"], id="the same again"),
        pytest.param([pod(), pod(container="c2")], ["decode", "decode"], id="its container started anew"),
        pytest.param([pod(), pod("prefill")], ["decode", "prefill"], id="back"),
        pytest.param([pod(None)], [], id="it never switched"),
        pytest.param([pod(ready=False)], [], id="it is not ready"),
        pytest.param([pod(ready=False), pod()], ["decode"], id="once it is ready"),
    ],
)
async def test_role_is_sent_once_to_each_container(
    world: tuple[Engine, EngineRoles], passes: list[Any], expected: list[str]
) -> None:
    engine, roles = world
    for each in passes:
        sent = await roles.send(SERVICE, [each])
        assert (sent.unanswered, sent.refused) == ([], {})
    assert engine.taken == [(role, TOKEN) for role in expected]


async def test_role_is_sent_again_when_the_engine_is_still_loading(world: tuple[Engine, EngineRoles]) -> None:
    engine, roles = world
    engine.status = 503
    assert (await roles.send(SERVICE, [pod()])).unanswered == ["p"]
    engine.status = 200
    assert (await roles.send(SERVICE, [pod()])).unanswered == []
    assert len(engine.taken) == 2


async def test_role_is_not_sent_again_when_the_engine_refuses(world: tuple[Engine, EngineRoles]) -> None:
    engine, roles = world
    engine.status, engine.text = 409, '{"error": {"message": "it moves no keys and values"}}'
    assert (await roles.send(SERVICE, [pod()])).refused == {"p": "it moves no keys and values"}
    assert roles.refused(SERVICE) == {"u"}
    await roles.send(SERVICE, [pod()])
    assert len(engine.taken) == 1
    roles.forget(SERVICE)
    assert roles.refused(SERVICE) == frozenset()


@pytest.mark.parametrize("text", ["", "404 page not found", "{}", '{"error": 7}', "[" * 10_000, "x" * 100_000])
async def test_answer_of_another_server_is_none(world: tuple[Engine, EngineRoles], text: str) -> None:
    engine, roles = world
    engine.status, engine.text = 404, text
    sent = await roles.send(SERVICE, [pod()])
    assert (sent.unanswered, sent.refused, roles.refused(SERVICE)) == (["p"], {}, frozenset())


async def test_pod_without_an_address_counts_as_unanswered(world: tuple[Engine, EngineRoles]) -> None:
    _, roles = world
    assert (await roles.send(SERVICE, [pod(ip="")])).unanswered == ["p"]
