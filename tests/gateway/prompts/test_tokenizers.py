"""Tokenizers of foreign servers: what they claim, what they may cost."""

import asyncio
import json
import threading
import time
from typing import Any

import msgspec
import psutil
import pytest

from mini_infer_gateway.paths import ENGINE_PATHS
from mini_infer_gateway.prompts import prompt_keys, template_workers
from mini_infer_gateway.prompts.tokenizer_form import UnknownFormError, check_form
from mini_infer_prompts.chat_template import ChatTemplate
from mini_infer_prompts.prompt import PromptAssets
from tests.prompts.test_text_slices import PATTERNS
from tests.support.fake_engine import FakeEngine, byte_assets
from tests.support.running_gateway import RunningGateway, running_gateway, until


def with_template(template: str) -> PromptAssets:
    return byte_assets().with_chat_template(template)


async def test_a_revision_is_computed_from_the_files_when_a_server_claims_anothers() -> None:
    """Whoever claims another team's hash for a template of its own costs itself its exact routing."""
    honest = byte_assets()
    forged = msgspec.structs.replace(with_template("{{ raise_exception('poisoned') }}"), revision=honest.revision)
    async with FakeEngine("thief", model="t") as thief, FakeEngine("victim") as victim:
        thief.assets = forged
        async with running_gateway(thief.endpoint) as gateway:
            states = gateway.app.fleet.endpoints
            await until(lambda: states["thief"].subscriber.tokenizer_queried)
            gateway.source.publish_endpoints(thief.endpoint, victim.endpoint)
            await until(lambda: states["victim"].index_kind(gateway.app._clock()) == "exact")
            assert states["thief"].subscriber.assets_revision == ""
            async with gateway.chat("hi") as response:
                assert response.status == 200
                assert int(response.headers["x-mini-infer-prompt-tokens"]) > 0


HOSTILE = {
    "folded": "{% set x = 'a' * 3000000000 %}{{ messages[0].content }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
    "folded_filter": "{{ 'a' | center(3000000000) }}",
    "slow_method": "{% for a in range(99999) %}{{ '{:>900000}'.format(a) | wordwrap(1) | length }}{% endfor %}",
    "long_source": "{# " + "x" * 100_000 + " #}" + "{% for a in range(99999) %}" * 2 + "{% endfor %}" * 2,
}


async def prompt_tokens(gateway: RunningGateway, text: str, model: str) -> int:
    async with gateway.chat(text, model=model) as response:
        assert response.status == 200
        return int(response.headers["x-mini-infer-prompt-tokens"])


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_template_costs_its_own_model_when_two_models_share_a_gateway(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_workers, "RENDER_TIMEOUT_S", 0.2)
    async with FakeEngine("bad", model="bad") as bad, FakeEngine("good") as good:
        bad.assets = with_template(HOSTILE[name])
        bad.tokenizes = False
        async with running_gateway(bad.endpoint, good.endpoint) as gateway:
            await gateway.settled()
            before = psutil.Process().memory_info().rss
            jobs = [asyncio.ensure_future(prompt_tokens(gateway, "hi", "bad")) for _ in range(3)]
            while not all(job.done() for job in jobs):
                began_s = time.thread_time()
                assert await prompt_tokens(gateway, "hello there", "m") > 0
                assert time.thread_time() - began_s < 5.0, "the event loop does not run the template, which never ends"
                await asyncio.sleep(0.05)  # a client's pace: without it the healthy requests take the whole processor
            await asyncio.gather(*jobs)
            assert psutil.Process().memory_info().rss - before < 200 << 20


async def test_its_engine_tokenises_when_a_template_fails_in_its_process() -> None:
    async with FakeEngine("a") as engine:
        engine.assets = with_template(HOSTILE["folded_filter"])
        async with running_gateway(engine.endpoint) as gateway:
            await gateway.settled()
            for _ in range(template_workers.FAILURES_LIMIT):
                assert await prompt_tokens(gateway, "hi", "m") > 0
            assert engine.tokenized
            async with gateway.client.get(gateway.url + "/debug/endpoints") as response:
                assert (await response.json())["endpoints"][0]["not_tokenized_here"]
            reported = gateway.app.metrics.text().decode()
            assert 'mini_infer_gateway_template_failures_total{reason="memory"} 3.0' in reported


def with_tokenizer(**parts: Any) -> PromptAssets:
    """The byte tokenizer with other parts."""
    files = byte_assets().files
    description = json.loads(files["tokenizer.json"])
    description["model"] |= parts.pop("model", {})
    return PromptAssets.from_files(files | {"tokenizer.json": json.dumps(description | parts)})


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


