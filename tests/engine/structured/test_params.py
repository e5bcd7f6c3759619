from typing import Any

import msgspec
import pytest

from mini_infer_engine import StructuredOutputsParams
from mini_infer_engine.structured.grammar import of_choice
from mini_infer_engine.structured.limits import GrammarError
from mini_infer_engine.structured.params import GrammarRequest, of_response_format
from tests.support.grammars import accepts

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


@pytest.mark.parametrize(
    ("fields", "yes", "no"),
    [
        ({"json": SCHEMA}, '{"x": 1}', '{"x": ""}'),
        ({"json": '{"type": "integer"}'}, "1", "x"),
        ({"json": SCHEMA, "disable_any_whitespace": True}, '{"x":1}', '{"x": 1}'),
        ({"json": SCHEMA, "disable_additional_properties": True}, '{"x":1}', '{"x":1,"y":1}'),
        ({"json": SCHEMA, "whitespace_pattern": "_"}, '{_"x":1}', '{ "x":1}'),
        ({"json_object": True}, "{}", "[]"),
        ({"json_object": True, "disable_any_whitespace": True}, "{}", "{ }"),
        ({"regex": "a+"}, "aa", "b"),
        ({"choice": ["a", "b"]}, "b", "c"),
        ({"grammar": 'root ::= "a"'}, "a", "b"),
        ({"structural_tag": '{"format": {"type": "const_string", "value": "a"}}'}, "a", "b"),
        ({"structural_tag": {"format": {"type": "const_string", "value": "a"}}}, "a", "b"),
    ],
)
def test_each_structured_output_parameter_becomes_a_grammar(fields: dict[str, Any], yes: str, no: str) -> None:
    params = msgspec.msgpack.decode(
        msgspec.msgpack.encode(StructuredOutputsParams(**fields)), type=StructuredOutputsParams
    )
    assert accepts(params.to_grammar(), yes)
    assert not accepts(params.to_grammar(), no)


def test_params_are_refused_when_not_exactly_one_kind_is_given() -> None:
    for fields in ({}, {"disable_any_whitespace": True}, {"regex": "a", "choice": ["a"]}):
        with pytest.raises(ValueError, match="json, regex, choice, grammar"):
            StructuredOutputsParams(**fields)


@pytest.mark.parametrize(
    ("fields", "message_part"),
    [
        ({"json": "{"}, "json is no JSON"),
        ({"json": "[1]"}, "json is no schema"),
        ({"json": "[" * 100_000}, "too deeply"),
        ({"structural_tag": "{"}, "structural_tag is no JSON"),
        ({"json_object": False}, "json_object is false"),
    ],
)
def test_the_error_names_the_parameter_when_structured_outputs_are_invalid(
    fields: dict[str, Any], message_part: str
) -> None:
    with pytest.raises(GrammarError, match=message_part):
        StructuredOutputsParams(**fields).to_grammar()


def test_response_formats_become_grammars() -> None:
    def grammar(**fields: Any) -> Any:
        request = of_response_format(fields)
        assert request is not None
        assert request.param == "response_format"
        return request.build({})

    assert of_response_format({"type": "text"}) is None
    assert accepts(grammar(type="json_object"), '{"a": 1}')
    schema = {"name": "x", "schema": SCHEMA, "strict": True}
    assert accepts(grammar(type="json_schema", json_schema=schema), '{"x": 1}')
    assert accepts(grammar(type="json_schema", json_schema={"name": "x", "schema": None}), "[1]")
    tag = {"type": "const_string", "value": "a"}
    assert accepts(grammar(type="structural_tag", format=tag), "a")


def test_the_grammar_applies_after_the_reasoning() -> None:
    request = GrammarRequest("response_format", lambda special: of_choice(["yes"]))
    grammar = request.after_thinking("</think>").build({})
    assert accepts(grammar, "so</think>yes")
    assert not accepts(grammar, "yes")
