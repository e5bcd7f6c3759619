"""Engines are told of sessions whose requests wait for them, and nobody waits for that."""

import asyncio
from typing import Any

import pytest

from mini_infer_gateway.pipeline import prefetches
from mini_infer_gateway.pipeline.prefetches import Prefetches
from tests.gateway.test_waiting_here import busy, metric, waiting
from tests.support.fake_engine import FakeEngine
from tests.support.running_gateway import RunningGateway, running_gateway, until

CHAT = "/v1/chat/completions"


async def send(gateway: RunningGateway, text: str, name: str, **fields: object) -> int:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], **fields}
    async with gateway.client.post(gateway.url + CHAT, json=body, headers={"x-request-id": name}) as response:
        await response.read()
        return response.status


@pytest.mark.parametrize(("fields", "name"), [({}, "first"), ({"request_id": "own"}, "own")])
async def test_an_engine_is_told_of_the_session_when_its_request_waits(fields: dict[str, str], name: str) -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()
        await send(gateway, "x" * 100, "first", **fields)
        await busy(gateway, engine)
        second = asyncio.ensure_future(send(gateway, "x" * 200, "second"))
        new = asyncio.ensure_future(send(gateway, "z" * 200, "another-session"))
        await until(lambda: waiting(gateway) == 2)
        await until(lambda: bool(engine.prefetches))
        assert engine.prefetches == [{"request_ids": [name], "ttl_s": pytest.approx(1000.0)}], (
            "twice the predicted wait"
        )
        await busy(gateway, engine, 0)
        assert await asyncio.gather(second, new) == [200, 200]
        assert await metric(gateway, 'mini_infer_gateway_kv_prefetches_total{outcome="sent"}') == 1


async def test_nothing_is_sent_when_the_request_need_not_wait() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()
        for number in range(3):
            await send(gateway, "x" * (100 + 50 * number), f"r{number}")
        assert engine.prefetches == []


async def test_an_engine_is_left_alone_when_it_has_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, counts = [0.0], dict[str, int]()

    def count(outcome: str, sessions: int) -> None:
        counts[outcome] = counts.get(outcome, 0) + sessions

    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        engine.prefetch_status = 404
        url, messages = engine.endpoint.url, Prefetches(gateway.app.upstream, count, lambda: now_s[0])
        messages.announce(url, "r0", 0.0)
        await until(lambda: counts == {"failed": 1})
        messages.announce(url, "r1", 0.0)
        assert counts == {"failed": 1, "dropped": 1}
        now_s[0], engine.prefetch_status = prefetches.REFUSED_PAUSE_S + 1, 204
        messages.announce(url, "r2", 7.0)
        await until(lambda: counts.get("sent") == 1)
        assert engine.prefetches[-1] == {"request_ids": ["r2"], "ttl_s": 14.0}
        await messages.close()


async def test_sessions_go_together_and_within_bounds_when_many_wait() -> None:
    counts: list[tuple[str, int]] = []
    sent: list[Any] = []

    class Upstream:
        def __init__(self) -> None:
            self.proofs: dict[str, bytes] = {}

        async def post(self, url: str, path: str, body: bytes, timeout_s: float, **_: object) -> tuple[int, bytes]:
            sent.append(body)
            await asyncio.sleep(0)
            return 204, b""

    messages = Prefetches(Upstream(), lambda *one: counts.append(one), lambda: 0.0)  # type: ignore[arg-type]
    for number in range(prefetches.MAX_WAITING + 5):
        messages.announce("http://a", f"r{number}", 1.0)
    await until(lambda: not messages._tasks)
    assert counts == [("dropped", 1)] * 5 + [("sent", 64)] * 4
    assert len(sent) == 4
    await messages.close()


async def test_requests_are_served_when_their_engine_does_not_answer_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetches, "TIMEOUT_S", 0.05)
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()
        await send(gateway, "x" * 100, "first")
        await busy(gateway, engine)

        async def hang(*_: object, **__: object) -> tuple[int, bytes]:
            await asyncio.sleep(60)
            return 204, b""

        monkeypatch.setattr(gateway.app.upstream, "post", hang)
        second = asyncio.ensure_future(send(gateway, "x" * 200, "second"))
        await until(lambda: waiting(gateway) == 1)
        failed = b'mini_infer_gateway_kv_prefetches_total{outcome="failed"} 1.0'
        await until(lambda: failed in gateway.app.metrics.text())
        await busy(gateway, engine, 0)
        assert await second == 200
