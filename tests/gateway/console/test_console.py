"""The console over HTTP: who gets which data, and what is where."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from mini_infer_gateway.console import events
from mini_infer_gateway.console.explanation import MAX_AT_ONCE, MAX_AT_ONCE_PER_KEY, MAX_BODY_BYTES
from mini_infer_gateway.console.files import FILES
from mini_infer_web.api_keys import ApiKeys
from mini_infer_web.cors import CorsPolicy
from tests.support.fake_engine import FakeEngine
from tests.support.running_gateway import RunningGateway, running_gateway, until

KEYS = "sk-admin name=ops admin=true\nsk-a name=team-a\nsk-b name=team-b\n"
DATA = ("session", "fleet", "requests", "requests/some", "prefixes", "events")
LONG = "the same long beginning of a prompt, word by word, for the same model " * 4


@pytest.fixture
def keys(tmp_path: Path) -> ApiKeys:
    (tmp_path / "keys").write_text(KEYS)
    return ApiKeys(file=tmp_path / "keys")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


async def get(gateway: RunningGateway, path: str, key: str = "", **headers: str) -> tuple[int, Any]:
    async with gateway.client.get(gateway.url + path, headers=bearer(key) | headers) as response:
        text = await response.text()
        return response.status, json.loads(text) if "json" in response.content_type else text


async def data(gateway: RunningGateway, name: str, key: str = "") -> Any:
    status, found = await get(gateway, f"/console/api/{name}", key)
    assert status == 200, found
    return found


async def chat(gateway: RunningGateway, text: str, key: str = "", request_id: str = "", **headers: str) -> int:
    sent = bearer(key) | ({"x-request-id": request_id} if request_id else {}) | headers
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    async with gateway.client.post(gateway.url + "/v1/chat/completions", json=body, headers=sent) as response:
        await response.read()
        return response.status


async def explain(gateway: RunningGateway, text: str, key: str = "") -> tuple[int, Any]:
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    url = gateway.url + "/console/api/explain"
    async with gateway.client.post(url, json=body, headers=bearer(key)) as response:
        return response.status, await response.json()


async def events_of(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, Any]]:
    name = ""
    async for line in response.content:
        if line.startswith(b"event: "):
            name = line[7:].strip().decode()
        elif line.startswith(b"data: "):
            yield name, json.loads(line[6:])


@asynccontextmanager
async def two_engines(**settings: Any) -> AsyncIterator[tuple[FakeEngine, FakeEngine, RunningGateway]]:
    async with (
        FakeEngine("a") as first,
        FakeEngine("b") as second,
        running_gateway(first.endpoint, second.endpoint, **settings) as gateway,
    ):
        await gateway.settled()
        yield first, second, gateway


@pytest.mark.parametrize(
    ("accept", "is_page"),
    [
        ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", True),
        ("application/json", False),
        ("*/*", False),
        ("", False),
    ],
)
async def test_a_browser_gets_the_page_and_anything_else_json_when_it_opens_the_root(
    keys: ApiKeys, accept: str, is_page: bool
) -> None:
    async with running_gateway(keys=keys) as gateway:
        status, answer = await get(gateway, "/", accept=accept)
        assert status == 200
        if is_page:
            assert "/console/console.js" in answer
        else:
            assert answer["name"] == "mini-infer gateway"
            assert answer["paths"]["chat"] == "/v1/chat/completions"


async def test_files_come_compressed_with_a_strict_policy_when_a_browser_loads_them() -> None:
    async with running_gateway() as gateway, aiohttp.ClientSession(auto_decompress=False) as client:
        total_bytes = 0
        for path in FILES:
            accept = {"accept": "text/html" if path == "/" else "*/*", "accept-encoding": "gzip, br"}
            async with client.get(gateway.url + path, headers=accept) as response:
                assert response.status == 200
                total_bytes += len(await response.read())
                policy, tag = response.headers["content-security-policy"], response.headers["etag"]
                assert response.headers["x-content-type-options"] == "nosniff"
            assert "script-src 'self';" in policy
            assert "style-src 'self';" in policy
            assert "unsafe" not in policy
            assert "http" not in policy
            async with client.get(gateway.url + path, headers=accept | {"if-none-match": tag}) as response:
                assert (response.status, await response.read()) == (304, b"")
        assert total_bytes <= 200_000, "the first load is to be at most 200 kB"


async def test_there_is_no_console_when_it_is_switched_off() -> None:
    async with running_gateway(console=False) as gateway:
        status, answer = await get(gateway, "/", accept="text/html")
        assert (status, answer["console"]) == (200, None)
        for path in ("/console/console.js", *(f"/console/api/{name}" for name in DATA)):
            assert (await get(gateway, path))[0] == 404
        assert (await get(gateway, "/favicon.ico"))[0] == 204
        async with FakeEngine("a") as engine:
            gateway.source.publish_endpoints(engine.endpoint)
            await gateway.settled()
            assert await chat(gateway, "hi") == 200


@pytest.mark.parametrize("key", ["", "sk-wrong"])
async def test_data_needs_a_key_and_files_do_not_when_the_gateway_has_keys(keys: ApiKeys, key: str) -> None:
    async with running_gateway(keys=keys) as gateway:
        for name in DATA:
            assert (await get(gateway, f"/console/api/{name}", key))[0] == 401
        assert (await explain(gateway, "hi", key))[0] == 401
        for path in FILES:
            assert (await get(gateway, path, key))[0] == 200


async def test_an_unknown_path_and_a_wrong_method_are_refused_when_they_are_requested() -> None:
    async with running_gateway() as gateway:
        for path in (
            "/console",
            "/console/",
            "/console/api/",
            "/console/api/other",
            "/console/../cli.py",
            "/console/x",
        ):
            assert (await get(gateway, path))[0] == 404
        assert (await get(gateway, "/console/api/explain"))[0] == 405
        for path, methods in (("/console/api/fleet", "GET, HEAD, OPTIONS"), ("/console/api/explain", "OPTIONS, POST")):
            async with gateway.client.options(gateway.url + path) as response:
                assert (response.status, response.headers["allow"]) == (204, methods)
            async with gateway.client.delete(gateway.url + path) as response:
                assert response.status == 405


async def test_a_key_sees_its_own_requests_and_no_engine_when_others_use_the_gateway(keys: ApiKeys) -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint, keys=keys, admin_port=1) as gateway:
        await gateway.settled()
        for name in ("a", "b"):
            assert await chat(gateway, LONG, f"sk-{name}", f"request-of-{name}") == 200
        mine = await data(gateway, "requests", "sk-a")
        assert [row["id"] for row in mine["requests"]] == ["request-of-a"]
        assert {row["id"] for row in (await data(gateway, "requests", "sk-admin"))["requests"]} == {
            *("request-of-a", "request-of-b")
        }
        assert (await get(gateway, "/console/api/requests/request-of-b", "sk-a"))[0] == 404
        assert (await get(gateway, "/console/api/prefixes", "sk-a"))[0] == 403
        fleet = await data(gateway, "fleet", "sk-a")
        assert fleet["engines"] == []
        assert engine.endpoint.name not in json.dumps([fleet, mine, await data(gateway, "session", "sk-a")]).split('"')
        assert [row["name"] for row in (await data(gateway, "fleet", "sk-admin"))["engines"]] == ["a"]
        session = await data(gateway, "session", "sk-a")
        assert (session["everything"], session["sees_requests"]) == (False, True)


async def test_a_key_finds_no_prefix_of_another_key_when_it_explains_the_same_prompt(keys: ApiKeys) -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint, keys=keys) as gateway:
        await gateway.settled()
        assert await chat(gateway, LONG, "sk-a") == 200
        (status, own), (_, other) = await explain(gateway, LONG, "sk-a"), await explain(gateway, LONG, "sk-b")
        assert status == 200
        assert own["cached_tokens"] > 0
        assert other["cached_tokens"] == 0
        assert own["prompt_tokens"] == other["prompt_tokens"]
        assert (own["engines"], own["chosen"]) == ([], [])


async def test_the_admin_port_shows_everything_and_the_clients_port_services_when_there_are_no_keys() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint, host="0.0.0.0", admin_port=1) as gateway:
        await gateway.settled()
        assert await chat(gateway, "hi") == 200
        for url, everything, engines in ((gateway.url, False, 0), (gateway.admin_url, True, 1)):
            async with gateway.client.get(url + "/console/api/session") as response:
                session = await response.json()
            assert (session["everything"], session["can_chat"]) == (everything, not everything)
            assert session["sees_requests"] is everything, "the page does not ask for what it may not see"
            async with gateway.client.get(url + "/console/api/fleet") as response:
                assert len((await response.json())["engines"]) == engines
            async with gateway.client.get(url + "/console/api/requests") as response:
                assert len((await response.json())["requests"]) == engines
            async with gateway.client.get(url + "/", headers={"accept": "text/html"}) as response:
                assert "console.js" in await response.text()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({"sec-fetch-site": "cross-site", "origin": "https://evil.example"}, 403),
        ({"sec-fetch-site": "same-site", "origin": "http://127.0.0.1:1"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
    ],
)
async def test_data_goes_to_its_own_page_alone_when_pages_of_all_origins_may_use_the_api(
    headers: dict[str, str], status: int
) -> None:
    async with running_gateway(cors=CorsPolicy(allowed_origins=("*",))) as gateway:
        assert (await get(gateway, "/console/api/requests", **headers))[0] == status


async def test_a_prompt_s_hit_is_explained_with_every_scorer_when_one_of_two_engines_has_it() -> None:
    async with two_engines() as (first, second, gateway):
        assert await chat(gateway, LONG) == 200
        holder = "a" if first.bodies else "b"
        status, told = await explain(gateway, LONG)
        assert status == 200
        assert (told["chosen"], told["reason"], told["exact"]) == ([holder], "cached_prefix", True)
        assert told["cached_tokens"] >= 0.8 * told["prompt_tokens"]
        assert [set(engine["scores"]) for engine in told["engines"]] == 2 * [
            {"cached_prefix", "queue_wait", "decode_slots", "cache_room"}
        ]
        await until(lambda: bool(gateway.app.index.conversations(holder, 10)))
        found = await data(gateway, "prefixes")
        longest = max(found["prefixes"], key=lambda prefix: prefix["tokens"])
        assert list(longest["engines"]) == [holder]
        assert len(first.bodies) + len(second.bodies) == 1, "explaining sends nothing to an engine"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b"{}", 400),
        (b'{"model": 7, "messages": []}', 400),
        (b'{"model": "m", "messages": "no list"}', 400),
        (b'{"model": "unknown", "messages": []}', 404),
        (b'{"model": "m", "prompt": "text"}', 200),
        (b'{"model": "m", "prompt": {"no": "prompt"}}', 400),
        (b"x" * (MAX_BODY_BYTES + 1), 413),
        (b"[" * 100_000, 400),
    ],
)
async def test_a_bad_body_gets_an_error_that_names_it_when_it_is_to_be_explained(body: bytes, status: int) -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()
        async with gateway.client.post(gateway.url + "/console/api/explain", data=body) as response:
            assert response.status == status, await response.text()


async def test_one_more_prompt_is_refused_when_as_many_are_explained_as_may_be(monkeypatch: Any) -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()
        go, keys_of = asyncio.Event(), gateway.app.tokenizers.keys

        async def slow(*arguments: Any, **named: Any) -> Any:
            await go.wait()
            return await keys_of(*arguments, **named)

        monkeypatch.setattr(gateway.app.tokenizers, "keys", slow)
        many = [asyncio.create_task(explain(gateway, "hi")) for _ in range(MAX_AT_ONCE)]
        console = gateway.app.console
        assert console is not None
        await until(lambda: console._explainer._at_once.total() == MAX_AT_ONCE)
        assert (await explain(gateway, "hi"))[0] == 429
        go.set()
        assert [status for status, _ in await asyncio.gather(*many)] == [200] * MAX_AT_ONCE


async def test_a_stream_ends_when_its_key_is_taken_out_of_the_file(
    keys: ApiKeys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mini_infer_gateway.console.app.SAMPLE_EVERY_S", 0.05)
    monkeypatch.setattr("mini_infer_web.api_keys.LOOK_EVERY_S", 0.0)
    async with running_gateway(keys=keys) as gateway:
        url = gateway.url + "/console/api/events"
        async with (
            gateway.client.get(url, headers=bearer("sk-admin")) as revoked,
            gateway.client.get(url, headers=bearer("sk-a")) as valid,
        ):
            assert (await anext(events_of(revoked)))[0] == "fleet"
            (tmp_path / "keys").write_text("sk-a name=team-a\nsk-b name=team-b\n")
            async with asyncio.timeout(60):
                assert await revoked.content.read()
            stream = events_of(valid)
            assert [(await anext(stream))[0] for _ in range(3)] == ["fleet"] * 3


async def test_prompts_of_a_key_wait_when_it_has_others_explained(
    keys: ApiKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint, keys=keys) as gateway:
        await gateway.settled()
        go, keys_of = asyncio.Event(), gateway.app.tokenizers.keys

        async def slow(*arguments: Any, **named: Any) -> Any:
            await go.wait()
            return await keys_of(*arguments, **named)

        monkeypatch.setattr(gateway.app.tokenizers, "keys", slow)
        many = [asyncio.create_task(explain(gateway, "hi", "sk-a")) for _ in range(MAX_AT_ONCE_PER_KEY)]
        console = gateway.app.console
        assert console is not None
        await until(lambda: console._explainer._at_once.total() == MAX_AT_ONCE_PER_KEY)
        assert (await explain(gateway, "hi", "sk-a"))[0] == 429
        go.set()
        assert (await explain(gateway, "hi", "sk-b"))[0] == 200
        assert [status for status, _ in await asyncio.gather(*many)] == [200] * MAX_AT_ONCE_PER_KEY


async def test_the_stream_tells_of_the_fleet_and_of_requests_when_they_end(monkeypatch: Any) -> None:
    monkeypatch.setattr("mini_infer_gateway.console.app.SAMPLE_EVERY_S", 0.05)
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()
        assert await chat(gateway, "before", request_id="before") == 200
        async with gateway.client.get(gateway.url + "/console/api/events") as response:
            stream = events_of(response)
            name, fleet = await anext(stream)
            assert (name, fleet["engines"][0]["state"]) == ("fleet", "ready")
            name, rows = await anext(stream)
            assert (name, [row["id"] for row in rows]) == ("requests", ["before"])
            assert await chat(gateway, "after", request_id="after") == 200
            async for name, found in stream:
                if name == "requests":
                    assert [row["id"] for row in found] == ["after"]
                    break
            gateway.source.publish_endpoints()
            async for name, found in stream:
                if name == "fleet" and not found["engines"]:
                    break
        console = gateway.app.console
        assert console is not None
        await until(lambda: console.streams.open == 0)


async def test_one_more_console_is_refused_when_a_key_has_as_many_open_as_it_may(
    keys: ApiKeys, monkeypatch: Any
) -> None:
    monkeypatch.setattr(events, "MAX_STREAMS_PER_KEY", 2)
    monkeypatch.setattr(events, "MAX_STREAMS", 3)
    async with running_gateway(keys=keys) as gateway:
        url = gateway.url + "/console/api/events"
        opened = [await gateway.client.get(url, headers=bearer(key)) for key in ("sk-a", "sk-a", "sk-b")]
        for response in opened:
            assert response.status == 200
            await anext(events_of(response))
        for key in ("sk-a", "sk-b"):
            assert (await get(gateway, "/console/api/events", key))[0] == 429
        opened[0].close()
        console = gateway.app.console
        assert console is not None
        await until(lambda: console.streams.open == 2)
        again = await gateway.client.get(url, headers=bearer("sk-b"))
        assert again.status == 200
        for response in (*opened, again):
            response.close()


@pytest.mark.parametrize(
    "left",
    ["sk-b name=team-b\nsk-c name=team-c\n", "sk-admin name=ops\nsk-b name=team-b\n"],
    ids=["revoked", "no longer an administrator's"],
)
async def test_an_open_console_ends_when_its_key_loses_its_rights(
    keys: ApiKeys, tmp_path: Path, monkeypatch: Any, left: str
) -> None:
    monkeypatch.setattr("mini_infer_gateway.console.app.SAMPLE_EVERY_S", 0.02)
    monkeypatch.setattr("mini_infer_web.api_keys.LOOK_EVERY_S", 0.0)
    async with running_gateway(keys=keys) as gateway:
        url = gateway.url + "/console/api/events"
        lost, kept = [await gateway.client.get(url, headers=bearer(key)) for key in ("sk-admin", "sk-b")]
        await anext(events_of(kept))
        (tmp_path / "keys").write_text(left)
        async for _ in events_of(lost):
            pass
        assert lost.content.at_eof()
        await anext(events_of(kept))
        kept.close()


async def test_open_consoles_end_when_the_gateway_stops() -> None:
    async with running_gateway() as gateway:
        response = await gateway.client.get(gateway.url + "/console/api/events")
        stream = events_of(response)
        await anext(stream)
        gateway.app.stop_gently()
        async for _ in stream:
            pass
        assert response.content.at_eof()


async def test_an_engine_answers_when_an_administrator_names_it_and_not_when_a_tenant_does(keys: ApiKeys) -> None:
    async with two_engines(keys=keys) as (first, second, gateway):
        pin = {"x-mini-infer-engine": "b"}
        for _ in range(4):
            assert await chat(gateway, LONG, "sk-admin", **pin) == 200
        assert (len(first.bodies), len(second.bodies)) == (0, 4)
        assert await chat(gateway, LONG, "sk-a", **pin) == 403
        assert await chat(gateway, LONG, "sk-admin", **{"x-mini-infer-engine": "c"}) == 404
        models = {row["model"] for row in (await data(gateway, "requests", "sk-admin"))["requests"]}
        assert models == {"m"}


async def test_the_beginning_of_a_prompt_is_kept_when_texts_are_switched_on() -> None:
    for is_on in (False, True):
        async with FakeEngine("a") as engine, running_gateway(engine.endpoint, console_texts=is_on) as gateway:
            await gateway.settled()
            assert await chat(gateway, "a secret question", request_id="one") == 200
            detail = await data(gateway, "requests/one")
            assert detail["text"] == ("a secret question" if is_on else "")
            steps = [step["step"] for step in detail["timeline"]]
            assert steps == ["arrived", "tokenized", "sent", "first_byte", "ended"]
