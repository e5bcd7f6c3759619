"""Prompts cut to a number of tokens, where a request asks for that: vLLM's `truncate_prompt_tokens`. Knows no text."""

from typing import Literal, NamedTuple

from mini_infer_engine.text.validation import ParameterError

TruncationSide = Literal["left", "right"]

_PARAM = "truncate_prompt_tokens"


class Truncation(NamedTuple):
    """What is left of a prompt that is longer."""

    tokens: int
    """-1: as many as the context holds beside the output."""
    side: TruncationSide = "left"
    """That is cut off: "left" keeps the last tokens, "right" the first."""


def truncated(
    prompts: list[list[int]], asked: Truncation | None, max_model_len: int, max_tokens: int
) -> list[list[int]]:
    """Each prompt as far as it is wanted. ParameterError: prompt and `max_tokens` would not fit the context."""
    if asked is None:
        return prompts
    room = max_model_len - max_tokens
    if asked.tokens > room:
        raise ParameterError(
            _PARAM,
            f"{_PARAM} is {asked.tokens}, and the context of {max_model_len} tokens (max_model_len) holds {room} "
            f"beside the {max_tokens} of the output: ask for fewer",
        )
    keep = max(0, room) if asked.tokens < 0 else asked.tokens
    return [_cut(prompt, keep, asked.side) for prompt in prompts]


def _cut(prompt: list[int], keep: int, side: TruncationSide) -> list[int]:
    if len(prompt) <= keep:
        return prompt
    return prompt[len(prompt) - keep :] if side == "left" else prompt[:keep]
