"""Clients with API keys at the gateway: whose turn it is, which priority they get, which cache they see."""

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mini_infer_contract.launch import CLIENT_HEADER, Endpoint
from mini_infer_gateway.paths import SCORING_PATHS
from mini_infer_web.api_keys import ApiKeys
from tests.engine.server.dry_server import DryServer, free_port
from tests.gateway.test_waiting_here import busy, sent_order, waiting
from tests.support.fake_engine import FakeEngine
from tests.support.running_gateway import RunningGateway, running_gateway, until

FILE = "sk-many name=many\nsk-few name=few\nsk-urgent name=urgent max-priority=-1\n"
PROMPT = "the same long beginning of a prompt that both of them send, word by word, to the same model " * 4


@pytest.fixture
def keys(tmp_path: Path) -> ApiKeys:
    (tmp_path / "keys").write_text(FILE)
    return ApiKeys(file=tmp_path / "keys")


def send_request(gateway: RunningGateway, key: str, text: str, **fields: object) -> "asyncio.Future[int]":
    async def status() -> int:
        body = {"model": "m", "messages": [{"role": "user", "content": text}], **fields}
        headers = {"x-request-id": text.replace(" ", "-")[:40]} | ({"authorization": f"Bearer {key}"} if key else {})
        url = gateway.url + "/v1/chat/completions"
        async with gateway.client.post(url, json=body, headers=headers) as response:
            return response.status

    return asyncio.ensure_future(status())


async def test_another_keys_request_goes_next_when_one_key_has_filled_the_queue(
    keys: ApiKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint, keys=keys, max_queue=30) as gateway:
        await gateway.settled()
        await busy(gateway, engine)
        many = [send_request(gateway, "sk-many", f"many {number}") for number in range(30)]
        await until(lambda: waiting(gateway) == 30)
        few = send_request(gateway, "sk-few", "few")
        await until(lambda: gateway.app.backlog.flows() and len(gateway.app.backlog.flows()) == 2)
        sent = sent_order(gateway, monkeypatch)
        await busy(gateway, engine, 0)
        assert await few == 200
        assert sorted(await asyncio.gather(*many)) == [200] * 29 + [429]
        assert "few" in sent[:2]


@pytest.mark.parametrize(
    ("key", "fields", "expected"),
    [
        ("sk-few", {"priority": -5}, 0),
        ("sk-few", {"priority": 3}, 3),
        ("sk-few", {"service_tier": "priority"}, 0),
        ("sk-few", {"service_tier": "fast", "priority": -7}, 0),
        ("sk-urgent", {"priority": -1}, -1),
        ("sk-urgent", {"priority": -2}, -1),
        ("sk-few", {}, None),
    ],
)
async def test_priority_is_forwarded_only_as_far_as_the_key_allows(
    keys: ApiKeys, key: str, fields: dict[str, Any], expected: int | None
) -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint, keys=keys) as gateway:
        assert await send_request(gateway, key, "hello", **fields) == 200
        assert json.loads(engine.bodies[0]).get("priority") == expected


@pytest.mark.parametrize(("max_priority", "expected"), [(0, 0), (-3, -3)])
async def test_a_priority_is_clamped_when_the_server_has_no_keys(max_priority: int, expected: int) -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint, max_priority=max_priority) as gateway:
        assert await send_request(gateway, "", "hello", priority=-1000) == 200
        assert json.loads(engine.bodies[0])["priority"] == expected


async def test_a_shorter_wait_gets_no_better_place_when_the_server_has_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()
        await busy(gateway, engine)
        url, first = gateway.url + "/v1/chat/completions", send_request(gateway, "", "first")
        await until(lambda: waiting(gateway) == 1)
        body = {"model": "m", "messages": [{"role": "user", "content": "second"}]}
        hurried = gateway.client.post(url, json=body, headers={"x-mini-infer-queue-timeout": "5"})
        second = asyncio.ensure_future(hurried)
        await until(lambda: waiting(gateway) == 2)
        sent = sent_order(gateway, monkeypatch)
        await busy(gateway, engine, 0)
        assert await first == 200
        assert (await second).status == 200
        assert sent[0] == "first"


async def test_access_log_names_the_key_and_never_contains_it(keys: ApiKeys, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with FakeEngine("a") as engine, running_gateway(engine.endpoint, keys=keys) as gateway:
            assert await send_request(gateway, "sk-few", "hello") == 200
    assert any("key few" in record.getMessage() for record in caplog.records)
    assert "sk-few" not in caplog.text


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DryServer, Endpoint]]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("sk-engine\nsk-other\n")
    events, replay = free_port(), free_port()
    flags = ("--api-key-file", str(file), "--events-port", str(events), "--replay-port", str(replay))
    with DryServer("--dry-run-step-ms", "1", *flags) as server:
        yield (
            server,
            Endpoint(
                name="dry",
                url=server.url,
                model="dry",
                events=f"tcp://127.0.0.1:{events}",
                replay=f"tcp://127.0.0.1:{replay}",
            ),
        )


