"""Caches the token ids of words that were seen before, so that most of a text needs no tokenizer at all.

A text is cut before spaces, where no id changes by it (text_slices says for which tokenizers), and of natural language
nearly all words are known after a few thousand. Unknown words go to the tokenizer in one call. Does not know added
tokens: see segments.
"""

import re
from collections.abc import Callable, Sequence
from itertools import chain

MAX_WORDS = 32_768
"""Most cached words; then all are forgotten and learned anew, which takes less than to keep an order."""
MAX_WORD_CHARACTERS, MAX_WORD_IDS = 32, 8
"""Most characters and ids of a cached word: longer ones seldom come again."""
WORDS_BYTES = 20 << 20
"""Most bytes that MAX_WORDS words take."""

_CUT = re.compile(r"(?<=[!-~\w]) ")
_MARK = "\0"

Encode = Callable[[Sequence[str]], list[list[int]]]


class WordIds:
    """Caches the ids of words for one tokenizer. It may be shared by threads."""

    def __init__(self, encode: Encode) -> None:
        """Takes `encode`, which returns each text's ids, without special tokens around it."""
        self._encode = encode
        self._cache: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text without added tokens, equal to those of the tokenizer."""
        words = words_of(text)
        found = list(map(self._cache.get, words))
        if None in found:
            learned = self._learn({word for word, ids in zip(words, found, strict=True) if ids is None})
            found = [learned[word] if ids is None else ids for word, ids in zip(words, found, strict=True)]
        return list(chain.from_iterable(found))  # type: ignore[arg-type]  # None is in it no more

    def _learn(self, words: set[str]) -> dict[str, tuple[int, ...]]:
        unknown = list(words)
        learned = dict(zip(unknown, map(tuple, self._encode(unknown)), strict=True))
        kept = {word: ids for word, ids in learned.items() if _is_short(word, ids)}
        if len(self._cache) + len(kept) > MAX_WORDS:
            self._cache = {}
        if len(kept) <= MAX_WORDS:
            self._cache |= kept
        return learned


def _is_short(word: str, ids: tuple[int, ...]) -> bool:
    return len(word) <= MAX_WORD_CHARACTERS and len(ids) <= MAX_WORD_IDS


def words_of(text: str) -> list[str]:
    """Returns the text cut before its spaces, each word with the space before it, where that changes no ids."""
    if _MARK in text:
        return [text]
    marked = text.replace(" ", _MARK + " ") if _all_spaces_follow_punctuation(text) else _CUT.sub(_MARK + " ", text)
    return marked.split(_MARK)


def _all_spaces_follow_punctuation(text: str) -> bool:
    """True if each space stands behind one of ! to ~, as in most English; False if that takes a closer look."""
    return (
        text.isascii()
        and not ("  " in text or "\n " in text or text.startswith(" "))
        and text.replace("\n", "").isprintable()
    )
