"""Tokenises texts and pairs of texts for pooling models, cut so that their special tokens stay, as transformers does.

Knows no model and no HTTP.
"""

from typing import Literal, NamedTuple

from tokenizers import Encoding, Tokenizer

from mini_infer_prompts.segments import encodings_of

Side = Literal["left", "right"]


class TypedIds(NamedTuple):
    """The token ids of one text or of two."""

    ids: list[int]
    type_start: int = 0
    """Index of the first token of type 1; 0 if there is none."""


class Cut(NamedTuple):
    """The number of tokens to which longer inputs are cut, special tokens included."""

    tokens: int
    side: Side
    """The side that is cut off."""


def single_ids(tokenizer: Tokenizer, text: str, cut: Cut) -> list[int]:
    """Returns the ids of a text with its special tokens, at most as many as `cut` says. Raises ApiError 400 if the text
    is too long for the library.
    """
    (encoding,) = encodings_of(tokenizer, [text])
    _truncate(encoding, max(0, cut.tokens - tokenizer.num_special_tokens_to_add(False)), cut.side)
    ids: list[int] = tokenizer.post_process(encoding).ids
    return ids


def pair_ids(
    tokenizer: Tokenizer, first: str, second: str, cut: Cut | None, *, add_special_tokens: bool = True
) -> TypedIds:
    """Returns the ids of a pair as the tokenizer's template joins them; the longer text is cut first. Raises ApiError
    400 if a text is too long for the library.
    """
    encodings = encodings_of(tokenizer, [first, second])
    if cut is not None:
        special = tokenizer.num_special_tokens_to_add(True) if add_special_tokens else 0
        lengths = longest_first(len(encodings[0]), len(encodings[1]), max(0, cut.tokens - special))
        for encoding, length in zip(encodings, lengths, strict=True):
            _truncate(encoding, length, cut.side)
    joined = tokenizer.post_process(encodings[0], encodings[1], add_special_tokens)
    return TypedIds(joined.ids, joined.type_ids.index(1) if 1 in joined.type_ids else 0)


def longest_first(first: int, second: int, most: int) -> tuple[int, int]:
    """Returns to how many tokens the texts of a pair are cut (the library's strategy `longest_first`)."""
    if first + second <= most:
        return first, second
    shorter, longer = sorted((first, second))
    longer = shorter if shorter > most else max(shorter, most - shorter)
    if shorter + longer > most:
        shorter, longer = most // 2, most // 2 + most % 2
    return (longer, shorter) if first > second else (shorter, longer)


def _truncate(encoding: Encoding, tokens: int, side: Side) -> None:
    if len(encoding) > tokens:
        encoding.truncate(tokens, direction=side)
