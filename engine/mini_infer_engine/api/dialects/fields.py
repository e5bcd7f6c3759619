"""Bodies of OpenAI's requests as they enter: every standard field is known and either works or is refused by name.

Types are strict: nothing is converted. Ranges are checked in text/validation.py, prompts made in text/tokenizing.py.
"""

from collections.abc import Mapping
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, get_type_hints

import msgspec
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError

from mini_infer_contract.api_errors import ApiError
from mini_infer_engine.api.dialects.base import GenerationSpec, OutputLimit, PromptIds
from mini_infer_engine.api.dialects.beams import EarlyStoppingField, LengthPenalty, beam_spec
from mini_infer_engine.api.dialects.neutral import REASONS, Neutral, is_one_of
from mini_infer_engine.core.request import RepetitionDetectionParams, SamplingParams
from mini_infer_engine.sampling.parameters import PARAMETERS, Parameter, all_out_of_range
from mini_infer_engine.structured.params import (
    GrammarRequest,
    StructuredOutputsParams,
    of_response_format,
    of_structured_outputs,
)
from mini_infer_engine.text.truncation import Truncation, TruncationSide

MAX_CHOICES = 128
"""Of one request: prompts times `n`."""
_MAX_QUOTED = 200
"""Characters of a client's value in an error."""
_MAX_FAULTS = 10
"""Fields that an error names."""
_MAX_FIELDS = 1000
"""Of an object whose fields have names here."""


def _fail_at_first_item(schema: Any) -> None:
    """In a pydantic-core schema, which is made of dicts and lists."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        schema = list(schema.values())
    for inner in schema if isinstance(schema, list | tuple) else ():
        _fail_at_first_item(inner)


def _few_fields(sent: Any, limit: int) -> Any:
    if isinstance(sent, dict) and len(sent) > limit:
        told = {"count": len(sent), "limit": limit}
        raise PydanticCustomError("too_many_fields", "it has {count} fields, and at most {limit} may be sent", told)
    return sent


class Body(BaseModel):
    """A JSON object from a client: types as they are, no field that nobody knows."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, sent: Any) -> Any:
        """A fault of each of a million unknown fields would take seconds to make, in which nobody else is served."""
        return _few_fields(sent, _MAX_FIELDS)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Of a list's items the first that is wrong is named: of a million wrong ones it would take seconds."""
        schema = handler(source)
        _fail_at_first_item(schema)
        return schema


if TYPE_CHECKING:

    class SamplingFields(Body):
        """Those with a name here; all others by `getattr`."""

        max_tokens: int | None = None
        stop: str | list[str] | None = None

else:  # made from the table of sampling parameters: a type checker cannot follow, and need not
    _TYPES = get_type_hints(SamplingParams)

    def _field_type(row: Parameter) -> Any:
        sent = row.request_type or _TYPES[row.name]
        if row.max_items is not None:
            sent = Annotated[sent, BeforeValidator(partial(_few_fields, limit=row.max_items))]
        return sent | None

    SamplingFields = create_model(
        "SamplingFields",
        __base__=Body,
        **{row.name: (_field_type(row), None) for row in PARAMETERS if row.is_in_requests},
    )

_SAMPLING = tuple(row.name for row in PARAMETERS if row.is_in_requests and row.name != "max_tokens")


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
"""With OpenAI's limits. Nothing is done with it here."""


class StreamOptions(Body):
    """What a stream tells beside its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchemaFormat(Body):
    """The `json_schema` of a response format."""

    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Body):
    """What the text of an answer must be; vLLM's structural tags in both their shapes."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


class GenerationFields(SamplingFields):
    """What both kinds of generation share beside sampling. None: the field was not sent."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    user: str | None = None
    metadata: Metadata | None = None
    response_format: ResponseFormat | None = None
    # vLLM's.
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    use_beam_search: bool | None = None
    length_penalty: LengthPenalty | None = None
    early_stopping: EarlyStoppingField | None = None
    request_id: Annotated[str, Field(pattern=r"^[!-~]{1,200}$")] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    truncation_side: TruncationSide | None = None
    kv_transfer_params: dict[str, Any] | None = None
    # Ours.
    resume_token_ids: Annotated[list[int], Field(min_length=1)] | None = None
    return_prompt_token_ids: bool | None = None

    neutral: ClassVar[Neutral] = {}
    """Fields that are accepted at these values only."""

    @classmethod
    def is_neutral(cls, name: str, value: object, body: Mapping[str, Any]) -> bool:
        """Whether a value of such a field asks, in this body, for nothing that is not done."""
        return value is None or is_one_of(value, cls.neutral[name])


BodyType = TypeVar("BodyType", bound=Body)


def parse_fields(body: dict[str, Any], body_type: type[BodyType]) -> BodyType:
    """ApiError: fields are unknown, of the wrong type, or ask for what is not supported; all are named."""
    neutral: Neutral = body_type.neutral if issubclass(body_type, GenerationFields) else {}
    try:
        parsed, faults = body_type.model_validate({k: v for k, v in body.items() if k not in neutral}), []
    except ValidationError as error:
        parsed, faults = None, [_fault(details) for details in error.errors(include_url=False)]
    if issubclass(body_type, GenerationFields):
        faults += _unsupported(body_type, body)
        faults += [(name, "invalid_value", message) for name, message in all_out_of_range(body)]
    if parsed is None or faults:
        param, code, _ = faults[0]
        raise ApiError(400, _joined([message for _, _, message in faults]), param=param or None, code=code)
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
    """What the shared fields ask for. ApiError: it is more than one request may.

    `copies`: choices to be made of each prompt, where it is not `n`.
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
        raise ApiError(400, "prompt_logprobs are not told in a stream: leave out one of them", param="prompt_logprobs")
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
        cache_salt=request.cache_salt or "",
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
        name = f"repetition_detection.{min(unknown)}"
        raise ApiError(400, f"unknown field {name!r}: this server does not know it", param=name, code="unknown_field")
    return RepetitionDetectionParams(**sent)


