"""Leases between gateway and engine: what is learned of sessions, and pins within a client's budget."""

import json
from typing import Any

import pytest

from mini_infer_gateway.fleet.return_times import RequestKind
from mini_infer_gateway.pipeline.stages.session_lease import request_kind
from tests.support.fake_engine import FakeEngine
from tests.support.running_gateway import RunningGateway, running_gateway

TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"messages": [{"role": "user", "content": "hi"}]}, "chat"),
        ({"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}, "tools"),
        ({"messages": [{"role": "tool", "content": "4"}], "tools": TOOLS}, "result"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "result"),
        ({"input": [{"type": "function_call_output", "output": "4"}]}, "result"),
        ({"input": "hi", "tools": TOOLS}, "tools"),
        ({"prompt": "hi"}, "chat"),
        ({"messages": [], "tools": []}, "chat"),
        ({"messages": [7]}, "chat"),
        ({"messages": {"role": "tool"}}, "chat"),
    ],
)
def test_requests_are_told_apart_by_their_last_message_and_tools(fields: dict[str, Any], kind: RequestKind) -> None:
    assert request_kind(fields) == kind


async def converse(gateway: RunningGateway, turns: int) -> None:
    text = "x" * 100
    for _ in range(turns):
        async with gateway.chat(text) as response:
            assert response.status == 200
        text += "y" * 40


@pytest.mark.parametrize("kv_leases", [True, False])
async def test_engines_get_a_lease_when_sessions_have_returned_often(kv_leases: bool) -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint, kv_leases=kv_leases) as gateway:
        await gateway.settled()
        await converse(gateway, 16)
        leases = [headers.get("x-mini-infer-kv-lease") for headers in engine.headers]
        returns = [headers.get("x-mini-infer-kv-return") for headers in engine.headers]
        assert leases[0] is None
        assert returns == [None] * 16, "gaps are too short for a load ahead"
        assert (leases[-1] is not None) == kv_leases
        if kv_leases:
            assert 0 < float(leases[-1] or 0) < 60
        async with gateway.client.get(gateway.url + "/metrics") as response:
            count = 'mini_infer_gateway_session_gap_seconds_count{kind="text"} 15.0'
            assert (count in await response.text()) == kv_leases


async def test_engines_are_told_when_a_session_is_expected() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()
        returns = gateway.app._generate._serving.returns
        for turn in range(30):
            keys = [b"%d" % number for number in range(20 + turn)]
            returns.arrived(keys, is_result=False, now_s=5.0 * turn)
            returns.ended(keys, "others", "chat", 5.0 * turn)
        await converse(gateway, 1)
        assert 3.0 < float(engine.headers[0]["x-mini-infer-kv-return"]) <= 5.0
        assert 5.0 <= float(engine.headers[0]["x-mini-infer-kv-lease"]) < 8.0


async def test_leases_of_clients_do_not_reach_engines_when_they_send_the_header() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        headers = {"x-mini-infer-kv-lease": "99", "x-mini-infer-kv-return": "9"}
        async with gateway.client.post(gateway.url + "/v1/chat/completions", json=body, headers=headers) as response:
            assert response.status == 200
        assert not {"x-mini-infer-kv-lease", "x-mini-infer-kv-return"}.intersection(engine.headers[0])


async def test_a_pin_becomes_an_ordinary_lease_when_the_client_has_pinned_too_much() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint, max_pinned_tokens=300) as gateway:
        await gateway.settled()
        for hints in (
            {"pin": True, "ttl_s": 60},
            {"pin": True},
            {"pin": True, "ttl_s": 60},
            {"done": True},
            "pin",
            None,
        ):
            body = {"model": "m", "messages": [{"role": "user", "content": "z" * 100}], "kv_hints": hints}
            async with gateway.client.post(gateway.url + "/v1/chat/completions", json=body) as response:
                assert response.status == 200
        got = [json.loads(body)["kv_hints"] for body in engine.bodies]
        assert got == [
            {"pin": True, "ttl_s": 60},
            {"pin": True},
            {"pin": False, "ttl_s": 60},
            {"done": True},
            "pin",
            None,
        ]


HELLO = [{"role": "user", "content": "z" * 100}]


@pytest.mark.parametrize(
    "hints",
    [
        {"pin": True, "ttl_s": 10**400},
        {"pin": True, "ttl_s": -5},
        {"pin": True, "ttl_s": 0},
        {"pin": True, "ttl_s": "60"},
        {"pin": True, "ttl_s": 1e300},
        {"pin": True, "until": 5},
        {"pin": 1},
        {"done": True, "ttl_s": []},
    ],
    ids=lambda hints: str(hints)[:40],
)
async def test_hints_that_are_none_reach_the_engine_as_they_are_when_the_budget_is_used_up(
    hints: dict[str, Any],
) -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint, max_pinned_tokens=1) as gateway:
        await gateway.settled()
        body = {"model": "m", "messages": HELLO, "kv_hints": hints}
        async with gateway.client.post(gateway.url + "/v1/chat/completions", json=body) as response:
            assert response.status == 200, "an engine refuses them, and says why"
        assert json.loads(engine.bodies[-1])["kv_hints"] == hints


async def test_hints_go_to_the_engine_that_has_the_session_when_its_last_answer_has_ended() -> None:
    async with FakeEngine("a") as one, FakeEngine("b") as two, running_gateway(one.endpoint, two.endpoint) as gateway:
        await gateway.settled()
        async with gateway.chat("z" * 100) as response:
            assert response.status == 200
        served = one if one.bodies else two
        for path in ("/v1/kv_hints",) * 3:
            body = {"model": "m", "messages": HELLO, "kv_hints": {"done": True}}
            async with gateway.client.post(gateway.url + path, json=body) as response:
                assert response.status == 200
        assert len(served.bodies) == 4
        assert json.loads(served.bodies[-1])["kv_hints"] == {"done": True}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/kv_hints"])
async def test_pins_are_bounded_when_they_come_by_another_api_or_after_the_answer(path: str) -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint, max_pinned_tokens=150) as gateway:
        await gateway.settled()
        for _ in range(2):
            body = {"model": "m", "messages": HELLO, "kv_hints": {"pin": True, "ttl_s": 60}, "max_tokens": 5}
            async with gateway.client.post(gateway.url + path, json=body) as response:
                assert response.status == 200
        assert [json.loads(body)["kv_hints"]["pin"] for body in engine.bodies] == [True, False]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/kv_hints"])
async def test_a_session_is_not_expected_any_more_when_its_client_is_done(path: str) -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()
        returns = gateway.app._generate._serving.returns
        async with gateway.chat("z" * 100) as response:
            assert response.status == 200
        assert len(returns._waiting) == 1
        body = {"model": "m", "messages": HELLO, "kv_hints": {"done": True}}
        async with gateway.client.post(gateway.url + path, json=body) as response:
            assert response.status == 200
        assert len(returns._waiting) == 0
