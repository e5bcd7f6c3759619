"""Parses what the requests for embeddings and scores share: their fields, and the spec that is made of them."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from mini_infer_engine.api.dialects.base import GenerationSpec, OutputLimit
from mini_infer_engine.api.dialects.fields import Body
from mini_infer_engine.config.pooling.pooler_config import LAST_TOKEN, PoolerConfig
from mini_infer_engine.core_process.messages import ModelInfo
from mini_infer_engine.text.pooled_prompts import Pair, PooledPrompts, TextOrIds
from mini_infer_engine.text.truncation import Truncation, TruncationSide
from mini_infer_prompts.pairs import Cut
from mini_infer_prompts.prompt import is_token_ids
from mini_infer_web.api_errors import FieldPath, field_name, refuse_field

LoadedModel = Callable[[], ModelInfo | None]
"""Returns the model, or None while it is loading."""
MAX_INPUTS = 2048
"""Most inputs of one request, OpenAI's limit."""


class PoolingBody(Body, kw_only=True):
    """The fields that all these requests have: OpenAI's and vLLM's."""

    model: str | None = None
    user: str | None = None
    add_special_tokens: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: str | None = None
    request_id: Annotated[str, Meta(pattern=r"^[!-~]{1,200}$")] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    truncation_side: TruncationSide | None = None
    use_activation: bool | None = None
    """False for the numbers before they are normalised or made probabilities; None leaves it to the model."""


def pooler_of(model: ModelInfo | None) -> PoolerConfig:
    """Returns the model's pooler; that of a usual decoder while it is loading."""
    return LAST_TOKEN if model is None else model.pooler


def pooling_spec(
    request: PoolingBody,
    model: ModelInfo | None,
    inputs: Sequence[TextOrIds | Pair],
    paths: Sequence[FieldPath],
    task: Literal["embed", "classify", "score"],
    *,
    prefix: str = "",
    dimensions: int | None = None,
) -> GenerationSpec:
    """Returns the spec of a request with these inputs, of which `paths` are the fields."""
    pooled = PooledPrompts(
        inputs,
        paths,
        pooler_of(model),
        prefix=prefix,
        add_special_tokens=request.add_special_tokens is not False,
        cut=_cut(request, model),
    )
    return GenerationSpec(
        model=request.model,
        prompt_ids=pooled.token_ids,
        prompt_param=field_name(paths[0][:1]),
        num_prompts=len(inputs),
        copies=1,
        needs_text=pooled.needs_text,
        sampling={"temperature": 0.0},
        output_limit=OutputLimit("max_tokens", 1, False),
        priority=request.priority or 0,
        cache_salt=request.cache_salt or "",
        request_id=request.request_id,
        truncation=_truncation(request, model),
        pooled=pooled,
        task=task,
        dimensions=dimensions,
    )


def _truncation(request: PoolingBody, model: ModelInfo | None) -> Truncation | None:
    kept = request.truncate_prompt_tokens
    if kept is None:
        return None
    usual: TruncationSide = "right" if model is not None and not model.output_room else "left"
    return Truncation(kept, request.truncation_side or usual)


def _cut(request: PoolingBody, model: ModelInfo | None) -> Cut | None:
    """Returns the cut of texts, which leaves their special tokens; `Truncation` refuses numbers that are too large."""
    truncation = _truncation(request, model)
    if truncation is None or model is None:
        return None
    tokens = truncation.tokens if truncation.tokens >= 0 else model.max_model_len - model.output_room
    return Cut(tokens, truncation.side)


def read_inputs(value: Any, name: str) -> tuple[list[TextOrIds], list[FieldPath]]:
    """Returns the inputs of a field that is a text, token ids, or a list of either, and their paths.

    Each token id is examined where the inputs become prompts. Raises ApiError 400 if the field is none of these.
    """
    if isinstance(value, str) or is_token_ids(value):
        return [value], [(name,)]
    if not isinstance(value, list):
        refuse_field((name,), "must be a string or a list of token ids, or a list of them")
    if not value:
        refuse_field((name,), "is empty: send at least one token")
    _check_count(len(value), name)
    paths: list[FieldPath] = [(name, index) for index in range(len(value))]
    for one, path in zip(value, paths, strict=True):
        if not isinstance(one, str | list):
            refuse_field(path, "must be a string or a list of token ids")
    return value, paths


def read_texts(value: Any, name: str) -> tuple[list[str], list[FieldPath]]:
    """Returns the texts of a field that is a text, an object with a `text`, or a list of either, and their paths.

    Raises ApiError 400 if it is none of these.
    """
    values, is_list = (value, True) if isinstance(value, list) else ([value], False)
    _check_count(len(values), name)
    paths: list[FieldPath] = [(name, index) if is_list else (name,) for index in range(len(values))]
    return [_text(one, path) for one, path in zip(values, paths, strict=True)], paths


def _check_count(count: int, name: str) -> None:
    if not 1 <= count <= MAX_INPUTS:
        refuse_field(
            (name,),
            f"has {count} parts; it must have from 1 to {MAX_INPUTS}: send several requests",
            code="invalid_value",
        )


def _text(value: Any, path: FieldPath) -> str:
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        refuse_field(path, "must be a string, or an object with a text")
    return text
