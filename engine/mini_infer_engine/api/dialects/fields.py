"""Bodies of OpenAI's requests as they enter: every standard field is known and either works or is refused by name.

Types are strict: nothing is converted. Ranges are checked in text/validation.py, prompts made in text/tokenizing.py.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from mini_infer_contract.api_errors import ApiError
from mini_infer_engine.api.dialects.base import GenerationSpec, OutputLimit, PromptIds
from mini_infer_engine.core.request import SamplingParams
from mini_infer_engine.sampling.parameters import PARAMETERS

MAX_CHOICES = 128
"""Of one request: prompts times `n`."""


class Body(BaseModel):
    """A JSON object from a client: types as they are, no field that nobody knows."""

    model_config = ConfigDict(strict=True, extra="forbid")


if TYPE_CHECKING:

    class SamplingFields(Body):
        """Those with a name here; all others by `getattr`."""

        max_tokens: int | None = None
        stop: str | list[str] | None = None

else:  # made from the table of sampling parameters: a type checker cannot follow, and need not
    _TYPES = get_type_hints(SamplingParams)
    SamplingFields = create_model(
        "SamplingFields",
        __base__=Body,
        **{row.name: ((row.request_type or _TYPES[row.name]) | None, None) for row in PARAMETERS if row.is_in_requests},
    )

_SAMPLING = tuple(row.name for row in PARAMETERS if row.is_in_requests and row.name != "max_tokens")


class StreamOptions(Body):
    """What a stream tells beside its text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GenerationFields(SamplingFields):
    """What both kinds of generation share beside sampling. None: the field was not sent."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    # Known, and refused unless it asks for what is done anyway (see neutral_only).
    logit_bias: dict[str, float] | None = None
    # vLLM's.
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: str | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None

    def neutral_only(self) -> dict[str, Callable[[Any], bool]]:
        """Field name to whether a value asks for nothing that is not done."""
        return {"logit_bias": lambda value: not value}


BodyType = TypeVar("BodyType", bound=Body)


def parse_fields(body: dict[str, Any], body_type: type[BodyType]) -> BodyType:
    """ApiError: a field is unknown, of the wrong type, or asks for what is not supported; it is named."""
    try:
        parsed = body_type.model_validate(body)
    except ValidationError as error:
        raise _field_error(error) from None
    if isinstance(parsed, GenerationFields):
        _refuse_unsupported(parsed)
    return parsed


def common_spec(
    request: GenerationFields,
    *,
    prompt_ids: PromptIds,
    prompt_param: str,
    num_prompts: int,
    needs_text: bool,
    output_limit: OutputLimit,
) -> GenerationSpec:
    """What the shared fields ask for. ApiError: it is more than one request may."""
    copies = request.n or 1
    if num_prompts * copies > MAX_CHOICES:
        message = f"{num_prompts} prompts with n = {copies} are more than {MAX_CHOICES} choices: send several requests"
        raise ApiError(400, message, param="n" if copies > 1 else prompt_param)
    sampling = {name: value for name in _SAMPLING if (value := getattr(request, name)) is not None}
    if isinstance(request.stop, str):
        sampling["stop"] = [request.stop]
    return GenerationSpec(
        model=request.model,
        prompt_ids=prompt_ids,
        prompt_param=prompt_param,
        num_prompts=num_prompts,
        copies=copies,
        needs_text=needs_text,
        sampling=sampling,
        output_limit=output_limit,
        priority=request.priority or 0,
        cache_salt=request.cache_salt or "",
        streams=bool(request.stream),
        include_usage=request.stream_options is not None and bool(request.stream_options.include_usage),
        return_token_ids=bool(request.return_token_ids),
    )


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


def _refuse_unsupported(request: GenerationFields) -> None:
    for name, is_neutral in request.neutral_only().items():
        value = getattr(request, name)
        if value is not None and not is_neutral(value):
            raise ApiError(
                400, f"{name} = {value!r} is not supported: leave the field out", param=name, code="unsupported_value"
            )
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options is only allowed with stream = true", param="stream_options")
