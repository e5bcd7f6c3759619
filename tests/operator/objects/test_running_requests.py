"""What the operator reads of draining engines, whatever their pods answer."""

import asyncio
import gzip
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from mini_infer_operator.objects import running_requests
from mini_infer_operator.objects.engine_answers import LONGEST_ANSWER_BYTES
from mini_infer_operator.objects.running_requests import RunningRequests

ANSWERS = {
    "ours": (web.Response(body=b'{"running": 3, "draining": true}'), 3),
    "none": (web.Response(status=404, body=b"no such page"), None),
    "a redirect": (web.Response(status=302, headers={"location": "/elsewhere"}), None),
    "a negative number": (web.Response(body=b'{"running": -1}'), None),
    "an infinite number": (web.Response(body=b'{"running": 1e999}'), None),
    "no number": (web.Response(body=b'{"running": "3"}'), None),
    "nesting": (web.Response(body=b'{"running": 3, "more": ' + b"[" * 16_000), None),
    "a long answer": (web.Response(body=b'{"running": 3, "more": "' + b"x" * LONGEST_ANSWER_BYTES + b'"}'), None),
    "a compressed one": (
        web.Response(body=gzip.compress(b'{"running": 3}'), headers={"content-encoding": "gzip"}),
        None,
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_a_count_is_read_or_left_out_when_a_pod_answers_anything(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, expected = ANSWERS[name]
    asked = []

    async def answer_any(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        return answer if request.path == "/drain" else web.Response(body=b'{"running": 7}')

    async for found in queried(answer_any, monkeypatch):
        assert found == ({} if expected is None else {"engine": expected})
    assert asked == ["/drain"]


async def test_an_answer_without_an_end_is_given_up_when_it_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        while sent < 1 << 30:
            await response.write(b"x" * 65536)
            sent += 65536
        return response

    async for found in queried(endless, monkeypatch):
        assert found == {}
    assert sent < 1 << 24


async def queried(handler: object, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[dict[str, int]]:
    """What is read of one pod whose server is `handler`."""
    server = web.Server(handler)  # type: ignore[arg-type]  # as aiohttp's
    runner = web.ServerRunner(server, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setattr(running_requests, "HTTP_PORT", runner.addresses[0][1])
    pod = {"metadata": {"name": "engine"}, "status": {"podIP": "127.0.0.1"}}
    async with aiohttp.ClientSession(auto_decompress=False) as session, asyncio.timeout(10):
        yield await RunningRequests(session).query([pod])
    await runner.cleanup()