UNKNOWN_FORMS: dict[str, dict[str, Any]] = {
    "exponential_regex": {"pre_tokenizer": split(r"(a+)+$")},
    "regex_in_a_sequence": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split(r"(\w+\s?)+$")]}},
    "cubic_regex": {"pre_tokenizer": split(r"a*a*a*b")},
    "huge_replacement": {"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 100_000}},
    "regex_replacement": {"normalizer": {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"}},
    "huge_prefix": {"normalizer": {"type": "Prepend", "prepend": "b" * 100_000}},
    "char_map": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "many_parts": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 100}},
    "dropout": {"model": {"dropout": 0.5}},
    "unknown_kind": {"pre_tokenizer": {"type": "Other"}},
    "no_kind": {"normalizer": {"normalizers": []}},
}


@pytest.mark.parametrize("name", UNKNOWN_FORMS)
def test_a_tokenizer_is_not_loaded_when_the_cost_of_a_part_is_unknown(name: str) -> None:
    with pytest.raises(UnknownFormError):
        check_form(with_tokenizer(**UNKNOWN_FORMS[name]).files)


def test_a_unigram_model_is_not_loaded_when_a_piece_is_too_long() -> None:
    model = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a" * 10_000, -1.0]]}
    with pytest.raises(UnknownFormError):
        check_form({"tokenizer.json": json.dumps({"model": model})})


DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize("pattern", [*filter(None, PATTERNS.values()), DEEPSEEK_V3, r"\p{N}{1,3}", "(?i:'s|'t)|\\s+"])
def test_a_tokenizer_is_loaded_when_its_words_are_those_of_a_public_model(pattern: str) -> None:
    check_form(with_tokenizer(pre_tokenizer=split(pattern)).files)


async def test_its_engine_tokenises_when_a_tokenizer_is_of_an_unknown_form() -> None:
    async with FakeEngine("bad", model="bad") as bad, FakeEngine("good") as good:
        bad.assets = with_tokenizer(**UNKNOWN_FORMS["exponential_regex"])
        async with running_gateway(bad.endpoint, good.endpoint) as gateway:
            await gateway.settled()
            async with asyncio.timeout(60.0):
                assert await prompt_tokens(gateway, "a" * 5_000 + "b", "bad") > 0
                assert await prompt_tokens(gateway, "hello", "m") > 0
            assert bad.tokenized
            assert not good.tokenized


def tool_transcript() -> dict[str, Any]:
    """254 messages with several calls of tools each, 440 KB."""
    function = {"name": "read", "arguments": {"path": "a/b", "lines": [1, 2, 3], "options": {"deep": "x" * 200}}}
    calls = [{"id": f"c{number}", "type": "function", "function": function} for number in range(6)]
    turn = [{"role": "assistant", "content": "", "tool_calls": calls}, {"role": "tool", "content": "done " * 200}]
    return {"messages": turn * 127}


def many_tools() -> dict[str, Any]:
    properties = {f"p{number}": {"type": "string", "description": "x" * 60} for number in range(100)}
    function = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    return {"messages": BODY, "tools": [{"type": "function", "function": function}] * 60}


BODY = [{"role": "user", "content": "hi"}]
HEAVY: dict[str, dict[str, Any]] = {
    "tool_transcript": tool_transcript(),
    "many_tools": many_tools(),
    "token_ids": {"prompt": list(range(149_000))},
    "many_messages": {"messages": BODY * 2_000},
}


@pytest.mark.parametrize("name", HEAVY)
async def test_the_event_loop_does_no_work_on_a_prompt_when_that_is_heavy(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set[str]()

    def noted(function: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            threads.add(threading.current_thread().name)
            return function(*args, **kwargs)

        return called

    monkeypatch.setattr(ChatTemplate, "render", noted(ChatTemplate.render))
    monkeypatch.setattr(prompt_keys, "block_keys", noted(prompt_keys.block_keys))
    async with FakeEngine("a") as engine, running_gateway(engine.endpoint) as gateway:
        await gateway.settled()
        threads.clear()
        body = {"model": "m"} | HEAVY[name]
        path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        row, tokenizers = ENGINE_PATHS[path], gateway.app.tokenizers
        revision = gateway.app.fleet.endpoints["a"].subscriber.assets_revision
        size = len(json.dumps(body))
        assert row.prompts
        keys = await tokenizers.keys(row.prompts, body, size, [revision], None, lambda: False)
        assert keys[revision].tokens > 1000 or name == "many_tools"
        assert threads
        assert all(thread.startswith("tokenize") for thread in threads)


async def test_a_template_moves_to_a_thread_when_it_does_too_much_for_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A small body does not say how much its template makes of it."""
    async with FakeEngine("a") as engine:
        engine.assets = with_template(
            "{% for a in range(2000) %}{% for m in messages %}{% set x = m.content | upper %}{% endfor %}{% endfor %}ok"
        )
        async with running_gateway(engine.endpoint) as gateway:
            await gateway.settled()
            assert await prompt_tokens(gateway, "hi", "m") == 2
