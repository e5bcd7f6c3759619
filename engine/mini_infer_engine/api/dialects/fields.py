"""Bodies of OpenAI's requests as they enter: every standard field is known and either works or is refused by name.

Types are strict: nothing is converted. Ranges are checked in text/validation.py, prompts made in text/tokenizing.py.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from msgspec import Meta, Struct, field

from mini_infer_apis.dialects.kv_hints import KVHints
from mini_infer_contract.engine_options import KVPolicyName
from mini_infer_contract.launch import MAX_TARGET_MS, TARGET_HEADERS
from mini_infer_engine.api.dialects.base import GenerationSpec, OutputLimit, PromptIds
from mini_infer_engine.api.dialects.beams import EarlyStoppingField, LengthPenalty, beam_spec
from mini_infer_engine.api.dialects.neutral import HINTS, REASONS, Neutral, is_one_of
from mini_infer_engine.core.request import RepetitionDetectionParams
from mini_infer_engine.sampling.parameters import PARAMETERS, all_out_of_range
from mini_infer_engine.structured.params import (
    GrammarRequest,
    StructuredOutputsParams,
    of_response_format,
    of_structured_outputs,
)
from mini_infer_engine.text.truncation import Truncation, TruncationSide
from mini_infer_web.api_errors import ApiError, Fault, refuse_field
from mini_infer_web.body_fields import UnknownFields, quoted, read_body, unknown_field

MAX_CHOICES = 128
"""Most choices of one request: prompts times `n`."""
_MAX_BIASES = 20_000
"""Most entries of one request's logit_bias: each is looked at on its own, between two tokens of other requests."""
_MAX_NAMED = 10
"""Most fields that an error names."""


class Body(Struct, forbid_unknown_fields=True, kw_only=True):
    """A JSON object from a client: types are not converted, and unknown fields are faults."""


class SamplingFields(Body):
    """The sampling parameters of requests; a test compares their names with the table of sampling parameters."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    repetition_detection: Annotated[dict[str, int], Meta(max_length=10)] | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=_MAX_BIASES)] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    kv_policy: KVPolicyName | None = None
    kv_budget: int | None = None


_SAMPLING = tuple(row.name for row in PARAMETERS if row.is_in_requests and row.name != "max_tokens")


Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
"""A client's metadata, with OpenAI's limits. Nothing is done with it here."""


TargetMs = Annotated[float, Meta(gt=0, le=MAX_TARGET_MS)]
"""A latency target in milliseconds."""


class StreamOptions(Body):
    """The parts of a stream beside its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchemaFormat(Body):
    """The `json_schema` of a response format."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = field(default=None, name="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The form that the text of an answer must have; vLLM's structural tags in both their shapes."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


class GenerationFields(SamplingFields, kw_only=True):
    """The fields that both kinds of generation share beside sampling. None means that the field was not sent."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    user: str | None = None
    metadata: Metadata | None = None
    response_format: ResponseFormat | None = None
    # vLLM's.
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    use_beam_search: bool | None = None
    length_penalty: LengthPenalty | None = None
    early_stopping: EarlyStoppingField | None = None
    request_id: Annotated[str, Meta(pattern=r"^[!-~]{1,200}$")] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    truncation_side: TruncationSide | None = None
    kv_transfer_params: dict[str, Any] | None = None
    # Ours.
    kv_hints: KVHints | None = None
    ttft_ms: TargetMs | None = None
    itl_ms: TargetMs | None = None
    deadline_ms: TargetMs | None = None
    resume_token_ids: Annotated[list[int], Meta(min_length=1)] | None = None
    return_prompt_token_ids: bool | None = None

    neutral: ClassVar[Neutral] = {}
    """Fields that are accepted at these values only."""

    @classmethod
    def is_neutral(cls, name: str, value: object, body: Mapping[str, Any]) -> bool:
        """True if a value of such a field requests, in this body, nothing that is not done."""
        return value is None or is_one_of(value, cls.neutral[name])


BodyType = TypeVar("BodyType", bound=Body)


def parse_fields(body: dict[str, Any], body_type: type[BodyType], unknown: UnknownFields | None = None) -> BodyType:
    """Returns the parsed body. Raises an ApiError that names all fields that are unknown, of the wrong type, or not
    supported.
    """
    unknown = unknown or UnknownFields()
    neutral: Neutral = body_type.neutral if issubclass(body_type, GenerationFields) else {}
    parsed, faults = read_body({k: v for k, v in body.items() if k not in neutral}, body_type, unknown)
    if issubclass(body_type, GenerationFields):
        faults += _unsupported(body_type, body, unknown)
        faults += [Fault((name,), (rest,), "invalid_value") for name, rest in all_out_of_range(body)]
    if parsed is None or faults:
        raise ApiError.of_faults(faults)
    return parsed


