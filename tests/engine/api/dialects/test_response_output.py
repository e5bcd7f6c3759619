"""Events of a response against a model of what clients make of them: whatever the parts, they add up to its items."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import response_stream_event
from pydantic import TypeAdapter

from mini_infer_apis.dialects.response_items import sealed_reasoning
from mini_infer_engine.api.dialects.responses.items import EventWriter
from mini_infer_engine.api.dialects.responses.output import ResponseOutput, parts_of
from mini_infer_engine.parsing.base import Content, ParsedOutput, Part, Reasoning, ToolCallArguments, ToolCallBegin

EVENT: TypeAdapter[Any] = TypeAdapter(response_stream_event.ResponseStreamEvent)

ENDS = {
    "response.output_item.done": "response.output_item.added",
    "response.content_part.done": "response.content_part.added",
    "response.reasoning_summary_part.done": "response.reasoning_summary_part.added",
}


def events_of(data: bytes) -> list[dict[str, Any]]:
    events = []
    for text in data.decode().split("\n\n")[:-1]:
        head, _, body = text.partition("\ndata: ")
        events.append(json.loads(body))
        assert head == f"event: {events[-1]['type']}"
    return events


def calls(*arguments: str) -> list[Part]:
    parts: list[Part] = []
    for index, text in enumerate(arguments):
        parts += [ToolCallBegin(index, f"call_{index}", f"f{index}"), ToolCallArguments(index, text)]
    return parts


@st.composite
def outputs(draw: st.DrawFn) -> list[Part]:
    words = st.text(min_size=1, max_size=5)
    texts = draw(st.lists(st.one_of(st.builds(Reasoning, words), st.builds(Content, words)), max_size=6))
    return [*texts, *calls(*draw(st.lists(words, max_size=3)))]


def check_order(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each item and part ends before the next begins, and all between names it. Returns the items."""
    items: list[dict[str, Any]] = []
    open_kinds: list[str] = []
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENT.validate_python(event)
        kind = event["type"]
        assert event["output_index"] == len(items)
        if kind in ENDS:
            assert open_kinds.pop() == ENDS[kind]
        elif kind in ENDS.values():
            open_kinds.append(kind)
        if kind == "response.output_item.added":
            assert len(open_kinds) == 1
            item_id, deltas = event["item"]["id"], ""
        elif kind == "response.output_item.done":
            assert not open_kinds
            assert event["item"]["id"] == item_id
            items.append(event["item"])
        else:
            assert event["item_id"] == item_id
        if kind.endswith(".delta"):
            deltas += event["delta"]
        elif kind.endswith((".text.done", "_text.done", "arguments.done", "input.done")):
            assert deltas == event.get("text", event.get("arguments", event.get("input")))
    assert not open_kinds
    return items


def text_of(item: dict[str, Any]) -> str:
    if item["type"] == "function_call":
        return f"{item['call_id']} {item['name']} {item['arguments']}"
    return "".join(part["text"] for part in [*item.get("summary", ()), *item.get("content", ())])


@given(outputs(), st.booleans())
def test_response_events_add_up_to_the_output_items(parts: list[Part], summary: bool) -> None:
    output = ResponseOutput(EventWriter("resp_1"), summary=summary)
    data = b"".join([output.push([part], []) for part in parts]) + output.end("completed")
    items = check_order(events_of(data))
    assert items == output.items
    all_text = "".join(text_of(item) for item in items if item["type"] == "message")
    assert all_text == "".join(part.text for part in parts if isinstance(part, Content))
    thought = "".join(text_of(item) for item in items if item["type"] == "reasoning")
    assert thought == "".join(part.text for part in parts if isinstance(part, Reasoning))
    called = [item["arguments"] for item in items if item["type"] == "function_call"]
    assert called == [part.text for part in parts if isinstance(part, ToolCallArguments)]
    assert {item["status"] for item in items} == {"completed"}


