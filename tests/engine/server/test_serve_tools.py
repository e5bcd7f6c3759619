"""Calls of tools and thinking through the HTTP server, as openai-python sees them: the demo model's, and scripted."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response

from tests.engine.server.dry_server import DryServer, EngineServer

LOOKUP: Any = {
    "type": "function",
    "function": {
        "name": "lookup_docs",
        "description": "Look up what a Python function does.",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
}
QUESTION: Any = [{"role": "user", "content": "What does textwrap.dedent do? Look it up."}]
ARGUMENTS = {"name": "textwrap.dedent"}
LOOK_UP: Any = [{"role": "user", "content": "Look up the documentation of json.dumps."}]
"""The demo model calls `LOOKUP` for this whatever its schema is and whatever other tools there are."""
ACCENTED = '{"name": "caf\N{LATIN SMALL LETTER E WITH ACUTE}"}'
THINKING: Any = {"chat_template_kwargs": {"enable_thinking": True}}


@pytest.fixture(scope="module")
def demo(demo: EngineServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none")


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    call = f'<tool_call>\n{{"name": "lookup_docs", "arguments": {ACCENTED}}}\n</tool_call>'
    script = [{"when": "twice", "say": f"I look.\n{call}\n{call}\n"}, {"say": call}]
    path: Path = tmp_path_factory.mktemp("script") / "script.json"
    path.write_text(json.dumps(script))
    with DryServer("--dry-run-script", str(path)) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")


def send_request(client: openai.OpenAI, messages: Any = QUESTION, **fields: Any) -> Any:
    return client.chat.completions.create(model=client.models.list().data[0].id, messages=messages, **fields)


def streamed(client: openai.OpenAI, messages: Any = QUESTION, **fields: Any) -> Any:
    """The message and the reason that a stream's deltas make, joined as openai-python joins them."""
    model = client.models.list().data[0].id
    with client.chat.completions.stream(model=model, messages=messages, **fields) as events:
        return events.get_final_completion().choices[0]


