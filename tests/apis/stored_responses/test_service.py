"""What one client may have of a server that keeps responses."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from mini_infer_apis.stored_responses import service
from mini_infer_apis.stored_responses.service import Generator, ResponsesService
from mini_infer_apis.stored_responses.store import ResponseStore
from mini_infer_web.api_errors import ApiError
from mini_infer_web.asgi import Message, Receive, Scope, Send

BODY = msgspec.json.encode({"model": "m", "input": "x", "background": True})


def scope_of(key: str) -> Scope:
    headers = [(b"authorization", b"Bearer " + key.encode())]
    return {"type": "http", "path": "/v1/responses", "method": "POST", "headers": headers, "query_string": b""}


async def never() -> Message:
    await asyncio.Event().wait()
    return {}


def server(answer: Any, room: list[int] | None = None) -> ResponsesService:
    @contextlib.contextmanager
    def reserve(scope: Scope, size_bytes: int, values: int) -> Iterator[None]:
        if room is not None and size_bytes > room[0]:
            raise ApiError(503, "no room")
        yield

    async def read(scope: Scope, receive: Receive) -> bytes:
        return bytes((await receive())["body"])

    generator = Generator(
        answer=answer,
        answer_detached=answer,
        read=read,
        check=lambda body: "m",
        reserve=reserve,
        max_body_bytes=1 << 20,
        may_be_second=False,
    )
    return ResponsesService(ResponseStore(1 << 20, 60.0), generator)


async def post(responses: ResponsesService, key: str, body: bytes) -> dict[str, Any]:
    sent = list[Message]()

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    await responses(scope_of(key), receive, send)
    answer: dict[str, Any] = msgspec.json.decode(b"".join(message.get("body", b"") for message in sent))
    return answer


async def test_another_key_has_a_place_in_the_background_when_one_has_taken_all_that_it_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "MAX_BACKGROUND", 10)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await never()

    responses = server(answer)
    for _ in range(8):
        assert (await post(responses, "one", BODY))["status"] == "queued"
    with pytest.raises(ApiError) as caught:
        await post(responses, "one", BODY)
    assert (caught.value.status, caught.value.code) == (429, "queue_full")
    assert (await post(responses, "two", BODY))["status"] == "queued"
    await responses.close()


@pytest.mark.parametrize(("room", "is_kept"), [(10_000, True), (100, False)])
async def test_an_answer_passes_and_is_not_kept_when_there_is_no_memory_for_it(room: int, is_kept: bool) -> None:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        whole = msgspec.json.encode({"id": "resp_foreign", "status": "completed", "output": [], "more": "x" * 1000})
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": whole[:200], "more_body": True})
        await send({"type": "http.response.body", "body": whole[200:]})

    responses = server(answer, [room])
    body = msgspec.json.encode({"model": "m", "input": "x"})
    assert (await post(responses, "one", body))["id"] == "resp_foreign"
    assert ("resp_foreign" in responses.store) == is_kept