def test_a_whole_response_has_the_items_of_a_stream() -> None:
    parts: list[Part] = [Reasoning("a"), Reasoning("b"), Content("c"), *calls("{}", "{ }")]
    streamed, whole, parsed = (
        ResponseOutput(EventWriter("resp_1")),
        ResponseOutput(EventWriter("resp_1")),
        ParsedOutput(),
    )
    for part in parts:
        streamed.push([part], [])
    parsed.add(parts)
    whole.push(parts_of(parsed), [])
    streamed.end("completed")
    whole.end("completed")
    assert whole.items == streamed.items, "ids too, which follow from the response's"
    assert [item["id"].partition("_")[0] for item in whole.items] == ["rs", "msg", "fc", "fc"]
    assert len({item["id"] for item in whole.items}) == 4


def test_a_response_has_an_empty_message_when_its_text_is_empty() -> None:
    output = ResponseOutput(EventWriter("resp_1"))
    items = check_order(events_of(output.end("completed")))
    assert [(item["type"], text_of(item)) for item in items] == [("message", "")]


def test_items_are_completed_or_incomplete_when_a_response_is_cut_off() -> None:
    output = ResponseOutput(EventWriter("resp_1"))
    output.push([Reasoning("a"), Content("b")], [])
    output.end("incomplete")
    assert [item["status"] for item in output.items] == ["completed", "incomplete"]


@pytest.mark.parametrize(
    ("arguments", "given"),
    [('{"input": "a\\nb"}', "a\nb"), ('{"input": "a', '{"input": "a'), ('{"input": 5}', '{"input": 5}'), ("[]", "[]")],
)
def test_the_input_of_a_custom_tool_call_is_plain_text(arguments: str, given: str) -> None:
    output = ResponseOutput(EventWriter("resp_1"), custom_tools=frozenset({"f0"}))
    data = output.push(calls(arguments), []) + output.end("completed")
    (item,) = check_order(events_of(data))
    assert (item["type"], item["input"], item["id"][:4]) == ("custom_tool_call", given, "ctc_")


def test_logprobs_are_sent_with_the_text_of_their_tokens() -> None:
    entry = {"token": "x", "logprob": -1.0, "bytes": [120], "top_logprobs": []}
    output = ResponseOutput(EventWriter("resp_1"))
    output.push([Reasoning("thought")], [entry | {"token": "thought"}])
    output.push([], [entry | {"token": "hel"}])
    data = output.push([Content("hello")], [entry | {"token": "lo"}])
    delta = next(event for event in events_of(data) if event["type"] == "response.output_text.delta")
    assert [one["token"] for one in delta["logprobs"]] == ["hel", "lo"]
    output.end("completed")
    assert output.items[1]["content"][0]["logprobs"] == delta["logprobs"]


def test_reasoning_has_encrypted_content_when_it_is_requested() -> None:
    output = ResponseOutput(EventWriter("resp_1"), sealed=True)
    output.push([Reasoning("so")], [])
    output.end("completed")
    assert output.items[0]["encrypted_content"] == sealed_reasoning("so")
    assert "encrypted_content" not in reasoning_in_clear()


def reasoning_in_clear() -> dict[str, Any]:
    output = ResponseOutput(EventWriter("resp_1"))
    output.push([Reasoning("so")], [])
    output.end("completed")
    return output.items[0]


def test_a_tool_call_has_namespace_and_name_when_its_tool_is_in_a_namespace() -> None:
    output = ResponseOutput(EventWriter("resp_1"), namespaces={"mcp__look": ("mcp", "look")})
    output.push([ToolCallBegin(0, "c", "mcp__look"), ToolCallArguments(0, "{}"), ToolCallBegin(1, "d", "f")], [])
    output.end("completed")
    first, second = output.items
    assert (first["namespace"], first["name"]) == ("mcp", "look")
    assert second["name"] == "f"
    assert "namespace" not in second


def test_log_probabilities_of_text_are_returned_when_reasoning_came_with_it() -> None:
    one: Any = {"token": "y", "logprob": -1.0, "bytes": [121], "top_logprobs": []}
    output = ResponseOutput(EventWriter("resp_1"))
    output.push([Reasoning("x"), Content("y")], [one])
    output.push([Reasoning("z")], [one])
    output.end("completed")
    thinking, message, _ = output.items
    assert thinking["type"] == "reasoning"
    assert message["content"][0]["logprobs"] == [one]
