"""An engine without a model, for tests of the gateway: HTTP, KV events, replay and snapshot, and faults on request."""

import asyncio
import contextlib
import json
import ssl
from typing import Any, Self

import zmq
import zmq.asyncio
from aiohttp import web
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mini_infer_apis.dialects import responses
from mini_infer_apis.dialects.anthropic import COUNT_TOKENS_PATH, MESSAGES_PATH, chat_body
from mini_infer_apis.dialects.kv_hints import KV_HINTS_PATH
from mini_infer_apis.dialects.responses import RESPONSES_PATH
from mini_infer_contract.blocks import block_keys, root_key
from mini_infer_contract.events import (
    EVENTS_TOPIC,
    LOAD_TOPIC,
    REPLAY_END,
    KVEvent,
    KVEventBatch,
    LoadReport,
    Snapshot,
    block_removed,
    block_stored,
    encode,
    read_sequence,
    sequence_frame,
)
from mini_infer_contract.launch import DRAINING_HEADER, Endpoint
from mini_infer_gateway.paths import FORM_PATHS, OTHER_SERVERS_PATHS, SCORING_PATHS
from mini_infer_prompts.prompt import PromptAssets, PromptEncoder, chat_prompt_ids
from tests.support.fake_cache import FakeCache
from tests.support.prompt_ids import completion_prompt_ids

ROOT = root_key("a revision of the engine's own", "", "")
BLOCK = 16


