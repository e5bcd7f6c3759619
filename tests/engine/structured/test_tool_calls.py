import json
import random

import jsonschema
import msgspec
import pytest

from mini_infer_engine.dry.vocabulary import EOS_TOKEN_IDS, TURN_START_ID
from mini_infer_engine.parsing.base import OutputParsing, Tool
from mini_infer_engine.parsing.registry import TOOL_FORMATS, OutputFormats
from mini_infer_engine.parsing.tool_format import ToolCallFormat
from mini_infer_engine.structured.grammar import Grammar, of_choice
from mini_infer_engine.structured.params import GrammarRequest
from mini_infer_engine.structured.tool_calls import calls_or_answer, restricts
from tests.engine.parsing.support import read_pieces
from tests.support.grammars import accepts, matcher_of

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER, STRICT_ADD = Tool("get_weather", CITY), Tool("add", {"properties": {"a": {"type": "integer"}}}, strict=True)
FORMS = {name: form.call_format for name, form in TOOL_FORMATS.items()}


def call(form: ToolCallFormat, name: str, arguments: str) -> str:
    """The arguments are told as JSON, and written as the format has them."""
    values = json.loads(arguments)
    if form.arguments == "xml":
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
        arguments = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
    if form.arguments == "python":
        arguments = ", ".join(f"{key}={json.dumps(value)}" for key, value in values.items())
    return f"{form.before_name}{name}{form.after_name}{arguments}{form.after_arguments}"


def calls(form: ToolCallFormat, *texts: str) -> str:
    return form.calls_begin + form.separator.join(texts) + form.calls_end


def grammar_of(form: ToolCallFormat, answer: GrammarRequest | None = None, **requested: object) -> Grammar:
    parsing = msgspec.convert({"tools": (WEATHER, STRICT_ADD)} | requested, OutputParsing)
    return calls_or_answer(parsing, form, answer).build({})


@pytest.mark.parametrize("name", FORMS)
class TestEachFormat:
    def test_only_calls_are_allowed_when_tool_choice_is_required(self, name: str) -> None:
        form = FORMS[name]
        rome, add = call(form, "get_weather", '{"city": "Rome"}'), call(form, "add", '{"a": 1}')
        several = grammar_of(form, tool_choice="required")
        for text in (calls(form, rome), calls(form, add, rome)):
            assert accepts(several, text), text
        wrong_city, wrong_name = (
            call(form, "get_weather", '{"town": "Rome"}'),
            call(form, "got_weather", '{"city": "Rome"}'),
        )
        for text in ("", "Let me see.", "so " + calls(form, rome), calls(form, wrong_city), calls(form, wrong_name)):
            assert not accepts(several, text), text
        one = grammar_of(form, tool_choice="required", parallel_tool_calls=False)
        assert accepts(one, calls(form, rome))
        assert not accepts(one, calls(form, rome, rome))

    def test_a_named_tool_is_called_once(self, name: str) -> None:
        form = FORMS[name]
        named = grammar_of(form, tools=(WEATHER,), tool_choice="named")
        rome = call(form, "get_weather", '{"city": "Rome"}')
        assert accepts(named, calls(form, rome))
        assert not accepts(named, calls(form, rome, rome))
        assert not accepts(named, calls(form, call(form, "add", '{"a": 1}')))

    def test_strict_tools_match_their_schema_after_the_trigger(self, name: str) -> None:
        form = FORMS[name]
        grammar = grammar_of(form)
        add, loose = call(form, "add", '{"a": 1}'), call(form, "get_weather", '{"town": "Rome"}')
        for text in ("", "No call.", calls(form, add), f"So: {calls(form, add)}", calls(form, loose, add)):
            assert accepts(grammar, text), text
        assert not accepts(grammar, calls(form, call(form, "add", '{"a": "x"}')))
        # Without a marker, what names no tool is text.
        assert accepts(grammar, calls(form, call(form, "got", "{}"))) == (not form.trigger)

    def test_only_one_call_is_allowed_when_calls_are_not_parallel(self, name: str) -> None:
        form = FORMS[name]
        grammar = grammar_of(form, tools=(WEATHER,), parallel_tool_calls=False)
        rome = calls(form, call(form, "get_weather", '{"city": "Rome"}'))
        for text in ("Nothing.", rome, f"So: {rome}"):
            assert accepts(grammar, text), text
        assert not accepts(grammar, rome + rome)

    def test_a_structured_answer_is_allowed_instead_of_a_call(self, name: str) -> None:
        form = FORMS[name]
        answer = GrammarRequest("response_format", lambda special: of_choice(["yes", "no"]))
        grammar = grammar_of(form, answer)
        rome = calls(form, call(form, "get_weather", '{"city": "Rome"}'))
        assert all(accepts(grammar, text) for text in ("yes", "no", rome))
        assert not any(accepts(grammar, text) for text in ("maybe", f"yes{rome}"))


