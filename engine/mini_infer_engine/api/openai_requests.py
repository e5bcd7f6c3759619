"""The bodies of OpenAI's requests as they enter: every standard field is known and either works or is refused by name.

Types are strict: nothing is converted. Ranges are checked in limits.py, prompts are made in contract.prompt.
"""

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mini_infer_contract.api_errors import ApiError
from mini_infer_engine.config.model_config import GenerationDefaults
from mini_infer_engine.core.request import SamplingParams
from mini_infer_engine.text.validation import ParameterError

MAX_CHOICES = 128
"""Of one request: prompts times `n`."""
COMPLETION_MAX_TOKENS = 16
"""OpenAI's default of /v1/completions."""


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class StreamOptions(_Body):
    """What a stream tells beside its text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _GenerationRequest(_Body):
    """What both kinds of generation share. None: the field was not sent."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    # Known, and refused unless it asks for what is done anyway (see neutral_only).
    logit_bias: dict[str, float] | None = None
    # vLLM's.
    repetition_penalty: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: str | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None

    def neutral_only(self) -> dict[str, Callable[[Any], bool]]:
        """Field name to whether a value asks for nothing that is not done."""
        return {"logit_bias": lambda value: not value}

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that has the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self, defaults: GenerationDefaults, max_tokens: int | None) -> SamplingParams:
        """The request's values, else the model's defaults, else OpenAI's."""
        chosen = {
            "temperature": _first(self.temperature, defaults.temperature, 1.0),
            "top_p": _first(self.top_p, defaults.top_p, 1.0),
            "top_k": _first(self.top_k, defaults.top_k, 0),
            "min_p": _first(self.min_p, defaults.min_p, 0.0),
            "min_tokens": _first(self.min_tokens, 0),
            "repetition_penalty": _first(self.repetition_penalty, defaults.repetition_penalty, 1.0),
            "presence_penalty": _first(self.presence_penalty, 0.0),
            "frequency_penalty": _first(self.frequency_penalty, 0.0),
        }
        return SamplingParams(
            **chosen,
            seed=self.seed,
            max_tokens=max_tokens,
            stop=[self.stop] if isinstance(self.stop, str) else self.stop or [],
            stop_token_ids=self.stop_token_ids or [],
            ignore_eos=bool(self.ignore_eos),
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            skip_special_tokens=_first(self.skip_special_tokens, True),
        )


class ChatRequest(_GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    audio: dict[str, Any] | None = None
    modalities: list[str] | None = None
    prediction: dict[str, Any] | None = None
    verbosity: str | None = None
    web_search_options: dict[str, Any] | None = None
    moderation: dict[str, Any] | None = None
    prompt_cache_options: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    # Given to the template, which shows the model what it knows of them.
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    documents: list[dict[str, Any]] | None = None

    def neutral_only(self) -> dict[str, Callable[[Any], bool]]:
        """Beside the shared fields; tools are shown to the model, and what it answers stays text."""
        return super().neutral_only() | {
            "tool_choice": lambda value: value in ("none", "auto"),
            "response_format": lambda value: value == {"type": "text"},
            "logprobs": lambda value: value is False,
            "top_logprobs": lambda value: value == 0,
            "functions": lambda value: not value,
            "function_call": lambda value: value in ("none", "auto"),
            "audio": lambda value: False,
            "modalities": lambda value: value == ["text"],
            "prediction": lambda value: False,
            "verbosity": lambda value: value == "medium",
            "web_search_options": lambda value: False,
            "moderation": lambda value: False,
            "prompt_cache_options": lambda value: False,
            "store": lambda value: value is False,
            "service_tier": lambda value: value in ("auto", "default"),
            "prompt_cache_retention": lambda value: value in ("in_memory", "in-memory"),
        }

    @property
    def output_limit(self) -> tuple[str, int | None]:
        """The field that limits the output, and its value."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens


class CompletionRequest(_GenerationRequest):
    """POST /v1/completions."""

    prompt: Any = Field(default=None)
    """A string, token ids, or a list of these; checked where it becomes token ids."""
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None

    def neutral_only(self) -> dict[str, Callable[[Any], bool]]:
        """Beside the shared fields."""
        return super().neutral_only() | {
            "best_of": lambda value: value == (self.n or 1),
            "echo": lambda value: value is False,
            "logprobs": lambda value: False,
            "suffix": lambda value: value == "",
        }

    @property
    def output_limit(self) -> tuple[str, int | None]:
        """The field that limits the output, and its value."""
        return "max_tokens", COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens


class TokenizeRequest(_Body):
    """POST /tokenize, as vLLM has it: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    documents: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(_Body):
    """POST /detokenize, as vLLM has it."""

    model: str | None = None
    tokens: list[int]


BodyType = TypeVar("BodyType", bound=_Body)


def parse_body(body: dict[str, Any], body_type: type[BodyType]) -> BodyType:
    """ApiError: a field is unknown, of the wrong type, or asks for what is not supported; it is named."""
    try:
        parsed = body_type.model_validate(body)
    except ValidationError as error:
        raise _field_error(error) from None
    if isinstance(parsed, _GenerationRequest):
        _refuse_unsupported(parsed)
    return parsed


def bad_parameter(error: ParameterError) -> ApiError:
    """The answer to a value out of its range."""
    return ApiError(400, str(error), param=error.param, code=error.code)


def _field_error(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in first["loc"] if not _names_a_type(part))
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unknown field {name!r}: this server does not know it", param=name, code="unknown_field")
    if first["type"] == "missing":
        return ApiError(400, f"the field {name!r} is missing", param=name, code="missing_field")
    value = repr(first["input"])
    shown = value if len(value) <= 80 else f"{value[:77]}..."
    return ApiError(400, f"{name} is {shown}: {first['msg']}", param=name, code="invalid_value")


def _names_a_type(part: int | str) -> bool:
    """Pydantic puts the member of a union into the location, such as "str" or "list[str]"."""
    return isinstance(part, str) and (part in ("str", "int", "dict") or part.endswith("]"))


def _refuse_unsupported(request: _GenerationRequest) -> None:
    for name, is_neutral in request.neutral_only().items():
        value = getattr(request, name)
        if value is not None and not is_neutral(value):
            raise ApiError(
                400, f"{name} = {value!r} is not supported: leave the field out", param=name, code="unsupported_value"
            )
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options is only allowed with stream = true", param="stream_options")


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
