"""A pod of another tenant that serves hostile files, answers, KV events and load reports to the gateway."""

import asyncio
import contextlib
import json
from random import Random
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from aiohttp import web

from mini_infer_contract.events import (
    EVENTS_TOPIC,
    LOAD_TOPIC,
    KVEvent,
    KVEventBatch,
    LoadReport,
    block_removed,
    block_stored,
    encode,
    sequence_frame,
)
from mini_infer_contract.launch import KV_SNAPSHOT_PATH, MODELS_PATH, PROMPT_ASSETS_PATH, READY_PATH
from tests.fuzz.fleet import HOSTILE_MODEL, Fleet
from tests.fuzz.hostile.load import Findings, post
from tests.fuzz.mutation import mutated, mutated_bytes
from tests.support.fake_engine import byte_assets

TEMPLATES = (
    "{% set x = 'a' * 3000000000 %}{{ x }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}" + "{% endfor %}" * 3,
    "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "{{ '%99999999d' % 1 }}",
    "{{ 'a' | center(2000000000) }}",
    "{{ range(100000000) | list }}",
    "{% for m in messages %}{{ (m.content * 100000) | replace('a', 'b' * 100000) }}{% endfor %}",
    "{{ ''.__class__.__mro__ }}",
    "{% set ns = namespace(x='a') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{{ lipsum(n=100000) }}",
    "{% for i in range(100000) %}" * 3 + "x" + "{% endfor %}" * 3,
    "{{ messages | tojson | length ** 99999 }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "{% if true %}" * 3000 + "{% endif %}" * 3000,
    "{{ raise_exception('no') }}",
    "{% include 'x' %}{% extends 'y' %}",
    "{{ 1 / 0 }}",
    "{{",
    "{{ messages[10**10] }}{{ undefined.x.y }}",
    "{{ strftime_now('%' * 100000) }}",
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
)
"""Chat templates: those that cost memory, time or stack, those that fail, and one that works."""


class HostileEndpoint:
    """An HTTP server and a PUB socket on loopback whose answers are of a grammar with one mutation."""

    def __init__(self, fleet: Fleet, random: Random, found: Findings) -> None:
        self._fleet, self._random, self._found = fleet, random, found
        self._context = zmq.asyncio.Context()
        self._events = self._context.socket(zmq.PUB)
        self._sequence = 0

    async def run(self) -> None:
        """Serves and publishes until cancelled."""
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get(PROMPT_ASSETS_PATH, self._assets)
        app.router.add_get(MODELS_PATH, self._models)
        app.router.add_get(KV_SNAPSHOT_PATH, self._snapshot)
        app.router.add_get(READY_PATH, self._ready)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", self._fleet.hostile_port).start()
            self._events.bind(f"tcp://127.0.0.1:{self._fleet.hostile_events_port}")
            while True:
                await self._publish()
                await self._fleet.pause(self._random, 0.05)
        finally:
            self._context.destroy(linger=0)
            await runner.cleanup()

    async def _publish(self) -> None:
        draw = self._random.random()
        self._sequence += self._random.choice((1, 1, 1, 1, 0, -3, 50, 2**40))
        topic = self._random.choice((EVENTS_TOPIC, EVENTS_TOPIC, LOAD_TOPIC, b"odd"))
        payload = encode(_batch(self._random)) if topic == EVENTS_TOPIC else encode(_load(self._random))
        if draw < 0.4:
            with contextlib.suppress(msgspec.MsgspecError, OverflowError, TypeError, UnicodeError):
                payload = msgspec.msgpack.encode(mutated(self._random, msgspec.msgpack.decode(payload)))
        elif draw < 0.5:
            payload = mutated_bytes(self._random, payload)
        frames = [topic, sequence_frame(max(0, self._sequence % 2**63)), payload]
        if draw > 0.95:
            frames = frames[: self._random.randint(0, 2)] or [b""]
        await self._events.send_multipart(frames)
        self._found.count("endpoint", "published")

    async def _assets(self, request: web.Request) -> web.Response:
        assets = msgspec.to_builtins(byte_assets())
        assets["files"]["chat_template.jinja"] = self._random.choice(TEMPLATES)
        if self._random.random() < 0.3:
            assets["revision"] = self._fleet.a_revision
        if self._random.random() < 0.3:
            assets = mutated(self._random, assets)
        return _json(assets)

    async def _models(self, request: web.Request) -> web.Response:
        listed = {"object": "list", "data": [{"id": HOSTILE_MODEL, "object": "model", "max_model_len": 4096}]}
        return _json(mutated(self._random, listed) if self._random.random() < 0.4 else listed)

    async def _snapshot(self, request: web.Request) -> web.Response:
        wire = msgspec.msgpack.encode([self._sequence, [[1, 2, 3]] * 3])
        return web.Response(body=mutated_bytes(self._random, wire))

    async def _ready(self, request: web.Request) -> web.Response:
        return web.Response(status=self._random.choice((200, 200, 200, 503, 302, 999)))

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        draw = self._random.random()
        if draw < 0.2:
            await asyncio.sleep(self._random.uniform(0, 3))
        if draw < 0.4:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            for _ in range(self._random.randint(0, 5)):
                await response.write(
                    mutated_bytes(self._random, b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n')
                )
            return response
        status = self._random.choice((200, 200, 400, 404, 418, 429, 500, 503, 599))
        return web.Response(status=status, body=self._random.randbytes(self._random.choice((0, 10, 100_000))))


async def attack(fleet: Fleet, random: Random, found: Findings) -> None:
    """Runs the endpoint, and clients that ask for its model so that the gateway has to use its files."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(HostileEndpoint(fleet, random, found).run())
        while True:
            body = {
                "model": HOSTILE_MODEL,
                "messages": [{"role": "user", "content": "a" * random.choice((1, 50, 20_000))}],
                "stream": random.random() < 0.5,
                "chat_template_kwargs": random.choice(({}, {"enable_thinking": True}, {"x": "a" * 10_000})),
            }
            await post(fleet.gateway_url + "/v1/chat/completions", body, found, "endpoint", None, 5.0, may_fail=True)
            await fleet.pause(random, 0.5)


def _batch(random: Random) -> KVEventBatch:
    """Returns stored and removed blocks in chains whose parents are known, unknown, or their own children."""
    keys = [bytes([number]) * 16 for number in range(40)]
    events: list[KVEvent] = []
    for _ in range(random.randint(1, 5)):
        chosen = random.sample(keys, random.randint(1, 4))
        if random.random() < 0.8:
            tokens = [random.randrange(4096) for _ in range(16 * len(chosen))]
            events.append(block_stored(chosen, random.choice((None, *keys)), tokens))
        else:
            events.append(block_removed(chosen))
    return KVEventBatch(ts=random.choice((0.0, 1e12, -1.0)), events=events)


def _load(random: Random) -> LoadReport:
    """Returns a load report with counts that no engine has."""
    counts = [random.choice((0, 1, 500, -5, 2**40)) for _ in range(3)]
    running, waiting, queued = counts
    return LoadReport(
        ts=random.random() * 1e10,
        running=running,
        waiting=waiting,
        queued_tokens=queued,
        kv_usage=random.uniform(-1, 3),
    )


def _json(value: Any) -> web.Response:
    return web.Response(text=json.dumps(value, default=repr), content_type="application/json")
