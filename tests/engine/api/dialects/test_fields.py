import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import completion_create_params as chat_params
from openai.types.completion_create_params import CompletionCreateParamsBase

from mini_infer_engine.api.dialects.base import Dialect
from mini_infer_engine.api.dialects.fields import GenerationFields, parse_fields
from mini_infer_engine.api.dialects.openai.chat import ChatDialect, ChatRequest
from mini_infer_engine.api.dialects.openai.completions import CompletionDialect, CompletionRequest
from mini_infer_engine.api.generate import sampling_params
from mini_infer_engine.config.model.generation_defaults import GenerationDefaults
from mini_infer_engine.core.request import SamplingParams
from mini_infer_web.api_errors import ApiError

MESSAGES = [{"role": "user", "content": "x"}]


def refusal(body: dict[str, Any], chat: bool = True) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_fields(body, ChatRequest if chat else CompletionRequest)
    assert caught.value.status == 400
    return caught.value


def test_every_field_of_openais_schema_is_known() -> None:
    chat = set(chat_params.CompletionCreateParamsBase.__annotations__) | {"stream"}
    assert chat <= {*ChatRequest.__struct_fields__, *ChatRequest.neutral}
    completion = set(CompletionCreateParamsBase.__annotations__) | {"stream"}
    assert completion <= {*CompletionRequest.__struct_fields__, *CompletionRequest.neutral}


VLLM = json.loads((Path(__file__).parent / "vllm_fields.json").read_text())
"""Made from vLLM's sources by scripts/vllm_request_fields.py."""
VLLM_REQUESTS = [
    pytest.param(ChatRequest, VLLM["chat"], {"messages": MESSAGES}, id="chat"),
    pytest.param(CompletionRequest, VLLM["completion"], {"prompt": "x"}, id="completion"),
]
NEWER = {
    "return_mm_kwargs": True,
    "routed_experts_prompt_start": 0,
    "session_id": None,
    "stream_interval": 1,
    "watermarking": None,
}
"""Of later versions than the list's."""


@pytest.mark.parametrize(("kind", "fields", "required"), VLLM_REQUESTS)
def test_vllms_default_and_null_are_accepted_for_each_of_its_fields(
    kind: type[GenerationFields], fields: dict[str, Any], required: dict[str, Any]
) -> None:
    defaults = {name: value for name, value in fields.items() if not str(value).startswith("made by")}
    assert len(defaults) > 40
    parse_fields(defaults | NEWER | required, kind)
    parse_fields(dict.fromkeys([*fields, *NEWER]) | required, kind)


@pytest.mark.parametrize(("kind", "fields", "required"), VLLM_REQUESTS)
def test_every_field_of_vllm_works_or_is_refused_by_name(
    kind: type[GenerationFields], fields: dict[str, Any], required: dict[str, Any]
) -> None:
    assert set(fields) <= {*kind.__struct_fields__, *kind.neutral}
    for name in fields.keys() & kind.neutral.keys():
        error = refusal(required | {name: {"asks": "for something"}}, kind is ChatRequest)
        assert (error.param, error.code) == (name, "unsupported_value")


@pytest.mark.parametrize(
    "metadata",
    [{f"key{number}": "x" for number in range(17)}, {"k" * 65: "x"}, {"key": "x" * 513}],
    ids=["pairs", "name", "value"],
)
def test_metadata_is_refused_when_it_exceeds_openais_limits(metadata: dict[str, str]) -> None:
    parse_fields({"messages": MESSAGES, "metadata": {"k" * 64: "x" * 512}}, ChatRequest)
    error = refusal({"messages": MESSAGES, "metadata": metadata})
    assert (error.param or "").startswith("metadata")


def test_service_tier_sets_the_priority_when_none_is_given() -> None:
    def requested(**fields: Any) -> tuple[int, str | None]:
        spec = ChatDialect().parse({"messages": MESSAGES} | fields)
        return spec.priority, spec.service_tier

    assert requested() == (0, None)
    assert requested(service_tier="auto") == (0, "default")
    assert requested(service_tier="flex") == (1, "flex")
    assert requested(service_tier="priority") == (-1, "priority")
    assert requested(service_tier="flex", priority=-5) == (-5, "flex")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"best_of": 2, "n": 3}, "is less than n"),
        ({"best_of": 3, "stream": True}, "leave out stream"),
        ({"best_of": 3, "use_beam_search": True}, "use_beam_search"),
    ],
)
def test_best_of_is_refused_when_it_conflicts_with_another_field(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ApiError, match=why) as caught:
        CompletionDialect().parse({"prompt": "x"} | fields)
    assert caught.value.param == "best_of"


