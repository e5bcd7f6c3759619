"""From an endpoint's events to the index and to where a chat goes: snapshot, gaps, restarts, gateways that agree."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mini_infer_contract.blocks import block_keys
from mini_infer_gateway.fleet import endpoint_subscriber
from mini_infer_gateway.index.prefix_index import prompt_root
from mini_infer_gateway.prompts.tokenizers import read_tokenizers
from mini_infer_prompts.prompt import PromptAssets
from tests.support.fake_engine import FakeEngine, byte_assets
from tests.support.running_gateway import RunningGateway, running_gateway, until


def prompt(number: int) -> list[int]:
    return [number * 7 + position % 5 for position in range(64)]


def num_stored(gateway: RunningGateway, engine: FakeEngine, number: int) -> int:
    keys = block_keys(prompt(number), prompt_root())
    return gateway.app.index.hit(engine.name, keys, 0.0).blocks


def agree(one: RunningGateway, two: RunningGateway, name: str) -> bool:
    return stored_keys(one, name) == stored_keys(two, name)


def stored_keys(gateway: RunningGateway, name: str) -> set[bytes]:
    """Keys that events have confirmed."""
    holdings = gateway.app.index._endpoints.get(name)
    return set(holdings.blocks.owner) if holdings else set()


async def test_cached_blocks_are_known_from_the_snapshot_when_the_gateway_starts_later() -> None:
    async with FakeEngine("a") as engine:
        await engine.prefill(prompt(1))
        async with running_gateway(engine.endpoint) as gateway:
            await gateway.settled()
            assert num_stored(gateway, engine, 1) == 4
            await engine.prefill(prompt(2))
            await until(lambda: num_stored(gateway, engine, 2) == 4)
        assert (engine.snapshots, engine.replays) == (1, 0)


async def test_cached_blocks_are_known_from_replay_when_an_engine_has_no_snapshot() -> None:
    async with FakeEngine("vllm") as engine:
        engine.serves_snapshot = False
        await engine.prefill(prompt(1))
        async with running_gateway(engine.endpoint) as gateway:
            await gateway.settled()
            assert num_stored(gateway, engine, 1) == 4


async def test_an_engine_is_followed_by_its_events_when_its_snapshot_is_larger_than_memory_allows() -> None:
    async with FakeEngine("a") as engine, FakeEngine("b") as other:
        await engine.prefill(prompt(1))
        await other.prefill(prompt(1))
        engine.snapshot_padding_bytes = 3 << 20
        endpoints = (engine.endpoint, other.endpoint)
        async with running_gateway(*endpoints, memory_limit_bytes=16 << 20) as gateway:
            await gateway.settled()
            assert num_stored(gateway, other, 1) == 4
            assert (engine.snapshots, engine.replays) == (1, 1)
            assert num_stored(gateway, engine, 1) == 4
            assert gateway.app.fleet._snapshots.used_bytes == 0


@pytest.mark.parametrize("healed", ["replay", "snapshot"])
async def test_an_event_gap_is_healed_by_replay_or_snapshot(healed: str) -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()
        await engine.prefill(prompt(1))
        await until(lambda: num_stored(gateway, engine, 1) == 4)
        await engine.prefill(prompt(2), lost=True)
        if healed == "snapshot":
            engine.sent.clear()
        await engine.prefill(prompt(3))
        await until(lambda: num_stored(gateway, engine, 3) == 4)
        assert [num_stored(gateway, engine, number) for number in (1, 2, 3)] == [4, 4, 4]
        counted = f'event_gaps_total{{healed="{healed}"}} 1.0'
        await until(lambda: counted in gateway.app.metrics.text().decode())  # after the index: the count comes last
        assert engine.snapshots == (2 if healed == "snapshot" else 1)


async def test_the_index_is_reset_when_a_publisher_restarts_its_sequence() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()
        for number in range(3):
            await engine.prefill(prompt(number))
        await until(lambda: num_stored(gateway, engine, 2) == 4)
        engine.cache.parents.clear()
        engine.sent.clear()
        engine.sequence = 0
        await engine.prefill(prompt(9))
        await until(lambda: num_stored(gateway, engine, 9) == 4)
        assert num_stored(gateway, engine, 2) == 0


async def test_the_index_is_empty_until_a_restarted_engine_is_known_again() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()
        await engine.prefill(prompt(1))
        await until(lambda: num_stored(gateway, engine, 1) == 4)
        port, events_port = engine.port, engine.events_port
        await engine.stop()
        await until(lambda: num_stored(gateway, engine, 1) == 0)
        assert gateway.app.fleet.endpoints["a"].index_kind(gateway.app._clock()) == "approximate"
        engine.cache.parents.clear()
        engine.sent.clear()
        engine.sequence = 0
        await engine.start(port, events_port)
        await gateway.settled()
        await engine.prefill(prompt(2))
        await until(lambda: num_stored(gateway, engine, 2) == 4)
        assert num_stored(gateway, engine, 1) == 0


async def test_the_index_is_kept_for_a_while_when_events_stop() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint, stale_ttl_s=60.0) as gateway:
        await gateway.settled()
        await engine.prefill(prompt(1))
        await until(lambda: num_stored(gateway, engine, 1) == 4)
        events_port = engine.events_port
        engine.silence()
        await gateway.settled("stale")
        assert num_stored(gateway, engine, 1) == 4
        async with gateway.chat("hi") as response:
            assert response.headers["x-mini-infer-index"] == "stale"
        gateway.app.index.expire(gateway.app._clock() + 59.0)
        assert num_stored(gateway, engine, 1) == 4
        gateway.app.index.expire(gateway.app._clock() + 61.0)
        assert num_stored(gateway, engine, 1) == 0
        engine.speak(events_port)
        await gateway.settled()
        assert num_stored(gateway, engine, 1) == 4


async def test_reconnects_back_off_when_events_are_malformed_repeatedly(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_subscriber, "RECONNECT_PAUSE_S", 0.02)
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()

        async def babble() -> None:
            while True:
                await engine._publisher.send_multipart([b"kv-events", b"\0" * 8, b"no msgpack"])
                await asyncio.sleep(0.01)

        babbling = asyncio.create_task(babble())

        def pauses_s() -> list[float]:
            found = [record.args for record in caplog.records if "starting anew" in record.message]
            return [float(str(of[-1])) for of in found if isinstance(of, tuple)]

        await until(lambda: len(pauses_s()) >= 5)
        babbling.cancel()
        assert pauses_s() == pytest.approx([0.04, 0.08, 0.16, 0.32, 0.64])
        assert engine.snapshots <= 6


async def test_nothing_is_left_in_the_index_when_an_endpoint_is_removed() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()
        await engine.prefill(prompt(1))
        await until(lambda: num_stored(gateway, engine, 1) == 4)
        gateway.source.publish([])
        assert num_stored(gateway, engine, 1) == 0
        assert gateway.app.index.cached_blocks("a") == 0
        assert gateway.app.tokenizers._tokenizers == {}


async def test_the_subscription_restarts_when_an_event_batch_is_malformed() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()
        while engine.snapshots < 2:  # what is sent before its subscription has arrived, nobody gets
            await engine._publisher.send_multipart([b"kv-events", b"\0" * 8, b"no msgpack"])
            await asyncio.sleep(0.1)
        await engine.prefill(prompt(1))
        await until(lambda: num_stored(gateway, engine, 1) == 4)


async def test_growing_chats_stay_on_one_engine_when_there_are_two_gateways() -> None:
    async with (
        FakeEngine("a") as a,
        FakeEngine("b") as b,
        running_gateway(a.endpoint, b.endpoint) as one,
        running_gateway(a.endpoint, b.endpoint, seed=2) as two,
    ):
        await one.settled()
        await two.settled()
        homes: dict[int, str] = {}
        for turn in range(1, 5):
            for chat in range(8):
                text = "".join(f"chat {chat} turn {number}, and so on. " for number in range(turn))
                gateway = (one, two)[(turn + chat) % 2]
                async with gateway.chat(text) as response:
                    pod = response.headers["x-mini-infer-pod"]
                    if turn > 1:
                        assert response.headers["x-mini-infer-reason"] == "cached_prefix"
                assert homes.setdefault(chat, pod) == pod
                await until(partial(agree, one, two, pod))
        assert sorted(homes.values()).count("a") in range(2, 7)
        for name in ("a", "b"):
            assert stored_keys(one, name) == stored_keys(two, name)


async def test_load_reports_replace_own_counts() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()
        engine.chunk_delay_s = 30.0
        async with gateway.chat("x" * 200, stream=True):
            assert gateway.app.ledger.load("a").running == 1
            await engine.report(running=5, waiting=2, queued_tokens=300)
            await until(lambda: gateway.app.ledger.load("a").waiting == 2)
            assert gateway.app.ledger.load("a").running == 5
            assert gateway.app.ledger.load("a").queued_tokens == 300


async def test_chats_stay_on_one_engine_when_there_are_no_events() -> None:
    async with (
        FakeEngine("a", events=False) as a,
        FakeEngine("b", events=False) as b,
        running_gateway(a.endpoint, b.endpoint) as gateway,
    ):
        await gateway.settled("approximate")
        pods = set()
        for turn in range(1, 6):
            async with gateway.chat("and so on, and on. " * turn * 3) as response:
                pods.add(response.headers["x-mini-infer-pod"])
                assert response.headers["x-mini-infer-index"] == "approximate"
                assert (int(response.headers["x-mini-infer-hit-tokens"]) > 0) == (turn > 1)
        assert len(pods) == 1


async def test_requests_are_routed_by_load_when_a_server_has_no_prompt_assets() -> None:
    async with FakeEngine("a", events=False, assets=False) as a, FakeEngine("b", events=False, assets=False) as b:
        a.chunk_delay_s = b.chunk_delay_s = 30.0
        async with (
            running_gateway(a.endpoint, b.endpoint) as gateway,
            gateway.chat("hi", stream=True) as first,
            gateway.chat("hi", stream=True) as second,
        ):
            assert first.headers["x-mini-infer-index"] == "none"
            assert first.headers["x-mini-infer-pod"] != second.headers["x-mini-infer-pod"]


async def test_token_id_prompts_are_routed_by_prefix_when_engines_have_no_tokenizer() -> None:
    no_tokenizer = b'{"error":{"message":"this server runs without a tokenizer","code":"no_tokenizer"}}'
    async with FakeEngine("a", assets=False) as a, FakeEngine("b", assets=False) as b:
        a.no_assets = b.no_assets = no_tokenizer
        async with running_gateway(a.endpoint, b.endpoint) as gateway:
            await gateway.settled()
            ids, pods = [number % 251 for number in range(400)], set()
            for turn in range(1, 4):
                body = {"model": "m", "prompt": ids[: 100 * turn]}
                async with gateway.client.post(gateway.url + "/v1/completions", json=body) as response:
                    pods.add(response.headers["x-mini-infer-pod"])
                    assert response.headers["x-mini-infer-prompt-tokens"] == str(100 * turn)
                    assert (int(response.headers["x-mini-infer-hit-tokens"]) > 0) == (turn > 1)
                    await response.read()
            assert len(pods) == 1
            async with gateway.chat("a text goes by load") as response:
                assert response.headers["x-mini-infer-prompt-tokens"] == "0"


def folder_of(assets: PromptAssets, folder: Path) -> str:
    """A model folder with these files."""
    for name, text in assets.files.items():
        (folder / name).write_text(text)
    return str(folder)


@pytest.mark.parametrize("named_for", ["", "m"])
async def test_the_index_is_exact_when_a_tokenizer_is_named_for_a_vllm_server(tmp_path: Path, named_for: str) -> None:
    tokenizers = {named_for: folder_of(byte_assets(), tmp_path), "another model": str(tmp_path)}
    async with FakeEngine("a", assets=False) as a, FakeEngine("b", assets=False) as b:
        a.topic = b.topic = b""  # vLLM's default
        async with running_gateway(a.endpoint, b.endpoint, tokenizers=tokenizers) as gateway:
            await gateway.settled()
            text, pods = "and so on, and on. " * 20, set()
            for turn in range(4):
                async with gateway.chat(text * (turn + 1), stream=True) as response:
                    pods.add(response.headers["x-mini-infer-pod"])
                    assert response.headers["x-mini-infer-index"] == "exact"
                    assert (int(response.headers["x-mini-infer-hit-tokens"]) > 0) == (turn > 0)
                    await response.read()
                await asyncio.sleep(0.05)
            assert len(pods) == 1
        # It is not asked for token ids: no server but ours goes on with a stream of another one.
        assert not any(b"return_token_ids" in body for body in a.bodies + b.bodies)


REQUEST_BODIES: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/completions": lambda text: {"prompt": text},
    "/v1/messages": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 5},
}


@pytest.mark.parametrize("path", REQUEST_BODIES)
async def test_the_index_is_exact_when_the_server_tokenises_for_the_gateway(path: str) -> None:
    async with FakeEngine("a", assets=False) as a, FakeEngine("b", assets=False) as b:
        async with running_gateway(a.endpoint, b.endpoint, tokenizers={"m": "ask"}) as gateway:
            await gateway.settled()
            text, pods = "and so on, and on. " * 20, set()
            for turn in range(1, 4):
                body = {"model": "m"} | REQUEST_BODIES[path](text * turn)
                async with gateway.client.post(gateway.url + path, json=body) as response:
                    assert response.headers["x-mini-infer-index"] == "exact"
                    assert int(response.headers["x-mini-infer-prompt-tokens"]) >= len(text) * turn
                    assert (int(response.headers["x-mini-infer-hit-tokens"]) > 0) == (turn > 1)
                    pods.add(response.headers["x-mini-infer-pod"])
                    await response.read()
            assert len(pods) == 1
            assert min(a.tokenized, b.tokenized) > 1, "they are asked in turns"
        assert not any(b"return_token_ids" in body for body in a.bodies + b.bodies)


async def test_a_server_is_routed_by_load_when_it_cannot_tokenise() -> None:
    async with FakeEngine("a", assets=False) as a, FakeEngine("b", assets=False) as b:
        b.tokenizes = False
        async with running_gateway(a.endpoint, b.endpoint, tokenizers={"": "ask"}) as gateway:
            await until(lambda: gateway.app.fleet.endpoints["a"].index_kind(gateway.app._clock()) == "exact")
            await until(lambda: gateway.app.fleet.endpoints["b"].subscriber.tokenizer_queried)
            assert gateway.app.fleet.endpoints["b"].index_kind(gateway.app._clock()) == "none"
            a.tokenizes = False
            async with gateway.chat("a question") as response:
                assert response.status == 200
                assert response.headers["x-mini-infer-prompt-tokens"] == "0"
            a.tokenizes = True
            await a.stop()
            async with gateway.chat("another question") as response:
                assert response.status == 200
                assert response.headers["x-mini-infer-pod"] == "b"
            await a.start()  # for its end


async def test_a_tokenizer_is_not_used_when_it_is_named_for_another_model(tmp_path: Path) -> None:
    tokenizers = {"another model": folder_of(byte_assets(), tmp_path)}
    async with (
        FakeEngine("a", assets=False) as engine,
        running_gateway(engine.endpoint, tokenizers=tokenizers) as gateway,
    ):
        await until(lambda: gateway.app.fleet.is_ready)
        async with gateway.chat("hi") as response:
            assert response.headers["x-mini-infer-index"] == "none"


def test_the_error_names_the_folder_when_it_has_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"--tokenizer {tmp_path}.*tokenizer.json"):
        read_tokenizers({"": str(tmp_path)})


async def test_a_request_reaches_an_engine_when_it_cannot_be_tokenised() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()
        engine.status = 400
        for body in ({"model": "m"}, {"model": "m", "messages": "x"}):
            async with gateway.client.post(gateway.url + "/v1/chat/completions", json=body) as response:
                assert response.status == 400
                assert (await response.json())["error"]["message"] == "status 400"
                assert response.headers["x-mini-infer-prompt-tokens"] == "0"


async def test_block_keys_equal_the_engines_when_a_prompt_is_long_or_salted() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()
        text = "long " * 10_000
        async with gateway.chat(text):
            pass
        async with gateway.chat(text) as response:
            assert int(response.headers["x-mini-infer-hit-tokens"]) >= len(text)
        async with gateway.chat(text, cache_salt="mine") as response:
            assert response.headers["x-mini-infer-hit-tokens"] == "0"
