"""Truncates prompts to a number of tokens if a request asks for it: vLLM's `truncate_prompt_tokens`. Knows no text."""

from typing import Literal, NamedTuple

from mini_infer_engine.text.validation import ParameterError

TruncationSide = Literal["left", "right"]

_PARAM = "truncate_prompt_tokens"


class Truncation(NamedTuple):
    """A request's truncation of longer prompts."""

    tokens: int
    """Tokens that are kept; -1 means as many as the context has room for beside the output."""
    side: TruncationSide = "left"
    """The side that is cut off: "left" keeps the last tokens, "right" the first."""


def truncated(
    prompts: list[list[int]], requested: Truncation | None, max_model_len: int, max_tokens: int
) -> list[list[int]]:
    """Truncates each prompt if requested. Raises ParameterError if the requested tokens and `max_tokens` exceed the
    context.
    """
    if requested is None:
        return prompts
    limit = max_model_len - max_tokens
    if requested.tokens > limit:
        raise ParameterError(
            _PARAM,
            f"{_PARAM} is {requested.tokens}, and the context of {max_model_len} tokens (max_model_len) holds {limit} "
            f"beside the {max_tokens} of the output: ask for fewer",
        )
    keep = max(0, limit) if requested.tokens < 0 else requested.tokens
    return [_cut(prompt, keep, requested.side) for prompt in prompts]


def _cut(prompt: list[int], keep: int, side: TruncationSide) -> list[int]:
    if len(prompt) <= keep:
        return prompt
    return prompt[len(prompt) - keep :] if side == "left" else prompt[:keep]
