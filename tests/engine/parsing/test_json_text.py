"""Arguments of calls as clients read them: JSON, whatever the model writes into its strings."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_infer_engine.parsing.json_text import JsonText
from mini_infer_engine.parsing.registry import OutputFormats
from tests.engine.parsing.support import TOOLS, cuts, read_pieces

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def pushed(pieces: list[str]) -> str:
    made = JsonText()
    return "".join(made.push(piece) for piece in pieces) + made.finish()


@given(json_values, st.booleans(), st.randoms())
def test_json_text_is_unchanged_for_any_pieces(value: object, ascii_only: bool, random: object) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=2)
    assert pushed([text]) == text == pushed(list(text))


WRITTEN = [
    ('{"a": "x\ty\nz\r"}', {"a": "x\ty\nz\r"}),
    ('{"a": "\x00\x1f"}', {"a": "\x00\x1f"}),
    (r'{"a": "it\'s"}', {"a": "it's"}),
    (r'{"a": "\d+\s"}', {"a": r"\d+\s"}),
    (r'{"a": "C:\users\x"}', {"a": r"C:\users\x"}),
    ('{"a": "\\\n"}', {"a": "\\\n"}),
    (r'{"a": "\\", "b": "\""}', {"a": "\\", "b": '"'}),
    (r'{"a": "\u00e9\uZZ"}', {"a": "é\\uZZ"}),
    ('{\n\t"a": 1\n}', {"a": 1}),
]


@pytest.mark.parametrize(("written", "value"), WRITTEN)
def test_arguments_are_json_when_a_model_writes_none(written: str, value: object) -> None:
    for pieces in cuts(written, seed=1):
        assert json.loads(pushed(pieces)) == value


@pytest.mark.parametrize(("written", "value"), WRITTEN)
@pytest.mark.parametrize("form", ["hermes", "llama3_json", "mistral", "deepseek_v3"])
def test_calls_of_every_json_format_have_json_arguments(form: str, written: str, value: object) -> None:
    text = {
        "hermes": '<tool_call>{"name": "add", "arguments": %s}</tool_call>',
        "llama3_json": '{"name": "add", "parameters": %s}',
        "mistral": "[TOOL_CALLS]add%s",
        "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
        "```json\n%s\n```<｜tool▁call▁end｜>",
    }[form] % written
    for pieces in ([text], list(text)):
        ((name, arguments),) = read_pieces(pieces, OutputFormats(tool_call_parser=form), TOOLS).calls
        assert (name, json.loads(arguments)) == ("add", value)


@pytest.mark.parametrize("cut", ['{"a": "x', '{"a": "x\\', '{"a": "x\\u12', '{"a": [1, '])
def test_arguments_end_where_the_output_does_when_it_is_cut(cut: str) -> None:
    assert pushed(list(cut)) == cut
