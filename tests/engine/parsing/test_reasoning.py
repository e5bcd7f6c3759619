import pytest

from mini_infer_engine.parsing.base import OutputParsing
from mini_infer_engine.parsing.parser import FormatParser
from mini_infer_engine.parsing.registry import OutputFormats
from tests.engine.parsing.support import Read, cuts, read_pieces

FORMATS = OutputFormats(reasoning_parser="qwen3")
OPEN = "<|im_start|>assistant\n<think>\n"
CLOSED = "<|im_start|>assistant\n<think>\n\n</think>\n\n"

CASES = {
    "by the model": ("", "<think>\nWell.\n</think>\n\nYes. ", Read("Yes. ", reasoning="Well.")),
    "by the prompt": (OPEN, "Well.\n\nSo.\n</think>\n\nYes.", Read("Yes.", reasoning="Well.\n\nSo.")),
    "by both": (OPEN, "<think>\nWell.</think>Yes.", Read("Yes.", reasoning="Well.")),
    "nothing": (OPEN, "\n</think>\n\nYes.", Read("Yes.")),
    "not at all": ("", "  Yes: <think> is a tag.", Read("  Yes: <think> is a tag.")),
    "closed by the prompt": (CLOSED, "Yes.</think>", Read("Yes.</think>")),
    "cut within": (OPEN, "Well. </thi", Read(reasoning="Well. </thi")),
    "a user who writes the marker": ("<think><|im_end|>\n<|im_start|>assistant\n", "Yes.", Read("Yes.")),
}


@pytest.mark.parametrize("name", CASES)
def test_reasoning_is_parsed_apart_when_text_comes_in_pieces(name: str) -> None:
    prompt_end, text, expected = CASES[name]
    for pieces in [[text], *cuts(text, seed=len(name))]:
        assert read_pieces(pieces, FORMATS, (), prompt_end) == expected, pieces


GEMMA = {
    "by the model": ("<|turn>model\n", "<|channel>thought\nWell.\n<channel|>Yes.", Read("Yes.", reasoning="Well.")),
    "nothing": ("<|turn>model\n", "<|channel>thought\n<channel|>Yes.", Read("Yes.")),
    "closed by the prompt": ("<|turn>model\n<|channel>thought\n<channel|>", "Yes.", Read("Yes.")),
    "opened by the prompt": (
        "<|turn>model\n<|channel>thought\n",
        "Well.<channel|>Yes.",
        Read("Yes.", reasoning="Well."),
    ),
    "not at all": ("<|turn>model\n", "Yes.", Read("Yes.")),
    "cut in the label": ("<|turn>model\n", "<|channel>thou", Read()),
}


@pytest.mark.parametrize("name", GEMMA)
def test_the_label_of_a_channel_is_no_reasoning_when_text_comes_in_pieces(name: str) -> None:
    prompt_end, text, expected = GEMMA[name]
    for pieces in [[text], *cuts(text, seed=len(name), count=4)]:
        assert read_pieces(pieces, OutputFormats(reasoning_parser="gemma4"), (), prompt_end) == expected, pieces


HERMES_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
CODER_CALL = "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
ROME = ("get_weather", '{"city": "Rome"}')
CALLS_IN_THINKING = {
    "a call": ("hermes", f"I look.\n\n{HERMES_CALL}", Read("", (ROME,), "I look.")),
    "two calls": ("hermes", f"{HERMES_CALL}\n{HERMES_CALL}", Read("", (ROME, ROME))),
    "no line end": ("hermes", "I look." + HERMES_CALL.replace("\n", ""), Read("", (ROME,), "I look.")),
    "a call as Qwen3-Coder writes it": ("qwen3_coder", f"I look.\n{CODER_CALL}", Read("", (ROME,), "I look.")),
    "only a mention": ("hermes", "I write <tool_call> now.</think>Yes.", Read("Yes.", (), "I write <tool_call> now.")),
    "a mention of the other form": (
        "qwen3_coder",
        "Not <tool_call> {}.</think>Yes.",
        Read("Yes.", (), "Not <tool_call> {}."),
    ),
    "cut in the marker": ("hermes", "I look. <tool_c", Read(reasoning="I look. <tool_c")),
    "cut behind it": ("hermes", "I look. <tool_call>\n", Read(reasoning="I look. <tool_call>\n")),
    "a call as Kimi writes it": (
        "kimi_k2",
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Rome"}<|tool_call_end|><|tool_calls_section_end|>',
        Read("", (ROME,), "I look."),
    ),
    "after thinking": ("hermes", f"I look.</think>{HERMES_CALL}", Read("", (ROME,), "I look.")),
}


@pytest.mark.parametrize("name", CALLS_IN_THINKING)
def test_a_tool_call_ends_unfinished_thinking(name: str) -> None:
    """As Qwen's models do now and then; vLLM reads it so, too."""
    calls, text, expected = CALLS_IN_THINKING[name]
    formats = OutputFormats(reasoning_parser="qwen3", tool_call_parser=calls)
    for pieces in [[text], *cuts(text, seed=len(name))]:
        assert read_pieces(pieces, formats, prompt_end=OPEN) == expected, pieces


def test_a_call_within_thinking_is_text_when_there_are_no_tools() -> None:
    formats = OutputFormats(reasoning_parser="qwen3", tool_call_parser="hermes")
    assert read_pieces([HERMES_CALL], formats, (), OPEN) == Read(reasoning=HERMES_CALL)


def test_the_parser_starts_in_reasoning_when_the_prompt_opened_it() -> None:
    parser = FormatParser(FORMATS, OutputParsing(), OPEN)
    assert parser.is_reasoning
    parser.push("Well.</think>")
    assert not parser.is_reasoning


def test_the_parser_starts_in_reasoning_when_a_continued_message_opened_it() -> None:
    for continued, inside in (("<think>\nWe", True), ("<think>\nWell.\n</think>\n\nYe", False), ("Yes", False)):
        parser = FormatParser(FORMATS, OutputParsing(continued_text=continued), "assistant\n" + continued)
        assert parser.is_reasoning == inside
