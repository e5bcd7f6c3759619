"""Responses in the background whose engine does not answer as it should."""

from typing import Any

import msgspec
import pytest

from mini_infer_apis.stored_responses.background import BackgroundResponse
from mini_infer_apis.stored_responses.recorder import MAX_ERROR_BYTES
from mini_infer_apis.stored_responses.request import KeptRequest, Turn
from mini_infer_apis.stored_responses.store import ResponseStore
from mini_infer_web.asgi import Receive, Scope, Send

RESPONSE: dict[str, Any] = {"id": "resp_1", "status": "queued", "output": []}


def running(limit_bytes: int = 1 << 20) -> BackgroundResponse:
    turn = Turn(KeptRequest("resp_1", background=True), "me", None, "me", b"[]")
    return BackgroundResponse(ResponseStore(limit_bytes, 10.0), turn, dict(RESPONSE), lambda: 0.0, keeps_events=True)


async def test_a_bounded_part_of_an_error_is_read_when_it_has_no_end() -> None:
    response = running()

    async def generate(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 500, "headers": []})
        for _ in range(100):
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        assert len(response._error_body) == MAX_ERROR_BYTES
        await send({"type": "http.response.body", "body": b""})

    await response.run(generate, {}, [b"{}"])
    assert response.response["status"] == "failed"


@pytest.mark.parametrize("position", [0, 3])
async def test_a_follower_gets_an_error_when_the_events_had_to_be_evicted(position: int) -> None:
    response = running(limit_bytes=20_000)

    async def generate(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(100):
            data = msgspec.json.encode({"type": "response.output_text.delta", "delta": "x" * 1000, "n": number})
            event = b"event: response.output_text.delta\ndata: %b\n\n" % data
            await send({"type": "http.response.body", "body": event, "more_body": True})
        assert not response._events

    await response.run(generate, {}, [b"{}"])
    events = [event async for event in response.events(position)]
    assert len(events) == 1
    assert b"response_evicted" in events[0]