def test_logprobs_and_logit_bias_become_sampling_parameters() -> None:
    chosen = sampling(GenerationDefaults(), logprobs=True, top_logprobs=3, logit_bias={"5": -1.5}, bad_words=["x"])
    assert (chosen.logprobs, chosen.logit_bias, chosen.bad_words) == (3, {5: -1.5}, ["x"])
    assert sampling(GenerationDefaults(), logprobs=True).logprobs == 0
    assert sampling(GenerationDefaults(), logprobs=False, top_logprobs=0).logprobs is None
    spec = CompletionDialect().parse({"prompt": "x", "logprobs": 2, "echo": True, "max_tokens": 0})
    assert (spec.sampling["logprobs"], spec.sampling["prompt_logprobs"]) == (2, 2)
    assert (spec.output_limit.max_tokens, spec.echo_alone) == (1, True)
    for fields, param in (
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ):
        with pytest.raises(ApiError) as caught:
            sampling(GenerationDefaults(), **fields)
        assert caught.value.param == param


def test_all_invalid_fields_are_named_and_their_values_truncated() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x" * 5000, "strict": "y" * 5000}}
    error = refusal(
        {"messages": MESSAGES, "response_format": schema, "nonsense": 1, "temperature": "y" * 5000, "top_p": 9}
    )
    assert error.param in ("response_format.json_schema.strict", "nonsense", "temperature")
    for name in ("response_format", "nonsense", "temperature", "top_p is 9; it must be above 0 and at most 1"):
        assert name in error.message
    assert len(error.message) < 1000
    many = refusal({"messages": MESSAGES} | {f"field{number}": 1 for number in range(50)})
    assert "and 40 more" in many.message
    assert len(many.message) < 2000


def test_reasoning_effort_is_refused_when_it_is_unknown() -> None:
    parse_fields({"messages": MESSAGES, "reasoning_effort": "low"}, ChatRequest)
    assert refusal({"messages": MESSAGES, "reasoning_effort": "banana"}).param == "reasoning_effort"


NEUTRAL: list[tuple[str, object, object]] = [
    ("store", False, True),
    ("modalities", ["text"], ["text", "audio"]),
    ("function_call", "none", {"name": "f"}),
    ("functions", [], [{"name": "f"}]),
    ("audio", None, {"voice": "x"}),
    ("prediction", None, {"type": "content", "content": "x"}),
    ("web_search_options", None, {}),
    ("verbosity", "medium", "high"),
]


@pytest.mark.parametrize(("name", "neutral", "other"), NEUTRAL)
def test_an_unsupported_field_is_accepted_only_at_its_neutral_value(name: str, neutral: object, other: object) -> None:
    for harmless in (neutral, None):
        parse_fields({"messages": MESSAGES, name: harmless}, ChatRequest)
    error = refusal({"messages": MESSAGES, name: other})
    assert (error.param, error.code) == (name, "unsupported_value")


@pytest.mark.parametrize(("name", "value"), [("suffix", "x"), ("prompt_embeds", "x")])
def test_completions_refuse_unsupported_fields_by_name(name: str, value: object) -> None:
    assert refusal({"prompt": "x", name: value}, chat=False).param == name


WRONG: list[tuple[str, object, str]] = [
    ("temperature", "hot", "temperature"),
    ("temperature", True, "temperature"),
    ("max_tokens", 1.5, "max_tokens"),
    ("stream", "yes", "stream"),
    ("stream", 1, "stream"),
    ("stop", [1], "stop[0]"),
    ("stop", 5, "stop"),
    ("n", 0, "n"),
    ("n", 1000, "n"),
    ("messages", "hi", "messages"),
    ("messages", ["hi"], "messages[0]"),
    ("stream_options", {"include": True}, "stream_options.include"),
    ("metadata", {"a": 1}, "metadata.a"),
    ("tools", {}, "tools"),
    ("seed", 2.5, "seed"),
    ("nonsense", None, "nonsense"),
]


