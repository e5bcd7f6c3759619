"""Answers of /v1/messages, of outputs that a parser has read."""

import json
from typing import Any

import pytest

from mini_infer_apis.dialects.anthropic_request import MessagesRequest, parse_request
from mini_infer_engine.api.dialects.anthropic.messages_api import MessagesRenderer, message_usage
from mini_infer_engine.core.request import FinishReason, Output, Request, SamplingParams
from mini_infer_engine.dry.vocabulary import TURN_END_ID
from mini_infer_engine.parsing.base import OutputParsing
from mini_infer_engine.parsing.parser import FormatParser
from mini_infer_engine.parsing.registry import OutputFormats
from mini_infer_engine.text.output_text import OutputText
from mini_infer_web.api_errors import ApiError
from tests.engine.parsing.support import TOOLS
from tests.engine.text.test_output_text import TOKENIZER

FORMATS = OutputFormats(tool_call_parser="hermes", reasoning_parser="qwen3")
THOUGHT = "<think>\nHm.\n</think>\n\nI look."
CALLS = "".join(
    f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>\n'
    for city in ("Zürich", "Rom")
)


def reply_of(text: str, length: int | None = None, **sampling: Any) -> tuple[OutputText, list[Output]]:
    """A reply to which nothing has come, and what will come: a token a step, the last with the end."""
    tokens = [*text.encode(), TURN_END_ID][:length]
    parser = FormatParser(FORMATS, OutputParsing(tools=TOOLS))
    request = Request(request_id="r", prompt_token_ids=list(range(40)), sampling=SamplingParams(**sampling))
    end: FinishReason = "stop" if tokens[-1] == TURN_END_ID else "length"
    ends: list[FinishReason | None] = [*[None] * (len(tokens) - 1), end]
    outputs = [
        Output(request_id="r", token_ids=[token], finish_reason=end, num_cached_tokens=16)
        for token, end in zip(tokens, ends, strict=True)
    ]
    return OutputText(request, TOKENIZER, parser), outputs


def renderer(**fields: Any) -> MessagesRenderer:
    body = {"model": "m", "max_tokens": 1000, "messages": [{"role": "user", "content": "x"}]} | fields
    return MessagesRenderer(parse_request(body, MessagesRequest), "1", "m")


def whole(text: str, length: int | None = None, **fields: Any) -> dict[str, Any]:
    reply, outputs = reply_of(text, length, stop=fields.get("stop_sequences", []))
    for output in outputs:
        reply.push(output)
    answer = json.loads(renderer(**fields).whole([reply]))
    assert isinstance(answer, dict)
    return answer


def streamed(text: str, length: int | None = None, **fields: Any) -> list[dict[str, Any]]:
    reply, outputs = reply_of(text, length, stop=fields.get("stop_sequences", []))
    events = renderer(**fields)
    deltas = [reply.push(outputs[0])]
    data = events.begin([reply])
    deltas += [reply.push(output) for output in outputs[1:]]
    data += b"".join(events.render([delta]) for delta in deltas) + events.end([reply])
    return [json.loads(text.split(b"data: ")[1]) for text in data.split(b"\n\n")[:-1]]