def test_the_demo_model_calls_a_tool_and_answers_from_its_result(demo: openai.OpenAI) -> None:
    whole = send_request(demo, tools=[LOOKUP], temperature=0).choices[0]
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    [call] = whole.message.tool_calls
    assert re.fullmatch(r"call_[a-zA-Z0-9]{24}", call.id)
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function",
        "lookup_docs",
        ARGUMENTS,
    )
    stream = streamed(demo, tools=[LOOKUP], temperature=0)
    assert stream.finish_reason == "tool_calls"
    assert stream.message.tool_calls[0].function.arguments == call.function.arguments
    result = {"name": "textwrap.dedent", "signature": "(text)", "doc": "Remove common leading whitespace."}
    messages = [*QUESTION, whole.message, {"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)}]
    answer = send_request(demo, messages, tools=[LOOKUP], temperature=0).choices[0]
    assert (answer.finish_reason, answer.message.tool_calls) == ("stop", None)
    assert "whitespace" in answer.message.content


def test_a_partial_call_is_returned_when_max_tokens_cuts_it(demo: openai.OpenAI) -> None:
    whole = send_request(demo, tools=[LOOKUP], temperature=0, max_tokens=16).choices[0]
    assert whole.finish_reason == "length"
    [call] = whole.message.tool_calls
    assert json.dumps(ARGUMENTS).startswith(call.function.arguments)
    pieces = [
        chunk.choices[0] for chunk in send_request(demo, tools=[LOOKUP], temperature=0, max_tokens=16, stream=True)
    ]
    calls = [call for piece in pieces for call in piece.delta.tool_calls or []]
    assert "".join(call.function.arguments for call in calls) == call.function.arguments
    assert pieces[-1].finish_reason == "length"


def test_tools_are_not_in_the_prompt_when_tool_choice_is_none(demo: openai.OpenAI) -> None:
    plain = send_request(demo, temperature=0, max_tokens=20)
    none = send_request(demo, tools=[LOOKUP], tool_choice="none", temperature=0, max_tokens=20)
    assert none.usage.prompt_tokens == plain.usage.prompt_tokens
    assert none.choices[0].message.content == plain.choices[0].message.content


def test_reasoning_is_separate_and_counted_with_and_without_stream(demo: openai.OpenAI) -> None:
    fields = {"temperature": 0, "max_tokens": 120, "extra_body": THINKING}
    whole = send_request(demo, **fields)
    message = whole.choices[0].message
    assert message.reasoning.startswith("The user asks about `textwrap.dedent`")
    assert message.reasoning_content == message.reasoning
    assert "think>" not in message.reasoning + message.content
    assert message.content.startswith("Remove any")
    counted = whole.usage.completion_tokens_details.reasoning_tokens
    assert 20 < counted < whole.usage.completion_tokens - 5
    deltas = [chunk.choices[0].delta for chunk in send_request(demo, stream=True, **fields)]
    for name in ("reasoning", "reasoning_content", "content"):
        texts_of = "".join(getattr(delta, name, None) or "" for delta in deltas)
        assert texts_of == getattr(message, name)


def test_reasoning_tokens_are_counted_at_the_end_of_a_stream(demo: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    fields: Any = {"temperature": 0, "max_tokens": 120, "extra_body": THINKING, "stream_options": options}
    *so_far, last = [chunk.usage for chunk in send_request(demo, stream=True, **fields)]
    assert not any(usage.completion_tokens_details for usage in so_far)
    assert 20 < last.completion_tokens_details.reasoning_tokens < last.completion_tokens


def test_reasoning_is_left_out_when_it_is_not_included(demo: openai.OpenAI) -> None:
    fields = {"temperature": 0, "max_tokens": 120, "extra_body": THINKING | {"include_reasoning": False}}
    whole = send_request(demo, **fields)
    assert not hasattr(whole.choices[0].message, "reasoning")
    assert whole.usage.completion_tokens_details.reasoning_tokens > 20
    chunks = list(send_request(demo, stream=True, **fields))
    assert not any(hasattr(chunk.choices[0].delta, "reasoning") for chunk in chunks)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content


def test_thinking_is_off_when_reasoning_effort_is_none(demo: openai.OpenAI) -> None:
    assert hasattr(
        send_request(demo, reasoning_effort="low", temperature=0, max_tokens=20).choices[0].message, "reasoning"
    )
    quiet = send_request(demo, reasoning_effort="none", temperature=0, max_tokens=20)
    assert not hasattr(quiet.choices[0].message, "reasoning")
    assert quiet.usage.completion_tokens_details.reasoning_tokens == 0


def test_several_tool_calls_are_numbered_and_streamed(scripted: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Look it up twice."}]
    whole = send_request(scripted, messages, tools=[LOOKUP]).choices[0]
    assert whole.message.content == "I look."
    assert [call.function.arguments for call in whole.message.tool_calls] == [ACCENTED] * 2
    chunks = [chunk.choices[0].delta for chunk in send_request(scripted, messages, tools=[LOOKUP], stream=True)]
    assert "".join(chunk.content or "" for chunk in chunks) == "I look."
    calls = [call for chunk in chunks for call in chunk.tool_calls or []]
    begun = [(call.index, call.function.name) for call in calls if call.id]
    assert begun == [(0, "lookup_docs"), (1, "lookup_docs")]
    assert [call.type for call in calls if call.id] == ["function"] * 2
    assert not any(call.function.name or call.type for call in calls if not call.id)
    for index in range(2):
        pieces = [call.function.arguments for call in calls if call.index == index]
        assert "".join(pieces) == ACCENTED
        assert len(pieces) > 10


def test_a_stream_with_tool_calls_is_resumed_at_any_event(scripted: openai.OpenAI) -> None:
    """As the gateway has it go on where an engine died: what was told and what is told then are the whole."""
    fields: Any = {"tools": [LOOKUP], "stream": True, "messages": [{"role": "user", "content": "Look it up twice."}]}

    def parts(**extra: Any) -> list[tuple[list[int], list[str]]]:
        """Of each chunk: its token ids, and what it tells, each piece with its place."""
        chunks = [
            chunk.choices[0]
            for chunk in send_request(scripted, **fields, extra_body={"return_token_ids": True} | extra)
        ]
        return [(chunk.token_ids, [*texts_of(chunk.delta), f"end {chunk.finish_reason}"]) for chunk in chunks]

    def texts_of(delta: Any) -> list[str]:
        found = [f"content {character}" for character in delta.content or ""]
        for call in delta.tool_calls or []:
            found += [f"{call.index} name {call.function.name}"] if call.function.name else []
            found += [f"{call.index} {character}" for character in call.function.arguments]
        return found

    def joined(chunks: list[tuple[list[int], list[str]]]) -> list[str]:
        return [piece for _, pieces in chunks for piece in pieces if piece != "end None"]

    whole = parts()
    for cut in range(1, len(whole), 23):
        before = whole[:cut]
        ids = [token_id for token_ids, _ in before for token_id in token_ids]
        if ids:
            assert joined(before) + joined(parts(resume_token_ids=ids)) == joined(whole), cut


def test_a_tool_call_is_text_when_the_request_has_no_tools(scripted: openai.OpenAI) -> None:
    assert "<tool_call>" in send_request(scripted).choices[0].message.content


LOOKUP_RESPONSES: Any = {"type": "function"} | LOOKUP["function"]
QUESTION_TEXT = QUESTION[0]["content"]


def respond(client: openai.OpenAI, sent_input: Any = QUESTION_TEXT, *, stream: bool = False, **fields: Any) -> Response:
    """A response, whole or as the last event of its stream tells it."""
    made = client.responses.create(model=client.models.list().data[0].id, input=sent_input, stream=stream, **fields)
    if not stream:
        return made  # type: ignore[return-value]  # openai-python's overloads know only literals
    last: Any = list(made)[-1]  # type: ignore[call-overload]
    assert last.type == f"response.{last.response.status}"
    response: Response = last.response
    return response


def shown(response: Response) -> list[dict[str, Any]]:
    """Its output without ids."""
    return [item.to_dict() | {"id": "", "call_id": ""} for item in response.output]


def test_a_response_calls_a_tool_and_answers_from_its_result(demo: openai.OpenAI) -> None:
    requested: dict[str, Any] = {"tools": [LOOKUP_RESPONSES], "temperature": 0}
    called = respond(demo, **requested)
    assert shown(called) == shown(respond(demo, stream=True, **requested))
    [call] = [item for item in called.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments)) == ("lookup_docs", ARGUMENTS)
    assert re.fullmatch(r"call_[a-zA-Z0-9]{24}", call.call_id)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Removes common leading whitespace."}
    answers = [
        respond(demo, [result], previous_response_id=called.id, **requested),
        respond(demo, [*QUESTION, *(item.to_dict() for item in called.output), result], **requested),
    ]
    assert answers[0].output_text == answers[1].output_text != ""
    assert len({answer.usage.input_tokens for answer in answers if answer.usage}) == 1


def test_a_response_has_a_reasoning_item(demo: openai.OpenAI) -> None:
    requested: dict[str, Any] = {"reasoning": {"effort": "low"}, "temperature": 0, "max_output_tokens": 300}
    whole = respond(demo, **requested)
    thought, *rest = whole.output
    assert thought.type == "reasoning"
    assert [item.type for item in rest] == ["message"]
    assert thought.content
    text = thought.content[0].text
    assert whole.usage is not None
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    assert shown(respond(demo, stream=True, **requested)) == shown(whole)
    summed = respond(
        demo, include=["reasoning.encrypted_content"], **requested | {"reasoning": {"effort": "low", "summary": "auto"}}
    )
    for item in summed.output:
        if item.type == "reasoning":
            assert (item.summary[0].text, item.content) == (text, [])
            # What comes back sealed is what was thought.
            back = [*QUESTION, item.to_dict() | {"summary": []}, *(one.to_dict() for one in rest), *QUESTION]
            plain = [*QUESTION, thought.to_dict(), *(one.to_dict() for one in rest), *QUESTION]
            made = [respond(demo, sent_input, max_output_tokens=1) for sent_input in (back, plain)]
            assert made[0].usage is not None
            assert made[1].usage is not None
            assert made[0].usage.input_tokens == made[1].usage.input_tokens


def test_a_response_returns_logprobs_of_its_text(demo: openai.OpenAI) -> None:
    requested: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 3, "temperature": 0}
    texts: list[Any] = [
        respond(demo, "What does a list hold?", stream=stream, max_output_tokens=12, **requested).output[0]
        for stream in (False, True)
    ]
    texts_of = texts[0].content[0].logprobs
    assert len(texts_of) == 12
    assert all(len(one.top_logprobs) == 3 and one.logprob <= 0 for one in texts_of)
    assert "".join(one.token for one in texts_of).startswith(texts[0].content[0].text)
    assert texts[1].content[0].logprobs == texts_of


def test_a_response_matches_its_schema(scripted: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    form: Any = {"format": {"type": "json_schema", "name": "verdict", "schema": schema, "strict": True}}
    for stream in (False, True):
        assert set(json.loads(respond(scripted, "go", text=form, stream=stream).output_text)) == {"ok"}
    wrong = form | {"format": form["format"] | {"schema": {"type": "banana"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        respond(scripted, text=wrong)
    assert caught.value.param is not None
    assert caught.value.param.startswith("text.format")


def test_a_response_calls_a_custom_tool(scripted: openai.OpenAI) -> None:
    [call] = respond(scripted, "go", tools=[{"type": "custom", "name": "lookup_docs"}], stream=True).output
    assert call.type == "custom_tool_call"
    assert json.loads(call.input) == json.loads(ACCENTED)
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    again = respond(scripted, [{"role": "user", "content": "go"}, call.to_dict(), result])
    assert again.status == "completed"


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
HELLO: Any = [{"role": "user", "content": "Hello! Who are you?"}]


def test_a_tool_call_matches_its_schema_when_tool_choice_is_required(demo: openai.OpenAI) -> None:
    fields = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "temperature": 1}
    for answer in (send_request(demo, HELLO, seed=5, **fields).choices[0], streamed(demo, HELLO, seed=5, **fields)):
        assert (answer.finish_reason, answer.message.content) in (("tool_calls", None), ("tool_calls", ""))
        [call] = answer.message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert (call.function.name, arguments["city"] in ("Rome", "Oslo")) == ("get_weather", True)
        assert (arguments.keys(), arguments["days"] in (1, 2)) == ({"city", "days"}, True)


def test_the_named_tool_is_called_with_openais_finish_reason(demo: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    answer = send_request(demo, HELLO, tools=[LOOKUP, WEATHER], tool_choice=named, temperature=0).choices[0]
    assert answer.finish_reason == "stop"
    assert [call.function.name for call in answer.message.tool_calls] == ["get_weather"]


def test_only_allowed_tools_are_called(demo: openai.OpenAI) -> None:
    name = {"type": "function", "function": {"name": "get_weather"}}
    allowed: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [name]}}
    free = send_request(demo, LOOK_UP, tools=[LOOKUP, WEATHER], temperature=0).choices[0]
    assert [call.function.name for call in free.message.tool_calls] == ["lookup_docs"]
    answer = send_request(demo, LOOK_UP, tools=[LOOKUP, WEATHER], tool_choice=allowed, temperature=0).choices[0]
    assert [call.function.name for call in answer.message.tool_calls] == ["get_weather"]


def test_a_strict_tools_arguments_match_its_schema_when_tool_choice_is_auto(demo: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"path": {"enum": ["a", "b"]}}, "required": ["path"]}
    function = LOOKUP["function"] | {"parameters": schema | {"additionalProperties": False}, "strict": True}
    answer = send_request(demo, LOOK_UP, tools=[LOOKUP | {"function": function}], temperature=0).choices[0]
    [call] = answer.message.tool_calls
    assert json.loads(call.function.arguments)["path"] in ("a", "b")


def test_thinking_precedes_a_required_tool_call(demo: openai.OpenAI) -> None:
    fields = {"tools": [LOOKUP], "tool_choice": "required", "temperature": 0, "max_tokens": 150}
    answer = send_request(demo, extra_body=THINKING, **fields).choices[0]
    assert answer.message.reasoning
    assert answer.message.tool_calls[0].function.name == "lookup_docs"
    assert answer.message.content is None


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "lookup_docs"}}])
def test_a_forced_call_is_made_when_thinking_has_a_budget(demo: openai.OpenAI, choice: Any, seed: int) -> None:
    """The demo model would often end its turn within its thinking."""
    fields = {"tools": [LOOKUP], "tool_choice": choice, "max_tokens": 200, "seed": seed, "temperature": 1}
    question: Any = [{"role": "user", "content": "What does os.path.join do?"}]
    answer = send_request(demo, question, extra_body=THINKING | {"thinking_token_budget": 24}, **fields).choices[0]
    if answer.finish_reason != "length":
        assert answer.message.tool_calls[0].function.name == "lookup_docs"


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_of_a_given_form_is_given_when_thinking_has_a_budget(demo: openai.OpenAI, seed: int) -> None:
    body = THINKING | {"thinking_token_budget": 24, "structured_outputs": {"choice": ["yes, indeed", "not at all"]}}
    message = send_request(demo, extra_body=body, temperature=1, seed=seed, max_tokens=100).choices[0].message
    assert message.content in body["structured_outputs"]["choice"]


