"""Sampling parameters as callers of `LLM` write them, and their conversion to the core's. Knows no engine."""

from copy import copy
from enum import Enum
from operator import attrgetter
from typing import Any, Self

import msgspec

from mini_infer_engine.core import request

MAX_CHOICES = 16_384
"""Most outputs of one prompt, vLLM's limit: each is a request of its own in the engine's queue."""
_LEAVE_OUT = "leave it out"
_REMEDIES = {
    "logits_processors": "logit_bias, allowed_token_ids, bad_words and structured_outputs change what may be chosen",
    "truncate_prompt_tokens": "give token ids, cut as they should be",
    "extra_args": _LEAVE_OUT,
    "guided_decoding": "structured_outputs=StructuredOutputsParams(...) is its successor",
    "skip_reading_prefix_cache": "LLM.reset_prefix_cache forgets it, or LLM(enable_prefix_caching=False)",
    "flat_logprobs": _LEAVE_OUT,
    "best_of": "ask for n outputs, and choose",
    "thinking_token_budget": "over HTTP, /v1/chat/completions has it",
}
"""Fields that must be None, empty or False."""
_values_with_remedies = attrgetter(*_REMEDIES)
_LISTS = ("stop", "stop_token_ids", "bad_words", "bad_words_token_ids")
"""Fields that a caller may leave at None."""


class RequestOutputKind(Enum):
    """The content of the outputs of `LLMEngine` and `AsyncLLM`; those of `LLM` are final."""

    CUMULATIVE = 0
    """Everything so far."""
    DELTA = 1
    """Text and tokens since the last output."""
    FINAL_ONLY = 2
    """There is one output, the last."""


class SamplingParams(request.SamplingParams, frozen=False, kw_only=True, omit_defaults=True, gc=True):  # type: ignore[misc]  # msgspec has a frozen base's subclass mutable
    """Parameters that choose the next tokens, and the number of outputs; names and defaults are vLLM's.

    May be changed between calls. `stop` may be one string, and None stands for nothing in place of a list or dict.
    """

    n: int = 1
    """Outputs for each prompt. If there is a seed, the second has the next one, and so on."""
    # vLLM's, taken at values that ask for nothing.
    spaces_between_special_tokens: bool = True
    logits_processors: Any = None
    truncate_prompt_tokens: int | None = None
    output_kind: Any = RequestOutputKind.CUMULATIVE
    """The content of the outputs of `LLMEngine` and `AsyncLLM`."""
    extra_args: Any = None
    guided_decoding: Any = None
    skip_reading_prefix_cache: bool | None = None
    flat_logprobs: bool = False
    skip_clone: bool = False
    best_of: int | None = None
    thinking_token_budget: int | None = None

    def __post_init__(self) -> None:
        for name in _LISTS:
            if getattr(self, name) is None:
                setattr(self, name, [])
        if self.logit_bias is None:
            self.logit_bias = {}
        if isinstance(self.stop, str):
            self.stop = [self.stop]

        self.check_neutral()

    def check_neutral(self) -> None:
        """Raises ValueError if a field of vLLM's requests something that is not here; it says what to do instead."""
        if self.spaces_between_special_tokens and not any(_values_with_remedies(self)):
            return  # nearly all are so, and each is looked at twice
        for name, remedy in _REMEDIES.items():
            if (value := getattr(self, name)) and not (name == "best_of" and value == self.n):
                raise ValueError(f"SamplingParams: {name} = {str(value)[:200]} is not supported: {remedy}")
        if not self.spaces_between_special_tokens:
            raise ValueError(f"SamplingParams: spaces_between_special_tokens = False is not supported: {_LEAVE_OUT}")

    def clone(self) -> Self:
        """Returns another object with the same values."""
        return copy(self)


def for_engine(params: request.SamplingParams) -> tuple[int, request.SamplingParams]:
    """Returns the number of outputs for a prompt, and the sampling parameters of each.

    Raises ValueError if a value has not its field's type, or there are too many outputs.
    """
    if not isinstance(params, request.SamplingParams):
        raise ValueError(
            f"sampling_params has a {type(params).__name__}: give SamplingParams, one or one for each prompt"
        )
    if isinstance(params, SamplingParams):
        params.check_neutral()
    count = _plain(params.n) if isinstance(params, SamplingParams) else 1
    try:
        converted = _converted(params)
    except msgspec.ValidationError:  # numpy's and torch's numbers, and None for a list
        values = {name: _plain(value) for name, value in msgspec.structs.asdict(params).items()}
        try:
            converted = _converted(SamplingParams(**values))
        except msgspec.ValidationError as error:
            raise ValueError(f"SamplingParams: {error}") from None
    if not isinstance(count, int) or not 1 <= count <= MAX_CHOICES:
        raise ValueError(f"n is {count!r}; it must be from 1 to {MAX_CHOICES}")
    return count, converted


def kind_of(params: request.SamplingParams) -> RequestOutputKind:
    """Returns the kind of outputs. Raises ValueError if `output_kind` is none."""
    value = params.output_kind if isinstance(params, SamplingParams) else None
    try:
        return RequestOutputKind.CUMULATIVE if value is None else RequestOutputKind(value)
    except ValueError:
        kinds = ", ".join(f"RequestOutputKind.{kind.name}" for kind in RequestOutputKind)
        raise ValueError(f"output_kind = {str(value)[:200]}: choose from {kinds}") from None


def _converted(params: request.SamplingParams) -> request.SamplingParams:
    return msgspec.convert(params, request.SamplingParams, strict=False, from_attributes=True)


def _plain(value: Any) -> Any:
    """Converts numbers and arrays of numpy and torch to Python's."""
    return value.tolist() if hasattr(value, "tolist") else value