def _grammar(request: GenerationFields) -> GrammarRequest | None:
    """ApiError: the fields contradict each other or themselves."""
    asked = None if request.response_format is None else _response_format(request.response_format)
    if request.structured_outputs is None:
        return asked
    name = "structured_outputs"
    if asked is not None:
        message = f"response_format and {name} both say what the output must be: send one of them"
        raise ApiError(400, message, param=name, code="invalid_value")
    try:
        return of_structured_outputs(msgspec.convert(request.structured_outputs, StructuredOutputsParams))
    except msgspec.ValidationError as error:
        raise ApiError(400, f"{name}: {error}", param=name, code="invalid_value") from None


def _response_format(asked: ResponseFormat) -> GrammarRequest | None:
    sent: dict[str, Any] = {name: value for name, value in asked if value is not None}
    if asked.json_schema is not None:
        sent["json_schema"] = asked.json_schema.model_dump(by_alias=True)
    wanted = _FORMAT_FIELDS[asked.type]
    if not any({"type", *names} == sent.keys() for names in wanted):
        said = " or ".join(" and ".join(names) for names in wanted)
        found = ", ".join(sorted(sent.keys() - {"type"})) or "none"
        message = f"response_format of type {asked.type} has {said or 'no other field'}, and here is {found}"
        raise ApiError(400, message, param="response_format", code="invalid_value")
    return of_response_format(sent)


_FORMAT_FIELDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "text": ((),),
    "json_object": ((),),
    "json_schema": (("json_schema",),),
    "structural_tag": (("format",), ("structures", "triggers")),
}
"""Fields of each type of response format beside its type."""

_Fault = tuple[str, str, str]
"""Name, code and message of a field."""


def _fault(details: ErrorDetails) -> _Fault:
    parts = [part for part in details["loc"] if not _names_a_type(part)]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")
    if details["type"] == "extra_forbidden":
        return name, "unknown_field", f"unknown field {name!r}: this server does not know it"
    if details["type"] == "missing":
        return name, "missing_field", f"the field {name!r} is missing"
    return name, "invalid_value", f"{name or 'the body'} is {_quoted(details['input'])}: {details['msg']}"


def _by_token_id(bias: dict[str, float]) -> dict[int, float]:
    """JSON's names are strings."""
    wrong = [name for name in bias if not name.isascii() or not name.isdigit()]
    if wrong:
        told = ", ".join(_quoted(name) for name in wrong[:_MAX_FAULTS])
        raise ApiError(400, f"logit_bias has {told}: write token ids", param="logit_bias")
    return {int(name): value for name, value in bias.items()}


def _names_a_type(part: int | str) -> bool:
    """Pydantic puts the member of a union into the location, such as "str" or "list[str]"."""
    return isinstance(part, str) and (part in ("str", "int", "dict") or part.endswith("]"))


def _unsupported(body_type: type["GenerationFields"], body: dict[str, Any]) -> list[_Fault]:
    faults = [
        (name, "unsupported_value", f"{name} = {_quoted(body[name])} is not supported{_because(name)}: leave it out")
        for name in body  # most bodies have a handful of fields, the table has dozens
        if name in body_type.neutral and not body_type.is_neutral(name, body[name], body)
    ]
    if body.get("stream_options") is not None and not body.get("stream"):
        faults.append(("stream_options", "invalid_value", "stream_options is only allowed with stream = true"))
    return faults


def _because(name: str) -> str:
    return f", since {REASONS[name]}" if name in REASONS else ""


def _quoted(value: object) -> str:
    """A client's value, not the whole of what may be megabytes."""
    shown = repr(value) if not isinstance(value, str | bytes | list | dict) else repr(_beginning(value))
    return shown if len(shown) <= _MAX_QUOTED else f"{shown[: _MAX_QUOTED - 3]}..."


def _beginning(value: str | bytes | list[Any] | dict[Any, Any]) -> object:
    """As much of it as can be shown."""
    if isinstance(value, dict):
        return dict(islice(value.items(), _MAX_QUOTED))
    return value[:_MAX_QUOTED]


def _joined(messages: list[str]) -> str:
    """The first of many messages."""
    more = len(messages) - _MAX_FAULTS
    return "; ".join(messages[:_MAX_FAULTS]) + (f"; and {more} more" if more > 0 else "")