def test_a_forced_call_is_made_when_thinking_has_a_budget_in_messages(demo: openai.OpenAI) -> None:
    body = {
        "model": "demo",
        "max_tokens": 2000,
        "messages": [{"role": "user", "content": "What does os.path.join do?"}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tools": [{"name": "lookup_docs", "input_schema": LOOKUP["function"]["parameters"]}],
        "tool_choice": {"type": "any"},
    }
    answer = httpx.post(f"{demo.base_url}messages", json=body, timeout=200)
    assert answer.status_code == 200, answer.text
    assert answer.json()["stop_reason"] in ("tool_use", "model_context_window_exceeded")  # and not end_turn


@pytest.mark.parametrize("budget", [0, 7])
def test_thinking_ends_when_its_token_budget_is_spent(demo: openai.OpenAI, budget: int) -> None:
    whole = send_request(demo, extra_body=THINKING | {"thinking_token_budget": budget}, temperature=0, max_tokens=100)
    # The template opens its thinking with a line's end, which counts.
    assert whole.usage.completion_tokens_details.reasoning_tokens == max(0, budget - 1)
    assert whole.choices[0].finish_reason == "stop"
    assert whole.choices[0].message.content
    free = send_request(demo, extra_body=THINKING | {"thinking_token_budget": -1}, temperature=0, max_tokens=100)
    assert free.usage.completion_tokens_details.reasoning_tokens > 20


def test_a_structured_answer_follows_thinking(demo: openai.OpenAI) -> None:
    choice = {"structured_outputs": {"choice": ["yes, indeed", "not at all"]}}
    message = send_request(demo, extra_body=THINKING | choice, temperature=0, max_tokens=150).choices[0].message
    assert message.reasoning.startswith("The user asks about")
    assert message.content in choice["structured_outputs"]["choice"]
