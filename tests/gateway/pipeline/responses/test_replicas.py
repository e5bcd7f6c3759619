"""Responses at two replicas of the gateway, as the chart's default has them: real processes, any of which is asked."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import openai
import pytest

from mini_infer_gateway.pipeline.responses.replicas import Replicas, ids_in, replica_tag, replica_url
from mini_infer_operator.local.ports import free_ports
from mini_infer_web.tls import TlsFiles
from tests.support.fake_engine import FakeEngine
from tests.support.running_gateway import until


@asynccontextmanager
async def replicas(folder: Path, engine: FakeEngine, *flags: str) -> AsyncIterator[list[tuple[int, Any]]]:
    """Two processes of the gateway: the port and the process of each."""
    endpoints = folder / "endpoints.json"
    endpoints.write_text(json.dumps({"endpoints": [{"name": "a", "url": engine.endpoint.url, "model": "m"}]}))
    ports = free_ports(2)
    names = ",".join(f"127.0.0.1:{port}" for port in ports)
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "mini_infer_gateway", f"--endpoints={endpoints}", f"--port={port}"),
            *(f"--replicas={names}", "--no-access-log", *flags),
        )
        for port in ports
    ]
    try:
        async with aiohttp.ClientSession() as session:
            for port in ports:
                await ready(session, port)
        yield list(zip(ports, processes, strict=True))
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def ready(session: aiohttp.ClientSession, port: int) -> None:
    async with asyncio.timeout(60.0):
        while True:
            try:
                async with session.get(f"http://127.0.0.1:{port}/readyz") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientConnectionError:
                pass
            await asyncio.sleep(0.05)


def client_of(port: int, key: str = "one") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0)


async def test_no_conversation_is_lost_when_its_turns_reach_different_replicas(tmp_path: Path) -> None:
    """30 conversations of 4 turns, in turns by id, by items and in streams; each turn to either replica."""
    random = Random(7)
    async with FakeEngine("a") as engine, replicas(tmp_path, engine) as both:
        clients = [client_of(port) for port, _ in both]

        async def conversation(number: int) -> None:
            previous = None
            for turn in range(4):
                client = random.choice(clients)
                made = await client.responses.create(
                    model="m", input=f"{number}, {turn}", **({"previous_response_id": previous} if previous else {})
                )
                assert made.output_text == f"seen {2 * turn + 1}", "the whole conversation"
                assert made.previous_response_id == previous
                previous = made.id
                for other in clients:
                    assert (await other.responses.retrieve(previous)).id == previous
                    assert len((await other.responses.input_items.list(previous)).data) == 2 * turn + 1

        await asyncio.gather(*(conversation(number) for number in range(30)))
        for client in clients:
            await client.close()


async def test_a_response_is_deleted_for_all_when_any_replica_is_asked_to(tmp_path: Path) -> None:
    async with (
        FakeEngine("a") as engine,
        replicas(tmp_path, engine) as ((first, _), (second, _)),
        client_of(first) as one,
        client_of(second) as two,
    ):
        made = await one.responses.create(model="m", input="hi")
        await two.responses.delete(made.id)
        for client in (one, two):
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(made.id)
        background = await one.responses.create(model="m", input="hi", background=True)
        async with asyncio.timeout(60.0):
            while (await two.responses.retrieve(background.id)).status in ("queued", "in_progress"):  # noqa: ASYNC110 -- as clients do
                await asyncio.sleep(0.02)


async def test_a_key_reads_only_its_own_when_another_replica_keeps_it(tmp_path: Path) -> None:
    flags = ("--api-key", "one", "two")
    async with (
        FakeEngine("a") as engine,
        replicas(tmp_path, engine, *flags) as ((first, _), (second, _)),
        client_of(first) as one,
        client_of(second, "two") as two,
        client_of(second, "none") as stranger,
    ):
        made = await one.responses.create(model="m", input="hi")
        with pytest.raises(openai.NotFoundError):
            await two.responses.retrieve(made.id)
        with pytest.raises(openai.BadRequestError) as caught:
            await two.responses.create(model="m", input="more", previous_response_id=made.id)
        assert caught.value.code == "previous_response_not_found"
        with pytest.raises(openai.AuthenticationError):
            await stranger.responses.retrieve(made.id)


async def test_a_conversation_is_not_found_when_its_replica_is_gone(tmp_path: Path) -> None:
    async with (
        FakeEngine("a") as engine,
        replicas(tmp_path, engine) as ((first, process), (second, _)),
        client_of(first) as one,
        client_of(second) as two,
    ):
        made = await one.responses.create(model="m", input="hi")
        process.kill()
        await process.wait()
        with pytest.raises(openai.BadRequestError) as caught:
            await two.responses.create(model="m", input="more", previous_response_id=made.id)
        assert caught.value.code == "previous_response_not_found"
        with pytest.raises(openai.NotFoundError):
            await two.responses.retrieve(made.id)


async def test_an_answer_ends_when_its_client_leaves_the_replica_that_sent_it_on(tmp_path: Path) -> None:
    async with FakeEngine("a") as engine, replicas(tmp_path, engine) as ((first, _), (second, _)):
        async with client_of(first) as one:
            made = await one.responses.create(model="m", input="hi")
        engine.hang = True
        body = {"model": "m", "input": "more", "previous_response_id": made.id}
        async with aiohttp.ClientSession(headers={"authorization": "Bearer one"}) as session:
            pending = asyncio.ensure_future(session.post(f"http://127.0.0.1:{second}/v1/responses", json=body))
            await until(lambda: len(engine.bodies) == 2)
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
        await until(lambda: engine.cancelled == 1)


def test_ids_of_a_body_are_its_previous_response_and_item_references() -> None:
    body = {
        "previous_response_id": "resp_1",
        "input": [{"type": "item_reference", "id": "msg_2"}, {"id": "fc_3"}, {"id": "x", "role": "user"}, "text"],
    }
    assert list(ids_in(body)) == ["resp_1", "msg_2", "fc_3"]
    assert not list(ids_in({"input": "text", "previous_response_id": 7}))


async def test_a_replica_answers_itself_when_an_id_names_nobody_else() -> None:
    own, other = (replica_url("127.0.0.1", port, is_tls=False) for port in (8080, 8081))
    names = ["127.0.0.1:8080", "127.0.0.1:8081", "no.such.name.invalid"]
    one = Replicas("127.0.0.1", names, 8080, 1.0, TlsFiles(), clock=lambda: 100.0)
    scope: dict[str, Any] = {"headers": []}
    assert await one.owner(scope, [f"resp_{replica_tag(other)}{'0' * 40}"]) == other
    assert await one.owner(scope, [f"msg_{replica_tag(other)}{'0' * 40}"]) == other
    for unknown in (f"resp_{replica_tag(own)}{'0' * 40}", "resp_" + "0" * 48, "resp_x", "", "/etc/passwd", "é" * 99):
        assert await one.owner(scope, [unknown]) is None
    forwarded = {"headers": [(b"x-mini-infer-forwarded", b"1")]}
    assert await one.owner(forwarded, [f"resp_{replica_tag(other)}{'0' * 40}"]) is None


@pytest.mark.parametrize("name", ["", "a:b:c", "[::1", "host:port", "http://a"])
def test_a_name_of_replicas_is_refused_when_it_is_none(name: str) -> None:
    with pytest.raises(ValueError, match="--replicas"):
        Replicas("127.0.0.1", [name], 8080, 1.0, TlsFiles(), clock=lambda: 0.0)
