"""Sampling parameters as callers of `LLM` write them, and what the core is asked of them. Knows no engine."""

from copy import copy
from typing import Any, Self

import msgspec

from mini_infer_engine.core import request

MAX_CHOICES = 16_384
"""Outputs of one prompt: each is a request of its own in the engine's queue. vLLM's limit."""
_LISTS = ("stop", "stop_token_ids", "bad_words", "bad_words_token_ids")
"""Fields that a caller may leave at None."""


class SamplingParams(request.SamplingParams, frozen=False, kw_only=True, omit_defaults=True, gc=True):  # type: ignore[misc]  # msgspec has a frozen base's subclass mutable
    """How to choose the next tokens, and of how many outputs; names and defaults are vLLM's.

    May be changed between calls. `stop` may be one string, and None stands for nothing where a list or dict is meant.
    """

    n: int = 1
    """Outputs for each prompt. Where there is a seed, the second has the next one, and so on."""

    def __post_init__(self) -> None:
        for name in _LISTS:
            if getattr(self, name) is None:
                setattr(self, name, [])
        if self.logit_bias is None:
            self.logit_bias = {}
        if isinstance(self.stop, str):
            self.stop = [self.stop]

    def clone(self) -> Self:
        """Another one with the same values."""
        return copy(self)


def for_engine(params: request.SamplingParams) -> tuple[int, request.SamplingParams]:
    """How many outputs of a prompt are asked for, and how each is sampled.

    ValueError: a value has not its field's type, or so many outputs are not made.
    """
    if not isinstance(params, request.SamplingParams):
        raise ValueError(
            f"sampling_params has a {type(params).__name__}: give SamplingParams, one or one for each prompt"
        )
    count = _plain(params.n) if isinstance(params, SamplingParams) else 1
    try:
        asked = _converted(params)
    except msgspec.ValidationError:  # numpy's and torch's numbers, and None for a list
        values = {name: _plain(value) for name, value in msgspec.structs.asdict(params).items()}
        try:
            asked = _converted(SamplingParams(**values))
        except msgspec.ValidationError as error:
            raise ValueError(f"SamplingParams: {error}") from None
    if not isinstance(count, int) or not 1 <= count <= MAX_CHOICES:
        raise ValueError(f"n is {count!r}; it must be from 1 to {MAX_CHOICES}")
    return count, asked


def _converted(params: request.SamplingParams) -> request.SamplingParams:
    return msgspec.convert(params, request.SamplingParams, strict=False, from_attributes=True)


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy and torch as Python's."""
    return value.tolist() if hasattr(value, "tolist") else value