def common_spec(
    request: GenerationFields,
    *,
    prompt_ids: PromptIds,
    prompt_param: str,
    num_prompts: int,
    needs_text: bool,
    output_limit: OutputLimit,
    num_logprobs: int | None,
    copies: int | None = None,
) -> GenerationSpec:
    """Returns the spec of the shared fields. Raises ApiError if it is more than one request may have.

    `copies`: choices to be made of each prompt, if it is not `n`.
    """
    copies = request.n or 1 if copies is None else copies
    if num_prompts * copies > MAX_CHOICES:
        message = f"{num_prompts} prompts with n = {copies} are more than {MAX_CHOICES} choices: send several requests"
        raise ApiError(400, message, param="n" if copies > 1 else prompt_param)
    options = request.stream_options or StreamOptions()
    if request.resume_token_ids and (num_prompts * copies > 1 or not request.stream):
        raise ApiError(400, "resume_token_ids goes on with a stream of one choice", param="resume_token_ids")
    sampling = {name: value for name in _SAMPLING if (value := getattr(request, name)) is not None}
    if isinstance(request.stop, str):
        sampling["stop"] = [request.stop]
    if "logit_bias" in sampling:
        sampling["logit_bias"] = _by_token_id(sampling["logit_bias"])
    if num_logprobs is not None:
        sampling["logprobs"] = num_logprobs
    if "repetition_detection" in sampling:
        sampling["repetition_detection"] = _repetition_detection(sampling["repetition_detection"])
    if request.stream and sampling.get("prompt_logprobs") is not None:
        raise ApiError(400, "prompt_logprobs are not part of a stream: leave out one of them", param="prompt_logprobs")
    beams = beam_spec(
        request.use_beam_search,
        request.length_penalty,
        request.early_stopping,
        streams=bool(request.stream),
        sampling=sampling,
    )
    return GenerationSpec(
        beams=beams,
        model=request.model,
        prompt_ids=prompt_ids,
        prompt_param=prompt_param,
        num_prompts=num_prompts,
        copies=copies,
        needs_text=needs_text,
        sampling=sampling,
        output_limit=output_limit,
        grammar=_grammar(request),
        priority=request.priority or 0,
        target_fields={name: value for name in TARGET_HEADERS if (value := getattr(request, name)) is not None},
        cache_salt=request.cache_salt or "",
        kv_hints=request.kv_hints,
        streams=bool(request.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
        return_token_ids=bool(request.return_token_ids),
        return_prompt_token_ids=bool(request.return_token_ids) and request.return_prompt_token_ids is not False,
        obfuscates=bool(options.include_obfuscation),
        request_id=request.request_id,
        truncation=_truncation(request),
        tokens_as_ids=bool(request.return_tokens_as_token_ids),
        resume_token_ids=request.resume_token_ids or (),
        kv_transfer_params=request.kv_transfer_params,
    )


def _truncation(request: GenerationFields) -> Truncation | None:
    if request.truncate_prompt_tokens is None:
        return None
    return Truncation(request.truncate_prompt_tokens, request.truncation_side or "left")


def _repetition_detection(sent: dict[str, int]) -> RepetitionDetectionParams:
    unknown = sent.keys() - set(RepetitionDetectionParams.__struct_fields__)
    if unknown:
        raise ApiError.of_faults([unknown_field(("repetition_detection", min(unknown)))])
    return RepetitionDetectionParams(**sent)


def _grammar(request: GenerationFields) -> GrammarRequest | None:
    """Returns the grammar that the fields request. Raises ApiError if they contradict each other or themselves."""
    requested = None if request.response_format is None else _response_format(request.response_format)
    if request.structured_outputs is None:
        return requested
    name = "structured_outputs"
    if requested is not None:
        problem = (" and ", ("response_format",), " both say what the output must be: send one of them")
        raise ApiError.of_faults([Fault((name,), problem, "invalid_value")])
    params, faults = read_body(request.structured_outputs, StructuredOutputsParams)
    if params is None:
        raise ApiError.of_faults([_within(name, fault) for fault in faults])
    return of_structured_outputs(params)


def _within(name: str, fault: Fault) -> Fault:
    """Returns the fault of a part of the field `name`; a fault of the field's own check names it already."""
    rest = fault.rest if fault.path else tuple(str(part).removeprefix(name) for part in fault.rest)
    return Fault((name, *fault.path), rest, fault.code)


def _response_format(requested: ResponseFormat) -> GrammarRequest | None:
    sent = {name: value for name in requested.__struct_fields__ if (value := getattr(requested, name)) is not None}
    if (form := requested.json_schema) is not None:
        sent["json_schema"] = {"name": form.name, "schema": form.schema_, "strict": form.strict}
    allowed = _FORMAT_FIELDS[requested.type]
    if not any({"type", *names} == sent.keys() for names in allowed):
        listed = " or ".join(" and ".join(names) for names in allowed)
        found = ", ".join(sorted(sent.keys() - {"type"})) or "none"
        problem = f"of type {requested.type} has {listed or 'no other field'}, and here is {found}"
        refuse_field("response_format", problem, code="invalid_value")
    return of_response_format(sent)


_FORMAT_FIELDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "text": ((),),
    "json_object": ((),),
    "json_schema": (("json_schema",),),
    "structural_tag": (("format",), ("structures", "triggers")),
}
"""Fields of each type of response format beside its type."""


def _by_token_id(bias: dict[str, float]) -> dict[int, float]:
    """Converts the names of JSON's object, which are strings, to token ids."""
    wrong = [name for name in bias if not name.isascii() or not name.isdigit()]
    if wrong:
        refuse_field("logit_bias", f"has {', '.join(quoted(name) for name in wrong[:_MAX_NAMED])}: write token ids")
    return {int(name): value for name, value in bias.items()}


def _unsupported(body_type: type[GenerationFields], body: dict[str, Any], unknown: UnknownFields) -> list[Fault]:
    """Returns faults for the fields of `body` that request something unsupported; hints are ignored if unknown fields
    are.
    """
    faults = []
    for name in body:  # most bodies have a handful of fields, the table has dozens
        if name not in body_type.neutral or body_type.is_neutral(name, body[name], body):
            continue
        if unknown.are_ignored and name in HINTS:
            unknown.ignored.append((name,))
            continue
        problem = f" = {quoted(body[name])} is not supported{_because(name)}: leave it out"
        faults.append(Fault((name,), (problem,), "unsupported_value"))
    if body.get("stream_options") is not None and not body.get("stream"):
        faults.append(Fault(("stream_options",), (" is only allowed with stream = true",), "invalid_value"))
    return faults


def _because(name: str) -> str:
    return f", since {REASONS[name]}" if name in REASONS else ""
