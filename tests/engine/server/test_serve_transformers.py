"""A model that runs through transformers behind the API: chats, calls of tools, structured output, and its name."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from mini_infer_engine import LLM, SamplingParams
from tests.engine.server.dry_server import EngineServer
from tests.engine.server.test_serve_tools import ARGUMENTS, LOOKUP, QUESTION

FLAGS = ("--model", "demo", "--device", "cpu", "--dtype", "float32", "--kv-cache-memory", "64MB")


@pytest.fixture(scope="module")
def server() -> Iterator[EngineServer]:
    flags = (*FLAGS, "--model-impl", "transformers", "--max-model-len", "512", "--max-num-seqs", "8")
    with EngineServer(*flags) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: EngineServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")


def test_models_name_the_implementation(server: EngineServer) -> None:
    [model] = httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]
    assert model["model_impl"] == "transformers"


def test_a_chat_calls_a_tool_when_its_template_offers_one(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(model="demo", messages=QUESTION, tools=[LOOKUP], temperature=0).choices[0]
    assert choice.finish_reason == "tool_calls"
    calls: Any = choice.message.tool_calls
    assert len(calls) == 1
    call = calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("lookup_docs", ARGUMENTS)


def test_output_has_the_form_of_a_schema_when_one_is_requested(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "count", "schema": schema}}
    messages: Any = [{"role": "user", "content": "How many?"}]
    answer = client.chat.completions.create(model="demo", messages=messages, response_format=form, max_tokens=60)
    assert isinstance(json.loads(answer.choices[0].message.content or "")["count"], int)


def test_offline_texts_are_those_of_the_native_model() -> None:
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 256}
    messages: Any = [{"role": "user", "content": "What is a list?"}]
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=40)
    texts = []
    for impl in ("native", "transformers"):
        llm = LLM("demo", model_impl=impl, kv_cache_memory=64_000_000, **settings)
        assert llm.model_info.model_impl == impl
        texts.append(llm.chat(messages, params, use_tqdm=False)[0].outputs[0].text)
    assert texts[0] == texts[1] != ""
