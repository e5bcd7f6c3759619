from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_infer_prompts.call_form import CallForm
from mini_infer_prompts.messages import template_messages, template_tools
from mini_infer_web.api_errors import ApiError
from tests.prompts.conversations import conversations, json_values, quick

USER = {"role": "user", "content": "hi"}


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("hi", "hi"),
        ("", ""),
        ([], ""),
        ([{"type": "text", "text": "a"}], "a"),
        ([{"type": "text", "text": "a"}, "b", {"type": "input_text", "text": "c"}], "a\nb\nc"),
        ([{"type": "refusal", "refusal": "no"}], "no"),
    ],
)
def test_message_content_is_normalised_to_one_form(content: Any, text: str) -> None:
    assert template_messages([{"role": "user", "content": content}]) == [{"role": "user", "content": text}]


def test_templates_with_content_parts_get_parts_except_for_tool_results() -> None:
    messages = [USER, {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "42"}]}]
    assert template_messages(messages, content_parts=True) == [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
    ]


def test_an_assistant_message_of_openais_client_is_accepted_unchanged() -> None:
    echoed = {"role": "assistant", "content": None, "refusal": None, "audio": None, "tool_calls": [call('{"a": 1}')]}
    assert template_messages([echoed]) == [{"role": "assistant", "content": "", "tool_calls": [call({"a": 1})]}]
    plain = {"role": "assistant", "content": "hi", "tool_calls": [], "function_call": None}
    assert template_messages([plain]) == [{"role": "assistant", "content": "hi"}]
    assert echoed["tool_calls"] == [call('{"a": 1}')], "the client's body is not changed"


@pytest.mark.parametrize(
    ("arguments", "value"), [('{"a": 1}', {"a": 1}), ("", {}), (None, {}), ("null", {}), ({"a": 1}, {"a": 1})]
)
def test_tool_arguments_become_objects(arguments: Any, value: Any) -> None:
    [message] = template_messages([{"role": "assistant", "tool_calls": [call(arguments)]}])
    assert message["tool_calls"] == [call(value)]


BROKEN = [
    '{"a": "',
    '{"a": 1',
    "{",
    "not JSON at all",
    "[1, 2]",
    "5",
    '"text"',
    "{'a': 1}",
    '{"a": "\\x"}',
    '{"a": 1}}',
    '{"a": "\\ud800"}',
    '{"a": ' * 5000,
    '{"a": ' * 500 + "1" + "}" * 500,
    '{"a": ' + "9" * 5000 + "}",
]
"""Arguments of calls that models make and clients send back: no JSON, or no object that can be written again."""


@pytest.mark.parametrize("arguments", BROKEN, ids=lambda text: text[:12])
@pytest.mark.parametrize(
    ("calls", "shown"),
    [
        (CallForm(), lambda text: text),
        (CallForm(shows_text=False), lambda text: {"arguments": text}),
        (CallForm(text_arguments=True), lambda text: text),
    ],
    ids=["object", "object only", "text"],
)
def test_history_is_shown_as_text_when_arguments_are_no_object(
    arguments: str, calls: CallForm, shown: Callable[[str], Any]
) -> None:
    [message] = template_messages([{"role": "assistant", "tool_calls": [call(arguments)]}], calls=calls)
    assert message["tool_calls"] == [call(shown(arguments))]


@pytest.mark.parametrize(
    "arguments", ["[" * 3000 + "]" * 3000, '{"a": "' + "]" * 4000 + '", "b": ' + "[" * 3000 + "]" * 3000 + "}"]
)
def test_arguments_are_shown_as_text_when_they_are_nested_too_deep(arguments: str) -> None:
    """Brackets within strings nest nothing, and hide no depth."""
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call(arguments)]}]
    shown = template_messages(messages)[1]["tool_calls"][0]["function"]["arguments"]
    assert arguments in (shown, shown.get("arguments") if isinstance(shown, dict) else None)