def test_tools_restrict_nothing_when_they_are_not_strict() -> None:
    assert not restricts(OutputParsing(tools=(WEATHER,)))
    for requested in (
        OutputParsing(tools=(WEATHER,), has_forbidden_tools=True),
        OutputParsing(tools=(WEATHER,), parallel_tool_calls=False),
        OutputParsing(tools=(WEATHER,), tool_choice="named"),
        OutputParsing(tools=(STRICT_ADD,)),
    ):
        assert restricts(requested)


TYPED = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "unit": {"enum": ["c", "f"]},
        "place": {"$ref": "#/$defs/place"},
        "days": {"type": "integer"},
    },
    "required": ["unit"],
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}, "additionalProperties": False}},
}
VALID = (
    {"unit": "c"},
    {"text": "a\nb", "unit": "f"},
    {"unit": "c", "place": {"x": 1.5}, "days": 2},
    {"unit": "c", "days": 3},
)
INVALID = ({}, {"unit": "k"}, {"text": "a"}, {"unit": "c", "days": "x"}, {"unit": "c", "place": {"y": 1}})


@pytest.mark.parametrize("name", ["qwen3_coder", "pythonic"])
def test_separate_properties_match_their_own_schemas(name: str) -> None:
    form = FORMS[name]
    grammar = grammar_of(form, tools=(Tool("f", TYPED, strict=True),), tool_choice="required")
    optional = grammar_of(form, tools=(Tool("f", TYPED | {"required": []}, strict=True),), tool_choice="required")
    for arguments in VALID:
        text = calls(form, call(form, "f", json.dumps(arguments)))
        assert accepts(grammar, text), text
        assert accepts(optional, text), text
    for arguments in INVALID:
        assert not accepts(grammar, calls(form, call(form, "f", json.dumps(arguments)))), arguments
    assert accepts(optional, calls(form, call(form, "f", "{}")))
    assert accepts(optional, calls(form, call(form, "f", '{"text": "x", "days": 1}')))


def test_a_special_token_trigger_cannot_be_spelled_as_text() -> None:
    form = ToolCallFormat(before_name="<|im_start|>", after_name="", after_arguments="!", trigger="<|im_start|>")
    special = {"<|im_start|>": TURN_START_ID}
    grammar = calls_or_answer(OutputParsing(tools=(STRICT_ADD,)), form, None).build(special)
    for tokens in ([*b"So: ", TURN_START_ID, *b'add{"a": 1}!'], [*b"a < b"], [TURN_START_ID, *b"add{}!", *b" done"]):
        assert accepts(grammar, tokens), tokens
    for tokens in ([TURN_START_ID, *b'add{"a": "x"}!'], [*b'<|im_start|>add{"a": "x"}!'], [*b"so <|im_start|>"]):
        assert not accepts(grammar, tokens), tokens


BOUNDED = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["c", "f"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "hours": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "place": {
            "type": ["object", "null"],
            "properties": {"x": {"enum": [1.5, "]}"]}},
            "additionalProperties": False,
        },
    },
    "required": ["days"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("name", FORMS)
def test_every_accepted_output_is_parsed_as_valid_calls(name: str) -> None:
    tools = (Tool("f", BOUNDED, strict=True), Tool("g", BOUNDED, strict=True))
    grammar = grammar_of(FORMS[name], tools=tools, tool_choice="required")
    formats = OutputFormats(tool_call_parser=name)
    chosen = random.Random(name)
    for _ in range(8):
        text = random_text(grammar, chosen)
        read = read_pieces([text], formats, tools)
        assert read.calls, text
        assert read.content == "", text
        for function, arguments in read.calls:
            assert function in ("f", "g")
            jsonschema.validate(json.loads(arguments), BOUNDED)


def random_text(grammar: Grammar, chosen: random.Random) -> str:
    """What a model makes of a grammar that has no idea of its own."""
    matcher, tokens = matcher_of(grammar), list[int]()
    while not matcher.is_stopped():
        allowed = [token for token, bias in enumerate(matcher.compute_logit_bias()) if bias]
        token = chosen.choice(allowed)
        if token in EOS_TOKEN_IDS:
            break
        assert matcher.consume_token(token)
        tokens.append(token)
    return bytes(tokens).decode()
