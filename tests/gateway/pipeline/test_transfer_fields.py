"""No client sends an engine to another host for keys and values, by whatever field or header."""

import asyncio
import json
from typing import Any

import pytest

from mini_infer_contract.launch import CLIENT_HEADER
from mini_infer_gateway.pipeline.transfer_fields import TRANSFER_FIELDS, refuse_transfer_fields
from mini_infer_web.api_errors import ApiError
from tests.support.fake_engine import FakeEngine
from tests.support.running_gateway import running_gateway

REMOTE = {"do_remote_prefill": True, "remote_host": "10.0.0.7", "remote_port": 5559}


@pytest.mark.parametrize("name", sorted(TRANSFER_FIELDS))
@pytest.mark.parametrize("within", [(), ("vllm_xargs",), ("sampling_params", "extra_args"), ("sampling_params",)])
def test_a_transfer_field_is_refused_by_name_when_a_client_sends_it(name: str, within: tuple[str, ...]) -> None:
    body: dict[str, Any] = {name: REMOTE}
    for outer in reversed(within):
        body = {outer: body}
    with pytest.raises(ApiError) as caught:
        refuse_transfer_fields(body)
    assert (caught.value.status, caught.value.param) == (400, ".".join((*within, name)))


@pytest.mark.parametrize(
    "body", [{}, {"kv_transfer_params": None}, {"vllm_xargs": "text"}, {"sampling_params": {"extra_args": [1]}}]
)
def test_bodies_pass_when_they_name_no_other_engine(body: dict[str, Any]) -> None:
    refuse_transfer_fields(body)


PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8},
    "/v1/responses": {"input": "hi"},
    "/v1/embeddings": {"input": "hi"},
    "/invocations": {"prompt": "hi"},
    "/v1/rerank": {"query": "hi"},
}


@pytest.mark.parametrize("path", PATHS)
async def test_no_engine_gets_a_transfer_field_when_a_client_sends_it_on_any_path(path: str) -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        body = {"model": "m", **PATHS[path], "kv_transfer_params": REMOTE}
        for text in (json.dumps(body), json.dumps(body).replace("kv_transfer", "kv\\u005ftransfer")):
            async with gateway.client.post(gateway.url + path, data=text) as response:
                assert response.status == 400
                assert "kv_transfer_params" in await response.text()
        assert not engine.bodies


@pytest.mark.parametrize(
    "lines",
    [
        b"X-Mini-Infer-Prefill-From: tcp://10.0.0.7:1",
        b"X_MINI_INFER_PREFILL_FROM: tcp://10.0.0.7:1",
        b"x-a: 1\r\n x-mini-infer-prefill-from: tcp://10.0.0.7:1",
        b"x-a: 1\n x-mini-infer-prefill-from: tcp://10.0.0.7:1",
        b"connection: x-mini-infer-fetch-from, close\r\nx-mini-infer-fetch-from: tcp://10.0.0.7:1",
        b"x-mini-infer-peer: proof\r\nx-mini-infer-response: {}",
    ],
)
async def test_no_engine_gets_a_private_header_when_a_client_sends_it_in_any_spelling(lines: bytes) -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        body = b'{"model": "m", "prompt": "hi"}'
        reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
        head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: %d\r\n" % len(body)
        writer.write(head + lines + b"\r\n\r\n" + body)
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 "), "answered or refused, but not left open"
        for headers in engine.headers:
            # aiohttp, as which the engine reads, joins the lines of a folded header.
            names = {name.lower().replace("_", "-") for name in headers}
            assert not [name for name in names - {CLIENT_HEADER} if name.startswith("x-mini-infer")]
            assert not [value for value in headers.values() if "10.0.0.7" in value and "\n" in value]
