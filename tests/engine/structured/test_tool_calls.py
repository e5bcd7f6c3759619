import json
import random

import jsonschema
import msgspec
import pytest

from mini_infer_engine.dry.vocabulary import EOS_TOKEN_IDS, TURN_START_ID
from mini_infer_engine.parsing.base import OutputParsing, Tool
from mini_infer_engine.parsing.registry import TOOL_FORMATS, OutputFormats
from mini_infer_engine.parsing.tool_format import QuotedArguments, TaggedArguments, ToolCallFormat
from mini_infer_engine.structured.grammar import Grammar, of_choice
from mini_infer_engine.structured.limits import GrammarError
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
    if isinstance(style := form.arguments, TaggedArguments):
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
        arguments = "".join(
            f"{style.before_key}{key}{style.after_key}{text}{style.after_value}" for key, text in texts.items()
        )
    if isinstance(form.arguments, QuotedArguments):
        arguments = gemma_members(values, form.arguments.quote)
    if form.arguments == "python":
        arguments = ", ".join(f"{key}={json.dumps(value)}" for key, value in values.items())
    number = ":0" if form.has_number else ""
    return f"{form.before_name}{name}{number}{form.after_name}{arguments}{form.after_arguments}"


def gemma_members(values: dict[str, object], quote: str) -> str:
    return ",".join(f"{key}:{gemma_value(value, quote)}" for key, value in values.items())


def gemma_value(value: object, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + gemma_members(value, quote) + "}"
    if isinstance(value, list):
        return f"[{','.join(gemma_value(item, quote) for item in value)}]"
    return json.dumps(value)


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


@pytest.mark.parametrize("name", ["qwen3_coder", "pythonic", "glm45", "minimax_m2", "functiongemma", "gemma4"])
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


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "glm47", "minimax_m2", "seed_oss"])
def test_tagged_texts_have_no_quotes_when_they_may_be_null_or_have_no_type(name: str) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": ["string", "null"]}, "b": {}, "c": {"enum": ["x", None]}},
        "required": ["a", "b", "c"],
    }
    form, tools = FORMS[name], (Tool("f", schema, strict=True),)
    text = calls(form, call(form, "f", '{"a": "Rome", "b": "5", "c": null}'))
    assert accepts(grammar_of(form, tools=tools, tool_choice="required"), text)
    read = read_pieces([text], OutputFormats(tool_call_parser=name), tools)
    assert json.loads(read.calls[0][1]) == {"a": "Rome", "b": "5", "c": None}


NESTED = {
    "type": "object",
    "properties": {
        "tree": {"$ref": "#/$defs/tree"},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2},
        "sizes": {"type": "object", "additionalProperties": {"type": "integer"}},
        "any": {},
    },
    "required": ["tree"],
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "under": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
            "required": ["name"],
        }
    },
}


@pytest.mark.parametrize("name", ["functiongemma", "gemma4"])
def test_nested_quoted_arguments_match_their_schemas_and_are_parsed(name: str) -> None:
    form, tools = FORMS[name], (Tool("f", NESTED, strict=True),)
    grammar = grammar_of(form, tools=tools, tool_choice="required")
    for valid in (
        {"tree": {"name": "a, {b}:"}},
        {"tree": {"name": "a", "under": [{"name": "b", "under": []}, {"name": "c"}]}, "tags": ["x", "y"]},
        {"tree": {"name": "a"}, "sizes": {"m": 1, "n": 2}, "any": {"x": [True, None, -1.5, "z", {}]}},
    ):
        text = calls(form, call(form, "f", json.dumps(valid)))
        assert accepts(grammar, text), text
        read = read_pieces([text], OutputFormats(tool_call_parser=name), tools)
        assert [json.loads(arguments) for _, arguments in read.calls] == [valid]
    for invalid in (
        {"tree": {"under": []}},
        {"tree": {"name": 1}},
        {"tree": {"name": "a"}, "tags": []},
        {"tree": {"name": "a"}, "tags": ["x", "y", "z"]},
        {"tree": {"name": "a"}, "sizes": {"m": "1"}},
    ):
        assert not accepts(grammar, calls(form, call(form, "f", json.dumps(invalid)))), invalid


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "x+"}}}, "pattern"),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "ref"),
        ({"properties": {"a": {"anyOf": 5}}}, "anyOf"),
        ({"properties": {"a": {"type": "object", "required": 5}}}, "required"),
    ],
)
def test_quoted_arguments_are_refused_when_a_strict_schema_cannot_be_enforced(schema: object, keyword: str) -> None:
    tool = msgspec.convert({"name": "f", "parameters": schema, "strict": True}, Tool)
    with pytest.raises(GrammarError, match=keyword):
        grammar_of(FORMS["gemma4"], tools=(tool,), tool_choice="required")


def test_quoted_strings_end_at_a_special_token_when_the_quote_is_one() -> None:
    special = {'<|"|>': TURN_START_ID}
    parsing = OutputParsing(tools=(WEATHER,), tool_choice="named")
    grammar = calls_or_answer(parsing, FORMS["gemma4"], None).build(special)
    begin, end = [*b"<|tool_call>call:get_weather{city:", TURN_START_ID, *b"Rome"], [*b"}<tool_call|>"]
    assert accepts(grammar, [*begin, TURN_START_ID, *end])
    assert not accepts(grammar, [*begin, *b'<|"|>', *end])


def test_text_ends_at_a_special_token_when_the_tag_is_one() -> None:
    form = TOOL_FORMATS["glm47"].call_format
    special = {"</arg_value>": TURN_START_ID}
    grammar = calls_or_answer(OutputParsing(tools=(WEATHER,), tool_choice="named"), form, None).build(special)
    begin = [*b"<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome"]
    assert accepts(grammar, [*begin, TURN_START_ID, *b"</tool_call>"])
    assert not accepts(grammar, [*begin, *b"</arg_value></tool_call>"])


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
