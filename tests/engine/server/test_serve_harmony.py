"""gpt-oss through the HTTP server: scripted outputs in harmony in three dialects, and a tiny model's constraints."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.engine.server.dry_server import DryServer, EngineServer
from tests.prompts.templates import HARMONY
from tests.support.harmony_tokens import IDS, VOCAB_SIZE, harmony_files
from tests.support.tiny_models import GPT_OSS, save_tiny_model

NEXT = "<|end|><|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>We need the weather.{NEXT}"
ARGUMENTS = '{"city":"Rome"}'
CALL = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
QUESTION: Any = [{"role": "user", "content": "How is it in Rome?"}]
SCRIPT = [
    {"when": "to=assistant<|channel|>commentary", "say": "<|channel|>final<|message|>It is sunny.<|return|>"},
    {"when": "Plan", "say": f"<|channel|>commentary<|message|>First Rome.{NEXT}{CALL}"},
    {"when": "Reasoning: high", "say": f"{THOUGHT}<|channel|>final<|message|>Sunny.<|return|>"},
    {"say": f"{THOUGHT}{CALL}"},
]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DryServer]:
    folder = tmp_path_factory.mktemp("harmony")
    script, template = folder / "script.json", folder / "template.jinja"
    script.write_text(json.dumps(SCRIPT))
    template.write_text(HARMONY)
    with DryServer("--dry-run-script", str(script), "--chat-template", str(template)) as server:
        yield server


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder: Path = tmp_path_factory.mktemp("gpt-oss")
    ids = {"bos_token_id": IDS["<|start|>"], "eos_token_id": IDS["<|return|>"], "pad_token_id": IDS["<|endoftext|>"]}
    save_tiny_model(
        folder,
        "gpt_oss",
        **(GPT_OSS | ids | {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 2, "max_position_embeddings": 1024}),
    )
    for name, text in harmony_files(HARMONY).files.items():
        (folder / name).write_text(text)
    flags = ("--device", "cpu", "--dtype", "float32", "--kv-cache-memory", "32MB", "--max-model-len", "1024")
    with EngineServer("--model", str(folder), "--served-model-name", "tiny", *flags) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")


def client_of(server: EngineServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")


def whole_and_streamed(client: openai.OpenAI, **fields: Any) -> Iterator[Any]:
    yield client.chat.completions.create(**fields).choices[0]
    with client.chat.completions.stream(**fields) as events:
        yield events.get_final_completion().choices[0]


def test_parsers_are_those_of_harmony_when_the_template_writes_it(scripted: DryServer) -> None:
    model = scripted.client.get("/v1/models").json()["data"][0]
    assert (model["tool_call_parser"], model["reasoning_parser"]) == ("openai", "openai_gptoss")


def test_a_chat_has_reasoning_and_a_call_and_answers_from_the_result(scripted: DryServer) -> None:
    client = client_of(scripted)
    for choice in whole_and_streamed(client, model="dry", messages=QUESTION, tools=[TOOL]):
        assert (choice.finish_reason, choice.message.content or None) == ("tool_calls", None)
        assert choice.message.reasoning == "We need the weather."
        [call] = choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("get_weather", ARGUMENTS)
        turn = choice.message.to_dict()
        messages = [*QUESTION, turn, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
        answer = client.chat.completions.create(model="dry", messages=messages, tools=[TOOL]).choices[0]
        assert (answer.finish_reason, answer.message.content) == ("stop", "It is sunny.")


def test_a_preamble_is_content_and_effort_reaches_the_prompt(scripted: DryServer) -> None:
    client = client_of(scripted)
    plan: Any = [{"role": "user", "content": "Plan it."}]
    for choice in whole_and_streamed(client, model="dry", messages=plan, tools=[TOOL]):
        assert choice.message.content == "First Rome."
        assert len(choice.message.tool_calls) == 1
    for choice in whole_and_streamed(client, model="dry", messages=QUESTION, reasoning_effort="high"):
        assert (choice.message.content, choice.message.reasoning) == ("Sunny.", "We need the weather.")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="dry", messages=QUESTION, reasoning_effort="none")
    assert refused.value.param == "reasoning_effort"


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_has_items_of_reasoning_and_calls(scripted: DryServer, stream: bool) -> None:
    client = client_of(scripted)
    tool = {"type": "function", "strict": False, **TOOL["function"]}
    answer: Any = client.responses.create(model="dry", input="How is it in Rome?", tools=[tool], stream=stream)
    if stream:
        answer = list(answer)[-1].response
    reasoning, call = answer.output
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "We need the weather.")
    assert (call.type, call.name, call.arguments) == ("function_call", "get_weather", ARGUMENTS)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    items: Any = [*QUESTION, reasoning.to_dict(), call.to_dict(), result]
    assert client.responses.create(model="dry", input=items, tools=[tool]).output_text == "It is sunny."
    high = client.responses.create(model="dry", input="How is it?", reasoning={"effort": "high"})
    assert high.output_text == "Sunny."


def test_a_message_of_anthropics_has_thinking_and_tool_use(scripted: DryServer) -> None:
    body = {"model": "dry", "max_tokens": 500, "messages": QUESTION}
    tools = {"tools": [{"name": "get_weather", "input_schema": SCHEMA}]}
    answer = scripted.client.post("/v1/messages", json=body | tools).json()
    thinking, use = answer["content"]
    assert (answer["stop_reason"], thinking["thinking"]) == ("tool_use", "We need the weather.")
    assert (use["name"], use["input"]) == ("get_weather", {"city": "Rome"})
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "sunny"}
    turns = [*QUESTION, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
    last = scripted.client.post("/v1/messages", json=body | tools | {"messages": turns}).json()
    assert last["content"] == [{"type": "text", "text": "It is sunny."}]
    events = scripted.client.post("/v1/messages", json=body | tools | {"stream": True}).text
    assert '"thinking_delta"' in events
    assert '"input_json_delta"' in events


def test_a_constraint_is_refused_by_name_when_markers_are_no_tokens(scripted: DryServer) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client_of(scripted).chat.completions.create(
            model="dry", messages=QUESTION, response_format={"type": "json_object"}
        )
    assert refused.value.param == "response_format"


def test_a_forced_call_keeps_to_its_schema_and_ends_the_output(tiny: openai.OpenAI) -> None:
    fields: Any = {"model": "tiny", "messages": QUESTION, "tools": [TOOL], "tool_choice": "required", "max_tokens": 200}
    budget = {"thinking_token_budget": 3}
    for seed in range(3):
        for choice in whole_and_streamed(tiny, **fields, seed=seed, extra_body=budget):
            assert choice.finish_reason == "tool_calls"
            call, *_ = choice.message.tool_calls
            assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")


def test_a_schema_constrains_the_final_channel_and_not_the_reasoning(tiny: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
    fields: Any = {"model": "tiny", "messages": QUESTION, "response_format": form, "max_tokens": 200}
    reasoned = 0
    for seed in range(6):
        choice = tiny.chat.completions.create(**fields, seed=seed, extra_body={"thinking_token_budget": 5}).choices[0]
        assert json.loads(choice.message.content)["city"] in ("Rome", "Oslo")
        reasoned += hasattr(choice.message, "reasoning")
    assert reasoned, "some outputs reason first"