@pytest.mark.parametrize(("name", "value", "param"), WRONG)
def test_the_error_names_a_field_when_it_is_unknown_or_of_wrong_type(name: str, value: object, param: str) -> None:
    error = refusal({"messages": MESSAGES, name: value})
    assert error.param == param
    assert param in error.message


def sampling(defaults: GenerationDefaults, **fields: Any) -> SamplingParams:
    return sampling_params(ChatDialect().parse({"messages": MESSAGES} | fields), defaults)


def test_sampling_defaults_come_from_request_then_model_then_openai() -> None:
    defaults = GenerationDefaults(temperature=0.6, top_k=20, repetition_penalty=1.05)
    assert sampling(GenerationDefaults()).temperature == 1
    chosen = sampling(defaults)
    assert (chosen.temperature, chosen.top_k, chosen.top_p, chosen.max_tokens) == (0.6, 20, 1, None)
    assert (chosen.repetition_penalty, chosen.presence_penalty, chosen.frequency_penalty) == (1.05, 0, 0)
    assert sampling(replace(defaults, max_tokens=7)).max_tokens == 7
    assert sampling(replace(defaults, max_tokens=7), max_tokens=9).max_tokens == 9
    assert sampling(replace(defaults, max_tokens=7, is_limit=True), max_tokens=9).max_tokens == 7
    chosen = sampling(defaults, temperature=0, top_k=0, stop="x", max_tokens=5)
    assert (chosen.temperature, chosen.top_k, chosen.stop, chosen.max_tokens) == (0, 0, ["x"], 5)
    chosen = sampling(defaults, repetition_penalty=1.0, presence_penalty=-1, frequency_penalty=0.5)
    assert (chosen.repetition_penalty, chosen.presence_penalty, chosen.frequency_penalty) == (1.0, -1, 0.5)


def test_output_limits_by_dialect_and_field() -> None:
    def limit(dialect: Dialect, **body: Any) -> tuple[str, int | None, bool]:
        found = dialect.parse(body).output_limit
        return found.param, found.max_tokens, found.is_requested

    chat, completions = ChatDialect(), CompletionDialect()
    both = limit(chat, messages=MESSAGES, max_tokens=3, max_completion_tokens=4)
    assert both == ("max_completion_tokens", 4, True)
    assert limit(chat, messages=MESSAGES) == ("max_tokens", None, False)
    assert limit(completions, prompt="x") == ("max_tokens", 16, False)
    assert limit(completions, prompt="x", max_tokens=3) == ("max_tokens", 3, True)


STRUCTURED: list[tuple[dict[str, Any], str | None]] = [
    ({}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}}, "response_format"),
    ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format"),
    ({"response_format": {"type": "structural_tag", "structures": [], "triggers": []}}, "response_format"),
    ({"structured_outputs": {"regex": "a+"}}, "structured_outputs"),
    ({"structured_outputs": {"json": "{}", "whitespace_pattern": None}}, "structured_outputs"),
    ({"structured_outputs": {"choice": ["a"]}, "response_format": {"type": "text"}}, "structured_outputs"),
]


@pytest.mark.parametrize("dialect", [ChatDialect(), CompletionDialect()])
@pytest.mark.parametrize(("fields", "param"), STRUCTURED)
def test_the_grammar_names_its_parameter_when_one_of_two_fields_states_it(
    dialect: Any, fields: dict[str, Any], param: str | None
) -> None:
    spec = dialect.parse(
        {"messages": MESSAGES} | fields if isinstance(dialect, ChatDialect) else {"prompt": "x"} | fields
    )
    assert (None if spec.grammar is None else spec.grammar.param) == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "x"}}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
        ),
        ({"response_format": {"type": "structural_tag", "structures": []}}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex"),
        ({"structured_outputs": {"backend": "x", "regex": "a"}}, "structured_outputs.backend"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ],
)
def test_structured_output_is_refused_when_its_fields_conflict(fields: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        ChatDialect().parse({"messages": MESSAGES} | fields)
    assert (caught.value.status, caught.value.param) == (400, param)
