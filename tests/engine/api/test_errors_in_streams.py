"""An error names the client's own fields wherever it is told: as an answer, after comments, behind a part of a text."""

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from mini_infer_apis.dialects.responses import RESPONSES_PATH
from mini_infer_apis.stored_responses.request import KeptRequest
from mini_infer_engine.api.dialects.responses.responses_api import ResponsesDialect
from mini_infer_engine.api.generate import Work, _stream
from mini_infer_web.api_errors import ApiError
from mini_infer_web.asgi import Message


@dataclass
class Broken:
    """A generation that fails, about a field of the chat that a response was made of, after some steps."""

    steps: int
    wait_s: float
    error: ApiError | None = None
    replies: list[Any] = field(default_factory=list)
    kv_fallback: str = ""

    async def deltas(self) -> list[Any]:
        await asyncio.sleep(self.wait_s)
        self.steps -= 1
        if self.steps >= 0:
            return ["a step"]
        self.error = ApiError(400, "max_completion_tokens is too large", param="max_completion_tokens")
        return []


class Plain:
    """Renders what it is told, and errors by their message."""

    def begin(self, replies: Any) -> bytes:
        return b""

    def render(self, deltas: list[Any]) -> bytes:
        return b"text "

    def end(self, replies: Any) -> bytes:
        raise AssertionError("it failed")

    def broken(self, error: ApiError) -> bytes:
        return error.message.encode()


@pytest.mark.parametrize(
    ("steps", "wait_s", "status"),
    [
        pytest.param(0, 0.0, 400, id="before anything"),
        pytest.param(0, 0.2, 200, id="after comments"),
        pytest.param(1, 0.0, 200, id="behind some text"),
    ],
)
async def test_stream_errors_name_the_clients_fields(steps: int, wait_s: float, status: int) -> None:
    body = {"model": "m", "input": "hi", "stream": True, "max_output_tokens": 5}
    spec = ResponsesDialect(KeptRequest("resp_1")).parse(body)
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    work = Work(cast("Any", Broken(steps, wait_s)), cast("Any", Plain()), "m", True, spec.in_clients_words)
    scope = {"type": "http", "path": RESPONSES_PATH, "headers": [], "method": "POST"}
    await _stream(work, scope, cast("Any", None), send, 0.05)
    assert sent[0]["status"] == status
    answered = b"".join(message.get("body", b"") for message in sent)
    assert b"max_output_tokens is too large" in answered
    assert b"max_completion_tokens" not in answered