def blocks_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content that the events tell; every block begins, is filled and ends before the next."""
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in events:
        kind = event["type"]
        if kind == "content_block_start":
            assert not is_open
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"] | {"json": ""})
            is_open = True
        elif kind == "content_block_delta":
            assert is_open
            delta, block = event["delta"], blocks[event["index"]]
            name = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}.get(
                delta["type"], "json"
            )
            block[name] += delta["partial_json" if name == "json" else name]
        elif kind == "content_block_stop":
            assert is_open
            is_open = False
    assert not is_open
    for block in blocks:
        arguments = block.pop("json")
        if arguments:
            block["input"] = json.loads(arguments)
    return blocks


def without_ids(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for block in content:
        if block["type"] == "tool_use":
            assert block.pop("id").startswith("toolu_")
        if block["type"] == "thinking":
            assert len(block.pop("signature")) == 64
    return content


def test_thinking_text_and_tool_calls_become_content_blocks() -> None:
    answer = whole(THOUGHT + CALLS)
    assert without_ids(answer["content"]) == [
        {"type": "thinking", "thinking": "Hm."},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "name": "get_weather", "input": {"city": "Zürich"}},
        {"type": "tool_use", "name": "get_weather", "input": {"city": "Rom"}},
    ]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
    assert answer["usage"]["output_tokens_details"]["thinking_tokens"] > 0


@pytest.mark.parametrize("text", [THOUGHT + CALLS, THOUGHT, CALLS, "Hello.", ""])
@pytest.mark.parametrize("display", ["summarized", "omitted"])
def test_a_stream_equals_the_whole_answer(text: str, display: str) -> None:
    thinking = {"type": "adaptive", "display": display}
    answer, events = whole(text, thinking=thinking), streamed(text, thinking=thinking)
    assert without_ids(blocks_of(events)) == without_ids(answer["content"])
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    assert events[-2]["delta"] == {name: answer[name] for name in ("stop_reason", "stop_sequence", "stop_details")}
    begun = events[0]["message"]["usage"]
    assert begun["output_tokens"] == 0
    assert begun | events[-2]["usage"] == answer["usage"]


def test_messages_have_every_field_of_anthropics_answers() -> None:
    for message in (whole("Hello."), streamed("Hello.")[0]["message"]):
        assert {"container", "stop_details", "stop_reason", "stop_sequence"} <= message.keys()
        usage = message["usage"]
        assert (usage["service_tier"], usage["server_tool_use"]) == ("standard", None)
        assert sum(usage["cache_creation"].values()) == usage["cache_creation_input_tokens"]


def test_a_thinking_block_keeps_its_signature_when_display_is_omitted() -> None:
    shown, omitted = whole(THOUGHT)["content"][0], whole(THOUGHT, thinking={"type": "adaptive", "display": "omitted"})
    assert omitted["content"][0] == shown | {"thinking": ""}


def test_tool_arguments_are_kept_when_max_tokens_cuts_them() -> None:
    text = "".join(CALLS.splitlines(keepends=True)[:3])
    answer = whole(text, length=text.encode().index(b"rich") + 2, max_tokens=30)
    assert answer["content"][0]["input"] == {"INVALID_JSON": '{"city": "Züri'}
    assert answer["stop_reason"] == "max_tokens"


def test_stop_reason_names_the_context_when_it_is_exceeded() -> None:
    assert whole("Hello there", length=5)["stop_reason"] == "model_context_window_exceeded"
    assert whole("Hello there", length=5, max_tokens=5)["stop_reason"] == "max_tokens"


def test_stop_reason_is_stop_sequence_when_tool_calls_precede_it() -> None:
    answer = whole(CALLS + "END", stop_sequences=["END"])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "END")


@pytest.mark.parametrize(
    ("prompt", "cached", "expected"),
    [
        (40, 0, (8, 32, 0)),
        (40, 16, (8, 16, 16)),
        (40, 32, (8, 0, 32)),
        (48, 32, (0, 16, 32)),
        (10, 0, (10, 0, 0)),
        (40, 48, (0, 0, 40)),
    ],
)
def test_usage_counts_each_prompt_token_once(prompt: int, cached: int, expected: tuple[int, int, int]) -> None:
    usage = message_usage(prompt, cached)
    assert tuple(usage.values()) == expected
    assert sum(usage.values()) == prompt


def test_a_stream_ends_with_an_error_event_when_the_engine_fails() -> None:
    event = renderer().broken(ApiError(500, "the engine failed", code="engine_error"))
    assert json.loads(event.removeprefix(b"event: error\ndata: ")) == {
        "type": "error",
        "error": {"type": "api_error", "message": "the engine failed", "code": "engine_error"},
        "request_id": "1",
    }
