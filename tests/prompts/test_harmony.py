"""Conversations under a template in harmony: what clients send is shown, whatever the template reads."""

import re
from typing import Any

import pytest

from mini_infer_prompts.call_form import CallForm
from mini_infer_prompts.chat_template import ChatTemplate
from mini_infer_prompts.harmony import harmony_messages, is_harmony
from mini_infer_prompts.harmony_template import HARMONY_TEMPLATE, built_in_templates
from mini_infer_prompts.prompt import ChatTemplates, PromptAssets, PromptEncoder, chat_prompt_text
from mini_infer_web.api_errors import ApiError
from tests.prompts.templates import HARMONY, STYLES, WITH_CALLS
from tests.support.harmony_tokens import harmony_files

ENCODER = ChatTemplates({"default": HARMONY}, {})
USER = {"role": "user", "content": "How is it?"}
ANSWER = {"role": "assistant", "content": "Sunny."}


def call(city: str, call_id: str) -> dict[str, Any]:
    function = {"name": f"weather_of_{city}", "arguments": f'{{"city": "{city}"}}'}
    return {"id": call_id, "type": "function", "function": function}


def result(text: str, call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def shown(*messages: dict[str, Any], **fields: Any) -> str:
    """Returns the prompt behind the system message, without line ends in front of `<|start|>`."""
    text = chat_prompt_text(ENCODER, {"messages": list(messages), **fields}).text
    return text.partition("<|end|>")[2]


def called(city: str) -> str:
    name = f"weather_of_{city}"
    return (
        f'<|start|>assistant to=functions.{name}<|channel|>commentary json<|message|>{{"city": "{city}"}}<|call|>'
        f'<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>"in {city}"<|end|>'
    )


ASKED = "<|start|>user<|message|>How is it?<|end|>"
OPEN = "<|start|>assistant"
THOUGHT = "<|start|>assistant<|channel|>analysis<|message|>"
SAID = "<|start|>assistant<|channel|>final<|message|>Sunny.<|end|>"
TWO = {"role": "assistant", "content": None, "tool_calls": [call("Rome", "a"), call("Oslo", "b")]}


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_is_shown_before_a_call_when_no_answer_has_followed(name: str) -> None:
    turn = {"role": "assistant", "content": None, "tool_calls": [call("Rome", "a")], name: "I look."}
    history = f"{ASKED}{THOUGHT}I look.<|end|>{called('Rome')}"
    assert shown(USER, turn, result("in Rome", "a")) == history + OPEN
    without = f"{ASKED}{called('Rome')}{SAID}{ASKED}{OPEN}"
    assert shown(USER, turn, result("in Rome", "a"), ANSWER | {name: "Done."}, USER) == without


def test_text_beside_a_call_is_shown_with_and_without_reasoning() -> None:
    turn = {"role": "assistant", "content": "A moment.", "tool_calls": [call("Rome", "a")]}
    assert f"{THOUGHT}A moment.<|end|>" in shown(USER, turn, result("in Rome", "a"))
    both = turn | {"reasoning": "I look."}
    assert f"{THOUGHT}I look.\nA moment.<|end|>{called('Rome')}" in shown(USER, both, result("in Rome", "a"))


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_results_follow_their_calls_when_a_message_has_several(order: tuple[str, str]) -> None:
    cities = {"a": "Rome", "b": "Oslo"}
    results = [result(f"in {cities[call_id]}", call_id) for call_id in order]
    assert shown(USER, TWO | {"reasoning": "Two."}, *results, ANSWER, USER) == (
        f"{ASKED}{called('Rome')}{called('Oslo')}{SAID}{ASKED}{OPEN}"
    )
    expected = f"{ASKED}{THOUGHT}Two.<|end|>{called('Rome')}{called('Oslo')}{OPEN}"
    assert shown(USER, TWO | {"reasoning": "Two."}, *results) == expected


def test_no_call_and_no_result_is_lost_when_their_ids_do_not_match() -> None:
    turns = harmony_messages([USER, TWO | {"content": ""}, result("x", "c"), result("in Oslo", "b"), USER])
    kinds = [message.get("tool_call_id") or [one["id"] for one in message.get("tool_calls", ())] for message in turns]
    assert kinds == [[], ["a"], ["b"], "b", "c", []]


def test_instructions_are_one_message_at_the_front() -> None:
    developer, system = {"role": "developer", "content": "Be brief."}, {"role": "system", "content": "Be kind."}
    assert shown(system, USER).startswith("<|start|>developer<|message|># Instructions\n\nBe kind.<|end|>")
    for messages in ([system, developer, USER], [system, USER, developer]):
        assert shown(*messages) == (
            f"<|start|>developer<|message|># Instructions\n\nBe kind.\n\nBe brief.<|end|>{ASKED}{OPEN}"
        )


def test_an_answer_is_continued_within_its_channel() -> None:
    options = {"add_generation_prompt": False, "continue_final_message": True}
    text = shown(USER, ANSWER | {"reasoning": "Look."}, **options)
    assert text == f"{ASKED}{THOUGHT}Look.<|end|>{SAID.removesuffix('<|end|>')}"


@pytest.mark.parametrize(
    ("effort", "level"),
    [(None, "medium"), ("low", "low"), ("medium", "medium"), ("high", "high"), ("minimal", "low"), ("max", "high"),
     ("xhigh", "high")],
)  # fmt: skip
def test_the_effort_reaches_the_system_message(effort: str | None, level: str) -> None:
    text = chat_prompt_text(ENCODER, {"messages": [USER], "reasoning_effort": effort}).text
    assert re.findall("Reasoning: (.*)", text) == [level]


def test_effort_none_is_refused_by_name_and_other_models_take_it() -> None:
    with pytest.raises(ApiError) as refused:
        chat_prompt_text(ENCODER, {"messages": [USER], "reasoning_effort": "none"})
    assert (refused.value.status, refused.value.param) == (400, "reasoning_effort")
    other = ChatTemplates({"default": STYLES["qwen_thinking"]}, {})
    assert chat_prompt_text(other, {"messages": [USER], "reasoning_effort": "none"}).text


def test_only_templates_in_harmony_are_taken_for_such() -> None:
    assert is_harmony(HARMONY)
    assert not any(is_harmony(source) for source in (STYLES | WITH_CALLS).values())
    assert ChatTemplate(HARMONY).call_form == CallForm()


WEATHER = {
    "type": "object",
    "properties": {
        "location": {"type": "string", "description": "The city and state, e.g. San Francisco, CA"},
        "format": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
        "days": {"type": "integer", "default": 3},
        "hours": {"type": "array", "items": {"type": "number"}, "nullable": True},
        "where": {
            "type": "object",
            "properties": {"x": {"type": ["integer", "null"]}, "y": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
            "required": ["x"],
        },
    },
    "required": ["location"],
}
LOCATION = {"type": "function", "function": {"name": "get_location", "description": "Gets the location of the user."}}
CURRENT = {
    "type": "function",
    "function": {"name": "get_current_weather", "description": "Gets\nthe weather.", "parameters": WEATHER},
}
BUILT_IN = """<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.
Knowledge cutoff: 2024-06
Current date: DATE

Reasoning: high

# Valid channels: analysis, commentary, final. Channel must be included for every message.
Calls to these tools must go to the commentary channel: 'functions'.<|end|><|start|>developer<|message|># Instructions

Use a friendly tone.

# Tools

## functions

namespace functions {

// Gets the location of the user.
type get_location = () => any;

// Gets
// the weather.
type get_current_weather = (_: {
// The city and state, e.g. San Francisco, CA
location: string,
format?: "celsius" | "fahrenheit", // default: celsius
days?: number, // default: 3
hours?: number[] | null,
where?: {
    x: number | null,
    y?: string | null,
    },
}) => any;

} // namespace functions<|end|><|start|>user<|message|>How is it?<|end|><|start|>assistant"""


def built_in(*messages: dict[str, Any], **fields: Any) -> str:
    encoder = ChatTemplates({"default": HARMONY_TEMPLATE}, {})
    text = chat_prompt_text(encoder, {"messages": list(messages), **fields}).text
    return re.sub(r"Current date: [0-9]{4}-[0-9]{2}-[0-9]{2}", "Current date: DATE", text)


def test_the_built_in_template_shows_tools_as_the_format_describes_them() -> None:
    """The text is that of docs/format.md in openai/harmony, with more kinds of parameters."""
    friendly = {"role": "system", "content": "Use a friendly tone."}
    assert built_in(friendly, USER, tools=[LOCATION, CURRENT], reasoning_effort="high") == BUILT_IN


def test_the_built_in_template_shows_turns_in_their_channels() -> None:
    turn = {"role": "assistant", "content": None, "tool_calls": [call("Rome", "a")], "reasoning": "I look."}
    looked = (
        "<|start|>assistant<|channel|>commentary to=functions.weather_of_Rome <|constrain|>json<|message|>"
        '{"city": "Rome"}<|call|>'
        "<|start|>functions.weather_of_Rome to=assistant<|channel|>commentary<|message|>sunny<|end|>"
    )
    text = built_in(USER, turn, result("sunny", "a")).partition("<|end|>")[2]
    assert text == f"{ASKED}{THOUGHT}I look.<|end|>{looked}{OPEN}"
    text = built_in(USER, turn, result("sunny", "a"), ANSWER | {"reasoning": "Done."}, USER).partition("<|end|>")[2]
    assert text == f"{ASKED}{looked}{SAID}{ASKED}{OPEN}"
    preamble = built_in(USER, turn | {"content": "A moment.", "reasoning": None}, result("sunny", "a"))
    assert f"{ASKED}<|start|>assistant<|channel|>commentary<|message|>A moment.<|end|>{looked}" in preamble
    options = {"add_generation_prompt": False, "continue_final_message": True}
    continued = built_in(USER, ANSWER | {"reasoning": "Look."}, **options)
    assert continued.endswith(f"{ASKED}{THOUGHT}Look.<|end|>{SAID.removesuffix('<|end|>')}")


def test_the_built_in_template_is_used_when_a_folder_of_gpt_oss_has_none() -> None:
    files, config = harmony_files().files, '{"model_type": "gpt_oss"}'
    encoder = PromptEncoder(PromptAssets.from_files(files | {"config.json": config}))
    assert encoder.template_sources == {"default": HARMONY_TEMPLATE}
    with_own = PromptEncoder(PromptAssets.from_files(harmony_files("own").files | {"config.json": config}))
    assert with_own.template_sources == {"default": "own"}
    for other in ('{"model_type": "llama"}', "[]", "{"):
        assert built_in_templates({"config.json": other}) == {}
