"""Who gets what of the memory, and that the parts keep to it."""

import asyncio
import json
import os
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from mini_infer_gateway.memory import (
    BODY_FACTOR,
    LEAST_TOKENIZERS_BYTES,
    BodyBudget,
    BodyReservation,
    parse_size,
    share_out,
)
from mini_infer_prompts.prompt import PromptAssets
from mini_infer_web.api_keys import ApiKeys
from tests.support.checkout import LIBRARIES, ROOT, python_path
from tests.support.fake_engine import FakeEngine
from tests.support.running_gateway import running_gateway, until

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "size"),
    [("1Gi", GIB), ("1GiB", GIB), ("900M", 900_000_000), ("1.5k", 1500), (" 512 Mi", 512 << 20), ("77", 77)],
)
def test_memory_sizes_are_parsed(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "Gi", "-1", "1 TB", "a lot"])
def test_parse_size_raises_when_the_text_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="no size"):
        parse_size(text)


@pytest.mark.parametrize("tokenizer_mib", [0, 120, 300, 2000])
@pytest.mark.parametrize("limit", [GIB // 2, GIB, 4 * GIB])
def test_memory_shares_stay_below_the_limit_or_report_what_is_missing(limit: int, tokenizer_mib: int) -> None:
    shares = share_out(limit, tokenizer_mib << 20)
    parts = shares.bodies_bytes + shares.prompt_cache_bytes + shares.segments_bytes + 300 * shares.index_blocks
    parts += shares.responses_bytes
    assert parts + (tokenizer_mib << 20) <= limit + shares.short_bytes
    assert shares.index_blocks >= limit // 10 // 300
    assert (shares.short_bytes > 0) == (limit * 0.43 < (tokenizer_mib + 96) << 20)


def test_a_body_counts_against_the_memory_budget_until_its_answer_begins() -> None:
    budget = BodyBudget(1000)
    first, second = BodyReservation(budget), BodyReservation(budget)
    assert first.grow(100)
    assert first.grow(100)
    assert budget.used_bytes == 100 * BODY_FACTOR
    assert not second.grow(100)
    first.settle(100)
    assert budget.used_bytes == 100
    assert second.grow(100)
    second.release()
    first.release()
    first.release()
    assert budget.used_bytes == 0
    assert first.grow(10_000), "one alone always fits"


async def test_a_request_is_refused_with_retry_after_when_it_would_not_fit() -> None:
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint, memory_limit_bytes=GIB // 64) as gateway:
        await gateway.settled()
        engine.hang = True
        bodies = gateway.app.bodies
        waiting = asyncio.ensure_future(gateway.chat("x " * 150_000).__aenter__())
        await until(lambda: len(engine.bodies) == 1)
        assert bodies.used_bytes == len(engine.bodies[0])
        big = asyncio.ensure_future(gateway.chat("y " * 300_000).__aenter__())
        response = await big
        assert (response.status, response.headers["retry-after"]) == (503, "1")
        assert (await response.json())["error"]["code"] == "out_of_memory"
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await until(lambda: bodies.used_bytes == 0)


async def test_an_engine_tokenises_itself_when_the_tokenizers_of_others_leave_no_memory() -> None:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FakeEngine(name)) for name in "abcd"]
        for engine in engines:
            files = engine.assets.files | {"chat_template.jinja": f"{engine.name} {{{{ messages[0].content }}}}"}
            engine.assets = PromptAssets.from_files(files)
        endpoints = [engine.endpoint for engine in engines]
        gateway = await stack.enter_async_context(running_gateway(*endpoints, memory_limit_bytes=16 << 20))
        states = gateway.app.fleet.endpoints
        await until(lambda: all(state.subscriber.assets_revision for state in states.values()))
        reasons = [gateway.app.fleet.why_not_tokenized_here(engine.name) for engine in engines]
        assert sum(bool(reason) for reason in reasons) == 1
        used_bytes = sum(one.size_bytes for one in gateway.app.tokenizers._tokenizers.values())
        assert used_bytes <= LEAST_TOKENIZERS_BYTES
        assert gateway.app.tokenizers._pages.used_bytes == 0


async def test_another_key_is_answered_when_one_has_begun_all_the_bodies_that_it_may(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sk-a name=a\nsk-b name=b\n")
    keys, limit = ApiKeys(file=tmp_path / "keys"), GIB // 16
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint, keys=keys, memory_limit_bytes=limit) as it:
        await it.settled()
        port, slow = int(it.url.rpartition(":")[2]), list[asyncio.StreamWriter]()
        for path in ("/v1/chat/completions", "/v1/responses", "/console/api/explain") * 5:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            head = (
                f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk-a\r\ncontent-type: application/json\r\n"
            )
            writer.write(f"{head}content-length: 500000\r\n\r\n{{".encode())
            slow.append(writer)
        await until(lambda: it.app.bodies.used_bytes > 6_000_000)
        body = {"model": "m", "messages": [{"role": "user", "content": "y " * 60_000}]}
        headers = {"authorization": "Bearer sk-b"}
        async with it.client.post(it.url + "/v1/chat/completions", json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
        for writer in slow:
            writer.transport.abort()
        await until(lambda: it.app.bodies.used_bytes == 0)


REFUSED = """
import asyncio, gc
from tests.support.fake_engine import FakeEngine
from tests.support.running_gateway import running_gateway

def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) << 10

async def main():
    async with FakeEngine("a") as engine:
        engine.max_model_len = 1000
        async with running_gateway(engine.endpoint) as gateway:
            await gateway.settled()
            body = b'{"model": "m", "messages": [{"role": "user", "content": "%b"}]}' % (b"words " * (16_000_000 // 6))
            url = gateway.url + "/v1/chat/completions"
            gc.disable()
            sizes = []
            for _ in range(12):
                async with gateway.client.post(url, data=body) as response:
                    assert (await response.json())["error"]["code"] == "context_length_exceeded"
                sizes.append(resident())
            print((sizes[-1] - sizes[1]) / len(body))

asyncio.run(main())
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads resident memory from /proc")
def test_memory_stays_flat_when_prompts_of_16_mb_are_refused() -> None:
    """Ten in a row, without the garbage collector; the output is the growth in bodies."""
    path = python_path(ROOT, parts=(*LIBRARIES, "gateway"))
    done = subprocess.run(
        [sys.executable, "-c", REFUSED], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) < 3


PROBE = """
import json, sys
from mini_infer_gateway.memory import parse_size
from mini_infer_gateway.prompts.prompt_keys import chat_prompts, key_steps
from mini_infer_gateway.prompts.prompt_cache import PromptCache
from mini_infer_prompts.prompt import PromptEncoder
from tests.support.fake_engine import byte_assets

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) << 10

text = "words of some length, and so on. " * (6_000_000 // 33)
encoder, known = PromptEncoder(byte_assets(), 10 << 20), PromptCache(20 << 20)
before = peak()
for _ in key_steps(encoder, known, chat_prompts, {"messages": [{"role": "user", "content": text}]}, None):
    pass
print((peak() - before) / len(text))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of resident memory from /proc")
def test_memory_stays_bounded_when_a_long_prompt_is_tokenised() -> None:
    """Bytes of memory a byte of text where each is a token: 115 once, of which ids and keys are most of these."""
    path = python_path(ROOT, parts=(*LIBRARIES, "gateway"))
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) < 40