async def cached(url: str, key: str, **fields: object) -> tuple[int, int]:
    """Cached tokens of the answer, and what the gateway thought of them."""
    body = {"model": "dry", "prompt": PROMPT, "max_tokens": 1, **fields}
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(headers=headers, timeout=60) as client:
        response = await client.post(url + "/v1/completions", json=body)
    assert response.status_code == 200, response.text
    details = response.json()["usage"]["prompt_tokens_details"] or {}
    return details.get("cached_tokens", 0), int(response.headers.get("x-mini-infer-hit-tokens", 0))


async def test_cached_tokens_are_not_shared_when_keys_differ(engine: tuple[DryServer, Endpoint]) -> None:
    url = engine[0].url
    assert (await cached(url, "sk-engine"))[0] == 0
    assert (await cached(url, "sk-engine"))[0] > 0
    assert (await cached(url, "sk-other"))[0] == 0
    assert (await cached(url, "sk-other", cache_salt="mine"))[0] == 0
    assert (await cached(url, "sk-engine", cache_salt="mine"))[0] == 0


@pytest.mark.parametrize("salts", [True, False])
async def test_hits_stay_exact_when_the_cache_is_salted_by_key(
    engine: tuple[DryServer, Endpoint], keys: ApiKeys, salts: bool
) -> None:
    settings = {"engine_api_key": "sk-engine", "cache_salt_by_key": salts}
    mine = {"cache_salt": f"this test's own, {salts}"}
    async with running_gateway(engine[1], keys=keys, **settings) as gateway:
        await gateway.settled()
        assert await cached(gateway.url, "sk-few", **mine) == (0, 0)
        await until(lambda: gateway.app.index.cached_blocks("dry") > 0)
        for _ in range(2):
            reported, thought = await cached(gateway.url, "sk-few", **mine)
            assert reported > 0
            assert thought == reported
        reported, thought = await cached(gateway.url, "sk-many", **mine)
        assert (reported > 0) == (not salts)
        assert thought == reported


@pytest.mark.parametrize("path", SCORING_PATHS)
async def test_scores_are_authorised_clamped_and_salted_as_texts_are(keys: ApiKeys, path: str) -> None:
    body = {"model": "m", "query": "q", "documents": ["d"], "priority": -5, "cache_salt": "own"}
    sent = []
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint, keys=keys) as gateway:
        for key, status in (("sk-few", 200), ("sk-many", 200), ("sk-none", 401)):
            headers = {"authorization": f"Bearer {key}"}
            async with gateway.client.post(gateway.url + path, json=body, headers=headers) as response:
                assert response.status == status
                sent.append((await response.json()).get("asked"))
    few, many, _ = sent
    assert few["priority"] == many["priority"] == 0
    assert len({"own", few["cache_salt"], many["cache_salt"]}) == 3


async def test_hits_stay_exact_when_only_the_engine_has_keys(engine: tuple[DryServer, Endpoint]) -> None:
    async with running_gateway(engine[1], engine_api_key="sk-other") as gateway:
        await gateway.settled()
        mine = {"cache_salt": "only the engine has keys"}
        assert await cached(gateway.url, "", **mine) == (0, 0)
        reported, thought = await cached(gateway.url, "", **mine)
        assert reported > 0
        assert thought == reported


async def test_engines_get_an_opaque_name_of_each_key_when_clients_name_themselves(keys: ApiKeys) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], CLIENT_HEADER: "in the body"}
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint, keys=keys) as gateway:
        await gateway.settled()
        for key in ("sk-many", "sk-few", "sk-many"):
            headers = {"authorization": f"Bearer {key}", CLIENT_HEADER: "chosen"}
            async with gateway.client.post(gateway.url + "/v1/chat/completions", json=body, headers=headers) as answer:
                assert answer.status == 200
        many, few, again = ({n.lower(): v for n, v in sent.items()}[CLIENT_HEADER] for sent in engine.headers)
    assert many == again != few
    assert not {"chosen", "many", "few"} & {many, few}


async def test_engines_get_one_opaque_name_of_an_address_when_there_are_no_keys() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()
        for key in ("sk-one", "sk-two"):
            assert await send_request(gateway, key, "hi") == 200
        one, two = ({n.lower(): v for n, v in sent.items()}[CLIENT_HEADER] for sent in engine.headers)
    assert one == two
    assert "127.0.0.1" not in one
