"""Tokenises bad words: each word as it is tokenised at the beginning of a text and after a space."""

from collections.abc import Callable

import msgspec

from mini_infer_engine.core.request import SamplingParams

Encode = Callable[[str], list[int]]
"""Function from a text to token ids, without special tokens."""


def with_bad_words(params: SamplingParams, encode: Encode | None) -> SamplingParams:
    """Adds the token sequences of `bad_words` to the parameters. Raises ValueError if there is no tokenizer."""
    if not params.bad_words:
        return params
    if encode is None:
        raise ValueError("bad_words need a tokenizer, and this engine runs without: use bad_words_token_ids")
    found = [*params.bad_words_token_ids]
    for word in params.bad_words:
        for text in (word.lstrip(), " " + word.lstrip()):
            token_ids = encode(text)
            if token_ids and token_ids not in found:
                found.append(token_ids)
    return msgspec.structs.replace(params, bad_words_token_ids=found)
