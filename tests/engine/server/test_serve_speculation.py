"""Speculation behind the server: the same texts, by vLLM's flag, and numbers under vLLM's names."""

from collections.abc import Iterator

import pytest

from mini_infer_engine import LLM, SamplingParams
from tests.engine.server.conftest import DEMO
from tests.engine.server.dry_server import EngineServer
from tests.engine.server.test_serve_demo import CHAT, MESSAGES, post, stream, text_of

DRAFT = '{"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 3}'
FIELDS = {"temperature": 0.6, "seed": 11, "max_tokens": 90, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[EngineServer]:
    with EngineServer(*DEMO, "--max-model-len", "512", "--speculative-config", DRAFT) as started:
        yield started


def test_text_equals_a_plain_engines_when_speculation_is_on(server: EngineServer) -> None:
    llm = LLM("demo", device="cpu", dtype="float32", kv_cache_memory=64_000_000, max_model_len=512)
    plain = llm.chat(MESSAGES, SamplingParams(**FIELDS), use_tqdm=False)[0].outputs[0].text  # type: ignore[arg-type]
    response = post(server, CHAT, messages=MESSAGES, **FIELDS)
    assert response.status_code == 200, response.text
    assert text_of(response.json()) == plain
    assert stream(server, **FIELDS)[0] == plain
    word = plain.split()[len(plain.split()) // 2]
    stopped, reason, _ = stream(server, **FIELDS, stop=[word])
    assert stopped == plain[: plain.index(word)]
    assert reason == "stop"


def test_drafts_are_counted_under_vllms_metric_names(server: EngineServer) -> None:
    post(server, CHAT, messages=MESSAGES, **FIELDS)
    lines = server.client.get("/metrics").text.splitlines()
    counted = {
        name: float(line.rpartition(" ")[2])
        for line in lines
        for name in ("drafts", "draft_tokens", "accepted_tokens")
        if line.startswith(f"vllm:spec_decode_num_{name}_total{{")
    }
    assert counted["drafts"] > 0
    assert counted["draft_tokens"] >= counted["drafts"]
    assert 0 < counted["accepted_tokens"] <= counted["draft_tokens"]
    assert sum(line.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_total{") for line in lines) == 3
