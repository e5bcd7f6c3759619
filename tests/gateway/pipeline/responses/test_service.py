"""/v1/responses through the gateway: what it keeps survives engines, and every engine gets whole conversations."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import httpx2
import openai
import pytest
from aiohttp import web
from openai.types.responses import Response

from mini_infer_contract.launch import Endpoint
from mini_infer_web.api_keys import ApiKeys
from tests.engine.server.dry_server import DryServer
from tests.support.fake_engine import FakeEngine
from tests.support.running_gateway import RunningGateway, running_gateway, until


@asynccontextmanager
async def client_of(gateway: RunningGateway, key: str = "one") -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0) as client:
        yield client


async def create(client: openai.AsyncOpenAI, text: str = "hello", model: str = "m", **fields: Any) -> Response:
    made: Response = await client.responses.create(model=model, input=text, **fields)
    return made


async def test_a_conversation_continues_at_another_engine_when_its_first_is_gone() -> None:
    async with FakeEngine("a") as first, FakeEngine("b") as second, running_gateway(first.endpoint) as gateway:
        async with client_of(gateway) as client:
            one = await create(client, "my name is Mark")
            gateway.source.publish_endpoints(second.endpoint)
            two = await create(client, "who am I?", previous_response_id=one.id)
            assert (await client.responses.retrieve(one.id)).output_text == "seen 1"
        passed = json.loads(second.bodies[0])
        assert [item["role"] for item in passed["input"]] == ["user", "assistant", "user"]
        assert "previous_response_id" not in passed
        assert two.previous_response_id == one.id
        assert two.output_text == "seen 3"


async def test_a_response_is_routed_to_the_engine_when_it_has_the_conversation_cached() -> None:
    long = "a long beginning of a conversation " * 20
    async with (
        FakeEngine("a") as first,
        FakeEngine("b") as second,
        running_gateway(first.endpoint, second.endpoint) as gateway,
        client_of(gateway) as client,
    ):
        await gateway.settled()
        one = await create(client, long)
        had, other = (first, second) if first.bodies else (second, first)
        for _ in range(3):
            one = await create(client, "more", previous_response_id=one.id)
        assert len(had.bodies) == 4
        assert not other.bodies


async def test_a_clients_private_response_header_is_not_forwarded() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        headers = {"x-mini-infer-response": '{"id": "resp_mine"}'}
        body = {"model": "m", "input": "hi"}
        async with gateway.client.post(gateway.url + "/v1/responses", json=body, headers=headers) as response:
            made = await response.json()
        assert made["id"].startswith("resp_")
        assert made["id"] != "resp_mine"


async def test_stored_responses_belong_to_their_key_and_are_bounded() -> None:
    async with (
        FakeEngine("a") as engine,
        running_gateway(engine.endpoint, responses_memory_bytes=3000) as gateway,
        client_of(gateway) as client,
        client_of(gateway, "two") as other,
    ):
        one = await create(client)
        with pytest.raises(openai.NotFoundError):
            await other.responses.retrieve(one.id)
        with pytest.raises(openai.BadRequestError) as caught:
            await create(other, previous_response_id=one.id)
        assert caught.value.code == "previous_response_not_found"
        for _ in range(3):
            await create(client)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(one.id)
        assert 0 < gateway.app.responses.store.used_bytes <= 3000
        reported = gateway.app.metrics.text().decode()
        assert f"mini_infer_gateway_responses_kept {float(len(gateway.app.responses.store))}" in reported


@pytest.mark.parametrize("stream", [False, True])
async def test_another_response_stays_as_it_is_when_an_engine_answers_with_its_id(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    async with (
        FakeEngine("a") as engine,
        running_gateway(engine.endpoint) as gateway,
        client_of(gateway) as client,
        client_of(gateway, "two") as other,
    ):
        one = await create(client, "mine")
        answer = {"id": one.id, "object": "response", "status": "completed", "model": "m", "output": []}
        event = {"type": "response.completed", "response": answer, "sequence_number": 0}

        async def liar(request: web.Request, raw: bytes) -> web.StreamResponse:
            if not stream:
                return web.json_response(answer)
            data = f"event: response.completed\ndata: {json.dumps(event)}\n\n"
            return web.Response(text=data, content_type="text/event-stream")

        monkeypatch.setattr(engine, "_answer", liar)
        for asking, fields in ((other, {}), (client, {"previous_response_id": one.id})):
            answered = await asking.responses.create(model="m", input="x", stream=stream, **fields)  # type: ignore[call-overload]
            if stream:
                assert [event.type async for event in answered] == ["response.completed"]
        assert (await client.responses.retrieve(one.id)).output_text == "seen 1"
        assert len((await client.responses.input_items.list(one.id)).data) == 1


async def test_the_memory_budget_is_released_when_requests_fail() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint, max_body_bytes=10_000) as gateway:
        async with client_of(gateway) as client:
            await create(client)
            with pytest.raises(openai.APIStatusError, match="limit of 10000 bytes"):
                await create(client, "x" * 20_000)
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                await create(client, model="unknown")
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                await create(client, model="unknown", background=True)
            with pytest.raises(openai.BadRequestError, match="input_image"):
                await create(client, [{"role": "user", "content": [{"type": "input_image"}]}], background=True)  # type: ignore[arg-type]
        await until(lambda: gateway.app.bodies.used_bytes == 0)


async def failure_of(client: openai.AsyncOpenAI) -> tuple[str | None, str]:
    """The code and the text of the error with which a response in the background ends."""
    begun = await create(client, background=True)
    assert begun.status == "queued"
    async with asyncio.timeout(60.0):
        while (now := await client.responses.retrieve(begun.id)).status in ("queued", "in_progress"):  # noqa: ASYNC110 -- as clients do
            await asyncio.sleep(0.01)
    assert now.status == "failed"
    assert now.error is not None
    return now.error.code, now.error.message


async def test_a_background_response_is_failed_when_its_engine_refuses_or_dies() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway, client_of(gateway) as client:
        engine.status = 400
        engine.error_body = {"error": {"message": "not so", "code": "odd", "param": "input"}}
        assert await failure_of(client) == ("invalid_prompt", "not so")
        engine.status = 429
        assert await failure_of(client) == ("rate_limit_exceeded", "not so")
        engine.status, engine.chunks = 200, [b'event: response.created\ndata: {"type":"response.created"}\n\n']
        assert await failure_of(client) == ("server_error", "the answer broke off")


async def test_a_responses_stream_ends_with_response_failed_when_its_engine_dies() -> None:
    response = {"id": "resp_1", "object": "response", "status": "in_progress", "output": []}
    begun = {"type": "response.created", "response": response, "sequence_number": 0}
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway, client_of(gateway) as client:
        engine.chunks = [b"event: response.created\ndata: %b\n\n" % json.dumps(begun).encode()] * 2
        engine.die_after = 1
        stream = await client.responses.create(model="m", input="hello", stream=True)
        events = [event async for event in stream]
        assert [event.type for event in events] == ["response.created", "error", "response.failed"]
        assert [event.sequence_number for event in events] == [0, 1, 2]
        async with client.responses.connect() as line:
            await line.response.create(model="m", input="hello")
            reported = [await line.recv() for _ in range(3)]
            assert [event.type for event in reported] == ["response.created", "error", "response.failed"]
            assert reported[1].error.message  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def dry() -> Iterator[DryServer]:
    with DryServer("--dry-run-step-ms", "1") as server:
        yield server


@asynccontextmanager
async def before(dry: DryServer) -> AsyncIterator[openai.AsyncOpenAI]:
    endpoint = Endpoint(name="dry", url=dry.url, model="dry")
    async with running_gateway(endpoint) as gateway, client_of(gateway) as client:
        await until(lambda: gateway.app.fleet.is_ready)
        yield client


async def test_a_streamed_response_is_stored_when_its_stream_ends(dry: DryServer) -> None:
    async with before(dry) as client:
        stream = await client.responses.create(model="dry", input="hello", stream=True)
        events = [event async for event in stream]
        last = events[-1]
        assert last.type == "response.completed"
        assert await client.responses.retrieve(last.response.id) == last.response
        more = await create(client, "again", model="dry", previous_response_id=last.response.id)
        assert more.output_text == "You said: again"
        items = await client.responses.input_items.list(more.id, order="asc")
        assert [item.type async for item in items] == ["message"] * 3
        assert httpx2.get(f"{dry.url}/v1/responses/{last.response.id}").status_code == 404, "the engine keeps nothing"


async def test_background_responses_can_be_resumed_and_cancelled_through_the_gateway(dry: DryServer) -> None:
    async with before(dry) as client:
        stream = await client.responses.create(model="dry", input="x" * 500, background=True, stream=True)
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        begun = await client.responses.create(model="dry", input="x" * 3000, background=True)
        assert (await client.responses.cancel(begun.id)).status == "cancelled"
        assert (await client.responses.delete(begun.id)) is None
        counted = await client.responses.input_tokens.count(model="dry", input="hello")
        assert counted.input_tokens > 5


async def test_the_requested_model_name_stands_in_every_event_when_it_is_an_alias(dry: DryServer) -> None:
    endpoint = Endpoint(name="dry", url=dry.url, model="dry", service="team/dry")
    async with running_gateway(endpoint) as gateway, client_of(gateway) as client:
        await until(lambda: gateway.app.fleet.is_ready)
        whole = await create(client, model="team/dry")
        stream = await client.responses.create(model="team/dry", input="hello", stream=True)
        reported = [event.response.model async for event in stream if hasattr(event, "response")]
        begun = await create(client, model="team/dry", background=True)
        kept = await client.responses.retrieve(whole.id)
        assert {whole.model, begun.model, kept.model, *reported} == {"dry"}


async def test_responses_continue_a_conversation_over_a_websocket(dry: DryServer) -> None:
    endpoint = Endpoint(name="dry", url=dry.url, model="dry")
    async with running_gateway(endpoint) as gateway, client_of(gateway) as client, client.responses.connect() as line:
        previous, texts = None, []
        for text in ("hello", "again"):
            await line.response.create(model="dry", input=text, store=False, previous_response_id=previous)
            async for event in line:
                if event.type == "response.completed":
                    previous = event.response.id
                    texts.append(event.response.output_text)
                    break
        assert texts == ["You said: hello", "You said: again"]
        await line.response.create(model="unknown", input="x")
        event = await line.recv()
        assert event.type == "error"
        assert event.error.code == "model_not_found"
        assert gateway.app.bodies.used_bytes == 0
    assert len(gateway.app.responses.store) == 0


async def test_a_message_is_refused_when_it_has_more_values_than_a_body_may() -> None:
    async with running_gateway() as gateway, client_of(gateway) as client, client.responses.connect() as line:
        await line._connection.send('{"type": "response.create", "model": "m", "input": [' + "[]," * 30_000 + "[]]}")
        event = await line.recv()
        assert event.type == "error"
        assert event.error.code == "too_many_values"
        assert gateway.app.bodies.used_bytes == 0


async def test_requests_over_a_websocket_are_refused_when_the_key_was_taken_out_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mini_infer_web.api_keys.LOOK_EVERY_S", 0.0)
    file = tmp_path / "keys"
    file.write_text("one name=a\ntwo name=b\n")
    async with (
        running_gateway(keys=ApiKeys(file=file)) as gateway,
        client_of(gateway) as client,
        client.responses.connect() as line,
    ):
        codes = []
        for _ in range(2):
            await line.response.create(model="m", input="x")
            event = await line.recv()
            assert event.type == "error"
            codes.append(event.error.code)
            file.write_text("two name=b\n")
        assert codes == ["model_not_found", "invalid_api_key"]


async def test_a_websocket_is_refused_when_its_key_or_path_is_wrong() -> None:
    async with running_gateway(keys=ApiKeys(["secret"])) as gateway:
        for path, key, status in (
            ("/v1/responses", "wrong", 401),
            ("/v1/chat/completions", "secret", 404),
        ):
            with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
                await gateway.client.ws_connect(gateway.url + path, headers={"authorization": f"Bearer {key}"})
            assert caught.value.status == status


async def test_a_shutdown_ends_websockets_when_they_have_been_answered(dry: DryServer) -> None:
    endpoint = Endpoint(name="dry", url=dry.url, model="dry")
    async with running_gateway(endpoint, drain_s=0.1) as gateway:
        await until(lambda: gateway.app.fleet.is_ready)
        address = gateway.url + "/v1/responses"
        async with gateway.client.ws_connect(address) as idle, gateway.client.ws_connect(address) as busy:
            await busy.send_json({"type": "response.create", "model": "dry", "input": "x" * 150})
            assert (await busy.receive_json())["type"] == "response.created"
            gateway.server.begin_drain()
            assert (await idle.receive()).type is aiohttp.WSMsgType.CLOSE
            assert idle.close_code == 1012
            events = [message.json() async for message in busy]
            assert events[-1]["type"] == "response.completed"
            assert busy.close_code == 1012


async def test_unknown_fields_of_background_responses_follow_the_flag() -> None:
    body = {"model": "m", "input": "hi", "background": True, "text": {"color": "red"}}
    async with FakeEngine("a") as engine:
        for mode, status in (("refuse", 400), ("warn", 200)):
            async with running_gateway(engine.endpoint, unknown_fields=mode) as gateway:
                await until(lambda gateway=gateway: gateway.app.fleet.is_ready)  # type: ignore[misc]  # bound now
                async with gateway.client.post(gateway.url + "/v1/responses", json=body) as answer:
                    reported = await answer.json()
                assert answer.status == status, reported
                if status == 400:
                    assert reported["error"]["param"] == "text.color"


async def test_ignored_fields_are_named_in_a_header_when_unknown_fields_is_warn() -> None:
    with DryServer("--unknown-fields", "warn") as dry:
        async with running_gateway(Endpoint(name="dry", url=dry.url, model="dry")) as gateway:
            await until(lambda: gateway.app.fleet.is_ready)
            async with gateway.chat("hi", model="dry", provider={"order": []}) as answer:
                assert (answer.status, answer.headers["x-ignored-fields"]) == (200, "provider")
            body = {"model": "dry", "input": "hi", "reasoning": {"color": "red"}}
            async with gateway.client.post(gateway.url + "/v1/responses", json=body) as answer:
                assert (answer.status, answer.headers["x-ignored-fields"]) == (200, "reasoning.color")
            async with gateway.client.post(gateway.url + "/v1/responses/compact", json=body) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (404, "unsupported_path")
