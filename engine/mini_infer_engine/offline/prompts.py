"""Prompts as callers of `LLM` write them: texts, token ids, or vLLM's dicts. Knows no engine."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NotRequired, TypedDict

from mini_infer_engine.core.request import ImageInput
from mini_infer_engine.offline.images import OfflineImages
from mini_infer_prompts.prompt import PromptEncoder
from mini_infer_web.api_errors import ApiError

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; a dict may have a "cache_salt", and one of a text
"multi_modal_data", too.
"""
_KEYS = {"prompt", "prompt_token_ids", "cache_salt", "multi_modal_data"}


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    multi_modal_data: NotRequired[Mapping[str, Any]]
    """{"image": an image of PIL, or a list of them}, of which the text has the markers."""
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids; `prompt` is their text, for the output."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


class OfflinePrompt(NamedTuple):
    """One parsed prompt."""

    text: str | None
    """Text of the prompt; None if it came as token ids."""
    token_ids: Sequence[int]
    cache_salt: str = ""
    images: Sequence[ImageInput] = ()


def listed(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """Returns one prompt or several as a list. Raises ValueError if they are neither."""
    values: Any = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if isinstance(values, str | Mapping) or _are_ids(values):
        return [values]
    if not isinstance(values, Iterable):
        raise ValueError(f"prompts = {values!r}: give a text, a list of token ids, a dict, or a list of these")
    return list(values)


def read_prompt(
    index: int, prompt: Prompt, encoder: PromptEncoder | None, images: OfflineImages | None = None
) -> OfflinePrompt:
    """Returns the prompt. Raises ValueError if it is none, requests something that is not here, or is text without a
    tokenizer. `images` reads its images; None if the model reads none.
    """
    if not isinstance(prompt, Mapping):
        prompt = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
    unknown = [name for name, value in prompt.items() if name not in _KEYS and value]
    if unknown:
        raise ValueError(f"prompt {index}: {unknown[0]} is not supported: leave it out, prompts are text or token ids")
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    salt = prompt.get("cache_salt") or ""
    if not isinstance(salt, str):
        raise ValueError(f"prompt {index}: cache_salt = {salt!r} must be a string")
    data = prompt.get("multi_modal_data")
    if data:
        if images is None:
            raise ValueError(f"prompt {index}: this model reads no images: leave multi_modal_data out")
        if token_ids is not None or not isinstance(text, str):
            raise ValueError(f"prompt {index}: multi_modal_data goes with a text, whose markers are expanded")
        try:
            read, inputs = images.in_text(text, data)
        except ApiError as error:
            raise ValueError(f"prompt {index}: {error.message}") from None
        return OfflinePrompt(text, read, salt, inputs)
    if token_ids is not None:
        return OfflinePrompt(text, _listed_ids(index, token_ids), salt)
    if not isinstance(text, str):
        raise ValueError(f'prompt {index} is neither a string nor has it "prompt" or "prompt_token_ids"')
    if encoder is None:
        raise ValueError(f"prompt {index} is text, and this LLM has skip_tokenizer_init=True: give prompt_token_ids")
    try:
        return OfflinePrompt(text, encoder.encode(text, add_special_tokens=True), salt)
    except ApiError as error:
        raise ValueError(f"prompt {index}: {error.message}") from None


def packed(index: int, token_ids: Sequence[int]) -> Sequence[int]:
    """Packs token ids into four bytes each: checks, keys and copies to a device are memory copies from here on.

    Raises ValueError if not all are integers.
    """
    try:
        return array("I", token_ids)
    except OverflowError:
        return token_ids  # one is negative or huge: the check against the vocabulary names it
    except TypeError:
        wrong = next((one for one in token_ids if not isinstance(one, int)), None)
        raise ValueError(f"prompt {index} holds {wrong!r} among its token ids: they are integers") from None


def _are_ids(prompts: Any) -> bool:
    return isinstance(prompts, Sequence) and bool(prompts) and isinstance(prompts[0], int)


def _listed_ids(index: int, token_ids: Any) -> list[int]:
    if isinstance(token_ids, list):
        return token_ids
    values = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
    if not isinstance(values, Iterable) or isinstance(values, str | Mapping):
        raise ValueError(f"prompt {index}: {values!r} is neither a text nor a list of token ids nor a dict with one")
    return list(values)
