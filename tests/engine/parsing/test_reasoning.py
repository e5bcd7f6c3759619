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
def test_thinking_is_told_from_the_answer_whatever_pieces_it_comes_in(name: str) -> None:
    prompt_end, text, expected = CASES[name]
    for pieces in [[text], *cuts(text, seed=len(name))]:
        assert read_pieces(pieces, FORMATS, (), prompt_end) == expected, pieces


def test_a_parser_knows_from_the_beginning_whether_it_reads_thinking() -> None:
    parser = FormatParser(FORMATS, OutputParsing(), OPEN)
    assert parser.is_reasoning
    parser.push("Well.</think>")
    assert not parser.is_reasoning


def test_a_message_that_is_continued_may_have_opened_its_thinking() -> None:
    for continued, inside in (("<think>\nWe", True), ("<think>\nWell.\n</think>\n\nYe", False), ("Yes", False)):
        parser = FormatParser(FORMATS, OutputParsing(continued_text=continued), "assistant\n" + continued)
        assert parser.is_reasoning == inside
