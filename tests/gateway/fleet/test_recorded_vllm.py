"""vLLM's servers behind the gateway, by bytes that its own code has made: events of six versions, a streamed chat."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import zmq
import zmq.asyncio
from aiohttp import web

from mini_infer_contract.events import EVENTS_TOPIC, BlockStored, decode_batch, sequence_frame
from mini_infer_contract.launch import Endpoint
from tests.contract.make_golden_events import CHAIN, GOLDEN
from tests.gateway.fleet.make_golden_stream import GOLDEN as GOLDEN_STREAM
from tests.gateway.fleet.test_endpoint_subscriber import folder_of
from tests.support.fake_engine import byte_assets
from tests.support.running_gateway import running_gateway, until

VLLM: dict[str, dict[str, Any]] = json.loads(GOLDEN.read_text())
STREAMS: dict[str, list[str]] = json.loads(GOLDEN_STREAM.read_text())


class RecordedServer:
    """Answers HTTP as vLLM does, and sends what its publisher sent."""

    def __init__(self, name: str, version: str) -> None:
        self.name, self._version = name, version
        self.bodies: list[dict[str, Any]] = []

    @property
    def endpoint(self) -> Endpoint:
        """As an endpoints file has it."""
        events = f"tcp://127.0.0.1:{self._events_port}"
        return Endpoint(name=self.name, url=f"http://127.0.0.1:{self._port}", model="m", events=events)

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._stream)
        app.router.add_post("/v1/chat/completions", self._stream)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._port = self._runner.addresses[0][1]
        self._publisher = zmq.asyncio.Context.instance().socket(zmq.XPUB)
        self._is_subscribed = False
        self._events_port = self._publisher.bind_to_random_port("tcp://127.0.0.1")

    async def stop(self) -> None:
        await self._runner.cleanup()
        self._publisher.close(0)

    async def publish(self, sequence: int, name: str) -> None:
        """A recorded batch, in the three frames in which the publisher sends it."""
        if not self._is_subscribed:  # what is sent before, nobody gets
            await self._publisher.recv()
            self._is_subscribed = True
        payload = bytes.fromhex(VLLM[self._version][name])
        await self._publisher.send_multipart([EVENTS_TOPIC, sequence_frame(sequence), payload])

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "max_model_len": 4096}]})

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for event in STREAMS["0.26.0"]:
            await response.write(event.encode())
        return response


@asynccontextmanager
async def servers(version: str) -> AsyncIterator[tuple[RecordedServer, RecordedServer]]:
    one, other = RecordedServer("a", version), RecordedServer("b", version)
    await one.start()
    await other.start()
    try:
        yield one, other
    finally:
        await one.stop()
        await other.stop()


@pytest.mark.parametrize("version", VLLM)
async def test_recorded_vllm_events_make_the_index_exact_and_recorded_streams_pass_unchanged(
    version: str, tmp_path: Any
) -> None:
    tokenizers = {"": folder_of(byte_assets(), tmp_path)}
    (chain,) = decode_batch(bytes.fromhex(VLLM[version]["chain"])).events
    assert isinstance(chain, BlockStored)
    # Older versions do not tell a block's extra keys: what is salted cannot be told from what is not.
    salt = {"cache_salt": "tenant-salt"} if chain.extra_keys else {}
    body = {"model": "m", "prompt": [*CHAIN["token_ids"], 7], "stream": True, **salt}
    async with (
        servers(version) as (one, other),
        running_gateway(one.endpoint, other.endpoint, tokenizers=tokenizers) as gateway,
    ):
        await gateway.settled()

        async def requested() -> tuple[str, int, bytes]:
            async with gateway.client.post(gateway.url + "/v1/completions", json=body) as response:
                assert response.headers["x-mini-infer-index"] == "exact"
                hit = int(response.headers["x-mini-infer-hit-tokens"])
                return response.headers["x-mini-infer-pod"], hit, await response.read()

        await one.publish(0, "chain")
        await until(lambda: gateway.app.index.cached_blocks("a") == 2)
        for _ in range(3):
            pod, hit, reported = await requested()
            assert (pod, hit) == ("a", 32), "both blocks of the recorded chain"
            assert reported == "".join(STREAMS["0.26.0"]).encode()
        assert one.bodies == [body] * 3, "no engine but ours is asked for more"
        await one.publish(1, "cleared")
        await until(lambda: gateway.app.index.cached_blocks("a") == 0)