def test_arguments_are_an_object_when_a_string_has_many_brackets() -> None:
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call('{"a": "' + "[" * 500 + '"}')]}]
    assert template_messages(messages)[1]["tool_calls"][0]["function"]["arguments"] == {"a": "[" * 500}


def test_raw_control_characters_in_arguments_are_read_when_the_template_wants_an_object() -> None:
    [message] = template_messages([{"role": "assistant", "tool_calls": [call('{"a": "x\ty\nz"}')]}])
    assert message["tool_calls"] == [call({"a": "x\ty\nz"})]


@pytest.mark.parametrize(
    ("arguments", "text"), [('{"a":1}', '{"a":1}'), ({"a": "é"}, '{"a": "é"}'), ("", "{}"), (None, "{}")]
)
def test_arguments_are_text_when_the_template_wants_text(arguments: Any, text: str) -> None:
    [message] = template_messages(
        [{"role": "assistant", "content": "", "tool_calls": [call(arguments)]}], calls=CallForm(True, True)
    )
    assert message == {"role": "assistant", "content": None, "tool_calls": [call(text)]}


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_found_under_both_names(name: str) -> None:
    [message] = template_messages([{"role": "assistant", "content": "b", name: "a"}])
    assert message == {"role": "assistant", "content": "b", "reasoning": "a", "reasoning_content": "a"}


def test_developer_messages_become_a_system_message_when_the_template_lacks_the_role() -> None:
    developer = {"role": "developer", "content": "be brief"}
    messages = [{"role": "system", "content": "be kind"}, USER, developer, {"role": "developer", "content": ""}]
    assert template_messages(messages) == [{"role": "system", "content": "be kind\n\nbe brief"}, USER]
    assert template_messages(messages, developer_role=True) == messages
    assert template_messages([developer], content_parts=True) == [
        {"role": "system", "content": [{"type": "text", "text": "be brief"}]}
    ]
    late = [USER, {"role": "system", "content": "be kind"}]
    assert template_messages(late) == late, "without developer messages the order is the client's"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ("hi", "messages"),
        ([], "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": 1, "content": "hi"}], "messages[0].role"),
        ([{"role": "", "content": "hi"}], "messages[0].role"),
        ([USER, USER, {"role": "user", "content": 5}], "messages[2].content"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": {"text": "hi"}}], "messages[0].content"),
        ([{"role": "user", "content": [7]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": []}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "tool_calls": "f"}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": ["f"]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [{"type": "custom", "function": {}}]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[0].tool_calls[0].function.name"),
        ([{"role": "assistant", "tool_calls": [call(5)]}], "messages[0].tool_calls[0].function.arguments"),
        ([{"role": "assistant", "content": "", "reasoning": 1}], "messages[0].reasoning"),
    ],
)
def test_messages_are_refused_by_name_when_their_types_are_wrong(messages: Any, param: str) -> None:
    with pytest.raises(ApiError) as raised:
        template_messages(messages)
    assert (raised.value.status, raised.value.param) == (400, param)
    assert raised.value.message.startswith(param)


def test_tools() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert template_tools(tools) == tools
    assert template_tools(None) is None
    assert template_tools([]) is None
    for bad, param in (({}, "tools"), ([*tools, "f"], "tools[1]"), ([{"function": {"name": 1}}], "tools[0]")):
        with pytest.raises(ApiError) as raised:
            template_tools(bad)
        assert raised.value.param == param


@quick
@given(conversations)
def test_messages_in_template_form_are_unchanged(messages: list[dict[str, Any]]) -> None:
    for message in template_messages(messages, developer_role=True):
        message.pop("reasoning", None)  # the one field that is added
        assert message in messages


@quick
@given(
    st.lists(st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "reasoning", "name"]), json_values))
    | json_values
)
def test_any_json_as_messages_is_accepted_or_refused(messages: Any) -> None:
    try:
        normal = template_messages(messages)
    except ApiError as error:
        refused = error
    else:
        assert all(isinstance(message["content"], str) for message in normal)
        return
    assert refused.status == 400
    assert refused.param