def byte_assets() -> PromptAssets:
    """A tokenizer of bytes with a small chat template."""
    vocabulary = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    files = {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": "{}", "chat_template.jinja": template}
    return PromptAssets.from_files(files)


def _response(request: web.Request, body: dict[str, Any]) -> dict[str, Any]:
    """What a small answer of an engine of ours has, with the id that the gateway has chosen."""
    part = {"type": "output_text", "text": f"seen {len(body['input'])}", "annotations": []}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    kept = json.loads(request.headers["x-mini-infer-response"])
    return {"object": "response", "status": "completed", "model": body["model"], "output": [message]} | kept


class FakeEngine:
    """Serves `model` with a cache of `capacity` blocks; set the public fields to make it misbehave."""

    def __init__(
        self, name: str, model: str = "m", capacity: int = 10_000, events: bool = True, assets: bool = True
    ) -> None:
        self.name, self.model = name, model
        self.cache = FakeCache(capacity)
        self.tokens: dict[bytes, list[int]] = {}
        self.publishes, self.serves_assets, self.serves_snapshot = events, assets, True
        self.prefetches: list[dict[str, Any]] = []
        """The bodies of POST /kv_prefetch."""
        self.prefetch_status = 204
        self.tokenizes, self.tokenized = True, 0
        """Whether it answers /tokenize, and how often it was asked."""
        self.no_assets = b""
        """What it says where it serves no assets."""
        self.chunks = [b'data: {"n":%d}\n\n' % n for n in range(3)] + [b"data: [DONE]\n\n"]
        self.chunk_delay_s = self.answer_delay_s = 0.0
        self.status = 200
        self.draining = False
        self.is_ready: bool | None = True
        """Its answer to /readyz; None: it has no such page."""
        self.error_body: dict[str, Any] | None = None
        self.answer_headers: dict[str, str] = {}
        self.hang = False
        self.tls: ssl.SSLContext | None = None
        self.max_model_len: int | None = None
        self.parsers: dict[str, str | None] = {}
        self.role, self.transfer, self.revision = "unified", "", ""
        self.die_after: int | None = None
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.cancelled = 0
        self.probes = 0
        """Requests for /readyz."""
        self.snapshots = 0
        self.snapshot_padding_bytes = 0
        self.replays = 0
        self.hit_tokens = 0
        self.sequence = 0
        self.topic = EVENTS_TOPIC
        self.sent: list[tuple[int, bytes]] = []
        self.assets = byte_assets()
        self.encoder = PromptEncoder(self.assets)
        self._arrived: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, port: int = 0, events_port: int = 0) -> None:
        """Listens on loopback."""
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/chat/completions", self._generate)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post(MESSAGES_PATH, self._generate)
        app.router.add_post(COUNT_TOKENS_PATH, self._generate)
        app.router.add_post(RESPONSES_PATH, self._generate)
        app.router.add_post(KV_HINTS_PATH, self._generate)
        app.router.add_post("/tokenize", self._tokenize)
        for path in (*SCORING_PATHS, *OTHER_SERVERS_PATHS):
            app.router.add_post(path, self._work)
        for path in FORM_PATHS:
            app.router.add_post(path, self._work_on_file)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/tokenizer_info", self._tokenizer_info)
        app.router.add_get("/openapi.json", self._tokenizer_info)
        app.router.add_get("/prompt_assets", self._assets)
        app.router.add_get("/kv_snapshot", self._snapshot)
        app.router.add_post("/kv_prefetch", self._prefetch)
        if self.is_ready is not None:
            app.router.add_get("/readyz", self._ready)
        self.runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", port, ssl_context=self.tls).start()
        self.port = self.runner.addresses[0][1]
        self.speak(events_port)
        self._router = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self.replay_port = self._bind(self._router, 0)
        self._tasks.append(asyncio.create_task(self._replay()))

    async def stop(self) -> None:
        """Closes everything."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        self._publisher.close(0)
        self._router.close(0)
        await self.runner.cleanup()

    def silence(self) -> None:
        """Closes the event socket; HTTP goes on."""
        self._publisher.close(0)

    def speak(self, events_port: int = 0) -> None:
        """Opens the event socket, for the first time or again."""
        self._publisher, self._subscribed = zmq.asyncio.Context.instance().socket(zmq.XPUB), asyncio.Event()
        self.events_port = self._bind(self._publisher, events_port)
        self._tasks.append(asyncio.create_task(self._note_subscriptions(self._publisher, self._subscribed)))

    async def _note_subscriptions(self, publisher: zmq.asyncio.Socket, subscribed: asyncio.Event) -> None:
        with contextlib.suppress(zmq.ZMQError):  # it was closed
            while True:
                if (await publisher.recv()).startswith(b"\x01"):
                    subscribed.set()

    async def _has_subscriber(self) -> None:
        """Waits for one, as snapshots and replays do: what is published before a subscription has arrived, nobody gets,
        and on a busy machine it may arrive late.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(20.0):
                await self._subscribed.wait()

    @property
    def connections(self) -> list[web.RequestHandler]:
        """Of HTTP clients."""
        assert self.runner.server is not None
        return self.runner.server.connections

    @property
    def endpoint(self) -> Endpoint:
        """As a source would list it."""
        return Endpoint(
            name=self.name,
            url=f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}",
            model=self.model,
            events=f"tcp://127.0.0.1:{self.events_port}" if self.publishes else "",
            replay=f"tcp://127.0.0.1:{self.replay_port}" if self.publishes else "",
            role=self.role,
            transfer=self.transfer,
            revision=self.revision,
        )

    async def publish(self, events: list[KVEvent], lost: bool = False) -> None:
        """Sends a batch; `lost`: only replay knows of it."""
        payload = encode(KVEventBatch(0.0, events))
        self.sent.append((self.sequence, payload))
        if not lost:
            await self._publisher.send_multipart([self.topic, sequence_frame(self.sequence), payload])
        self.sequence += 1

    async def report(self, running: int = 0, waiting: int = 0, queued_tokens: int = 0, **load: Any) -> None:
        """Sends a load report; `load`: its other fields."""
        accepted, self._arrived = self._arrived, []
        report = LoadReport(0.0, running, waiting, queued_tokens, 0.0, accepted, **load)
        await self._publisher.send_multipart([LOAD_TOPIC, sequence_frame(0), encode(report)])

    async def prefill(self, ids: list[int], lost: bool = False) -> int:
        """Puts a prompt in the cache and tells of it; returns the tokens hit."""
        keys = block_keys(ids, ROOT)
        hit, stored, evicted = self.cache.serve(keys)
        for position, key in enumerate(keys):
            self.tokens[key] = ids[position * BLOCK : (position + 1) * BLOCK]
        events: list[KVEvent] = []
        if stored:
            parent = keys[hit - 1] if hit else None
            events.append(block_stored(stored, parent, ids[hit * BLOCK : len(keys) * BLOCK]))
        if evicted:
            events.append(block_removed(evicted))
        if events:
            await self.publish(events, lost)
        return hit * BLOCK

    def _bind(self, socket: zmq.asyncio.Socket, port: int) -> int:
        if port:
            socket.bind(f"tcp://127.0.0.1:{port}")
            return port
        return socket.bind_to_random_port("tcp://127.0.0.1")

    async def _tokenizer_info(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"asked": request.path_qs})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        self.bodies.append(raw)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self._arrived.append(request.headers.get("x-request-id", ""))
        await asyncio.sleep(self.answer_delay_s)
        if self.draining:
            return web.json_response({"error": {}}, status=503, headers={DRAINING_HEADER: "true"})
        if self.status != 200:
            error = self.error_body or {"error": {"message": f"status {self.status}"}}
            return web.json_response(error, status=self.status, headers=self.answer_headers)
        try:
            return await self._answer(request, raw)
        except (asyncio.CancelledError, ConnectionResetError):
            self.cancelled += 1
            raise

    async def _answer(self, request: web.Request, raw: bytes) -> web.StreamResponse:
        body: dict[str, Any] = json.loads(raw)
        if self.hang:
            await asyncio.sleep(60)
        if request.path == KV_HINTS_PATH:
            return web.json_response({"object": "kv_hints"})
        if request.path in (MESSAGES_PATH, COUNT_TOKENS_PATH):
            prompts = [chat_prompt_ids(self.encoder, chat_body(body, request.path))]
        elif request.path == "/v1/chat/completions":
            prompts = [chat_prompt_ids(self.encoder, body)]
        elif request.path == RESPONSES_PATH:
            prompts = [chat_prompt_ids(self.encoder, responses.chat_body(body))]
            if not body.get("stream"):
                await self.prefill(prompts[0])
                return web.json_response(_response(request, body))
        else:
            prompts = completion_prompt_ids(self.encoder, body)
        for ids in prompts:
            self.hit_tokens += await self.prefill(ids)
        if not body.get("stream"):
            answer = {"model": body["model"], "served_by": self.name}
            return web.json_response(answer, headers=self.answer_headers)
        response = web.StreamResponse(headers={"content-type": "text/event-stream", **self.answer_headers})
        await response.prepare(request)
        for number, chunk in enumerate(self.chunks):
            if number == self.die_after:
                assert request.transport is not None
                request.transport.abort()
                break
            await response.write(chunk)
            await asyncio.sleep(self.chunk_delay_s)
        return response

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.tokenized += 1
        if not self.tokenizes:
            raise web.HTTPNotFound
        if "messages" in body:
            ids = chat_prompt_ids(self.encoder, body)
        else:
            ids = self.encoder.encode(body["prompt"], body.get("add_special_tokens", False))
        return web.json_response({"count": len(ids), "max_model_len": 4096, "tokens": ids})

    async def _work(self, request: web.Request) -> web.Response:
        """As a server that does something else than to generate text."""
        await asyncio.sleep(self.chunk_delay_s)
        return web.json_response({"by": self.name, "path": request.path, "asked": await request.json()})

    async def _ready(self, request: web.Request) -> web.Response:
        self.probes += 1
        if self.hang:
            await asyncio.sleep(60)
        return web.json_response({}, status=200 if self.is_ready else 503)

    async def _work_on_file(self, request: web.Request) -> web.Response:
        form = await request.post()
        file = form["file"]
        assert isinstance(file, web.FileField)
        fields = {name: value for name, value in form.items() if isinstance(value, str)}
        return web.json_response(fields | {"bytes": len(file.file.read())})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.model, "max_model_len": self.max_model_len, **self.parsers}]})

    async def _assets(self, request: web.Request) -> web.Response:
        if not self.serves_assets:
            return web.Response(status=404, body=self.no_assets, content_type="application/json")
        assets = self.assets
        return web.json_response({"revision": assets.revision, "files": assets.files})

    async def _prefetch(self, request: web.Request) -> web.Response:
        assert request.headers["x-mini-infer-peer"]
        self.prefetches.append(await request.json())
        return web.Response(status=self.prefetch_status)

    async def _snapshot(self, request: web.Request) -> web.Response:
        if not self.serves_snapshot:
            raise web.HTTPNotFound
        self.snapshots += 1
        await self._has_subscriber()
        # A parent is younger than its children here.
        chains = [block_stored([key], parent, self.tokens[key]) for key, parent in reversed(self.cache.parents.items())]
        return web.Response(body=encode(Snapshot(self.sequence - 1, chains)) + bytes(self.snapshot_padding_bytes))

    async def _replay(self) -> None:
        while True:
            client, _, frame = await self._router.recv_multipart()
            self.replays += 1
            first = read_sequence(frame)
            await self._has_subscriber()
            for sequence, payload in self.sent:
                if sequence >= first:
                    await self._router.send_multipart([client, b"", sequence_frame(sequence), payload])
            await self._router.send_multipart([client, b"", REPLAY_END, b""])
