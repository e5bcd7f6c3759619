"""Long prompts through the gateway: refused where no engine can take them, dropped where nobody waits for them."""

import asyncio
import json

import pytest

from mini_infer_prompts.segments import SegmentEncoder
from tests.support.fake_engine import FakeEngine
from tests.support.running_gateway import RunningGateway, running_gateway, until


def encoded_characters(gateway: RunningGateway) -> int:
    (tokenizer,) = gateway.app.tokenizers._tokenizers.values()
    segments: SegmentEncoder = tokenizer.encoder.segments
    return segments.encoded_characters


@pytest.mark.parametrize("words", [3_000, 200_000])
async def test_a_prompt_reaches_no_engine_when_it_exceeds_the_context(words: int) -> None:
    async with FakeEngine("a") as engine:
        engine.max_model_len = 2_000
        async with running_gateway(engine.endpoint) as gateway:
            await gateway.settled()
            async with gateway.chat("word " * words) as response:
                error = (await response.json())["error"]
                assert (response.status, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
            assert engine.bodies == []
            async with gateway.chat("word " * 100) as response:
                assert response.status == 200


async def test_tokenising_stops_when_the_client_has_gone() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()
        texts = [f"{number} and so on, " * 100_000 for number in range(4)]
        writers = [await post_and_leave(gateway, text) for text in texts]
        await until(lambda: encoded_characters(gateway) > 0)
        for writer in writers:
            writer.transport.abort()
        async with gateway.chat("x " * 10_000) as response:  # waits for its turn among the others
            assert response.status == 200
        await until(lambda: gateway.app.tokenizers.queued == 0)
        assert encoded_characters(gateway) < sum(map(len, texts)) // 2
        assert len(engine.bodies) == 1


async def post_and_leave(gateway: RunningGateway, text: str) -> asyncio.StreamWriter:
    host, port = gateway.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        % len(body)
        + body
    )
    await writer.drain()
    return writer


async def test_a_small_request_is_answered_when_long_prompts_are_tokenised() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()
        long = [asyncio.ensure_future(status_of(gateway, f"{number} and so on, " * 120_000)) for number in range(2)]
        await until(lambda: gateway.app.tokenizers.queued > 0)
        assert await status_of(gateway, "hi") == 200
        assert await status_of(gateway, "y " * 10_000) == 200
        assert len(engine.bodies) == 2, "the long ones are still being tokenised"
        assert await asyncio.gather(*long) == [200, 200]


async def status_of(gateway: RunningGateway, text: str) -> int:
    async with gateway.chat(text) as response:
        return response.status


@pytest.mark.parametrize("value", [b"{}", b'"ab"', b"999"])
async def test_a_body_is_refused_when_it_has_millions_of_values(value: bytes) -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()
        body = b'{"model": "m", "messages": [' + (value + b",") * 2_000_000 + b"{}]}"
        async with gateway.client.post(gateway.url + "/v1/chat/completions", data=body) as response:
            assert response.status == 400
            assert (await response.json())["error"]["code"] == "too_many_values"
        assert engine.bodies == []
        async with gateway.chat("[[1,2],[3,4]]," * 20_000) as response:
            assert response.status == 200


async def test_a_request_gets_400_when_the_tokenizer_cannot_split_its_text() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()
        async with gateway.chat("a" * 1_000_000) as response:
            assert response.status == 400
            assert "put spaces" in (await response.json())["error"]["message"]
        assert engine.bodies == []
