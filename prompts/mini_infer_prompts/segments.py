"""Tokenises text in pieces between special tokens, so that a growing chat is tokenised only at its end.

The pieces are those that the `tokenizers` library itself cuts first, long ones cut further where that changes no id
(text_slices), so the ids equal those of the whole text. If a tokenizer has a part for which that does not hold, or that
is not known here, the whole text is encoded.
"""

import re
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from tokenizers import Encoding, Tokenizer

from mini_infer_prompts.text_slices import SLICE_CHARACTERS, can_be_cut, next_cut, parts_of
from mini_infer_prompts.word_ids import WordIds
from mini_infer_web.api_errors import ApiError

MAX_CACHED_BYTES = 64_000_000
"""Most bytes of all cached pieces and their ids: ASCII text takes about two bytes a character, so some 8 million
tokens.
"""
MAX_WHOLE_CHARACTERS = 2 << 20
"""Most characters of a piece that cannot be cut: tokenising takes about a hundred bytes of memory a character
meanwhile.
"""

_ENTRY_BYTES = 250
"""Bytes that a cached piece costs beside its characters and ids: without it, a flood of tiny pieces would have no
bound.
"""
_SEARCH_CHARACTERS = 1 << 18
"""Characters that are searched for added tokens at once, in a millisecond or less: the search does not let other
threads run.
"""


class Piece(NamedTuple):
    """The token ids of a part of a text, and the place where that part ends."""

    ids: "array[int] | list[int]"
    end: int
    closed: bool
    """True if an added token ends there, and none that is longer can: whatever follows, the ids up to here stay."""


class SegmentEncoder:
    """Encodes without the special tokens that a post-processor adds. It may be shared by threads."""

    def __init__(self, tokenizer: Tokenizer, max_cached_bytes: int = MAX_CACHED_BYTES) -> None:
        self._tokenizer = tokenizer
        self._added = _AddedTokens.of(tokenizer)
        self._cuts = self._added is not None and can_be_cut(tokenizer)
        self.longest_token_characters = _longest_token(tokenizer) if self._cuts else 0
        """Most characters of a text that one token stands for, so that a text has a least number of tokens; 0 if not
        known.
        """
        self._words = WordIds(partial(encode_all, tokenizer)) if self._cuts else None
        self._cached: OrderedDict[str, array[int]] = OrderedDict()  # piece -> ids, least recently used first
        self._cached_bytes = 0
        self._max_cached_bytes = max_cached_bytes
        self._lock = threading.Lock()
        self.encoded_characters = 0
        """Characters that went through the tokenizer so far, because the cache did not have them."""

    @property
    def splits(self) -> bool:
        """True if this tokenizer allows pieces between added tokens."""
        return self._added is not None and bool(self._added.ids)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, equal to those of the tokenizer without a cache. Raises ApiError 400 if it cannot
        be tokenised.
        """
        if self._added is None or len(text) > SLICE_CHARACTERS:
            return [number for piece in self.pieces(text) for number in piece.ids]
        ids: list[int] = []
        for position, part in enumerate(self._added.split(text)):
            if position % 2:
                ids.append(self._added.ids[part])
            elif part:
                ids += self._piece(part)
        return ids

    def pieces(self, text: str, start: int = 0) -> Iterator[Piece]:
        """Yields the ids of `text` from `start` on, a few milliseconds of work at a time; none of an empty text.

        `start` is 0 or the end of a closed piece of a text that began with the same characters. Raises ApiError 400 if
        the text cannot be tokenised.
        """
        if self._added is None:
            if text:
                yield Piece(self._encode(text), len(text), False)
            return
        while start < len(text):
            found = self._added.search(text, start)
            begin, end = found or (len(text), len(text))
            while start < begin:
                stop = self._next_cut(text, start, begin)
                yield Piece(self._piece(text[start:stop]), stop, False)
                start = stop
            if found:
                word = text[begin:end]
                yield Piece([self._added.ids[word]], end, word not in self._added.beginnings)
                start = end

    def _next_cut(self, text: str, start: int, end: int) -> int:
        if not self._cuts:
            return end
        try:
            return next_cut(text, start, end)
        except ValueError as error:
            raise ApiError(400, str(error), code="prompt_not_text") from error

    def _piece(self, piece: str) -> "array[int] | list[int]":
        with self._lock:
            cached = self._cached.get(piece)
            if cached is not None:
                self._cached.move_to_end(piece)
                return cached
        ids = self._encode(piece)
        packed = array("I", ids)
        size_bytes = _bytes(piece, packed)
        if size_bytes > self._max_cached_bytes:
            return ids
        with self._lock:
            if piece not in self._cached:
                self._cached[piece] = packed
                self._cached_bytes += size_bytes
            while self._cached_bytes > self._max_cached_bytes:
                self._cached_bytes -= _bytes(*self._cached.popitem(last=False))
        return ids

    def _encode(self, text: str) -> list[int]:
        self.encoded_characters += len(text)
        return self._words.encode(text) if self._words else encode_whole(self._tokenizer, text)


def encode_whole(tokenizer: Tokenizer, text: str, add_special_tokens: bool = False) -> list[int]:
    """Returns the ids of `text`, from the library at once. Raises ApiError 400 if it is too long, or the library gives
    up.
    """
    return encode_all(tokenizer, [text], add_special_tokens)[0]


def encode_all(tokenizer: Tokenizer, texts: Sequence[str], add_special_tokens: bool = False) -> list[list[int]]:
    """Returns the ids of several texts, each by itself. Raises ApiError 400 as `encode_whole` does."""
    return [encoding.ids for encoding in encodings_of(tokenizer, texts, add_special_tokens)]


def encodings_of(tokenizer: Tokenizer, texts: Sequence[str], add_special_tokens: bool = False) -> list[Encoding]:
    """Returns the library's encodings of several texts, without offsets. Raises ApiError 400 as `encode_whole` does."""
    longest = max(map(len, texts))
    if longest > MAX_WHOLE_CHARACTERS:
        raise ApiError(
            400,
            f"this model's tokenizer takes {longest} characters as one piece, which is more than "
            f"{MAX_WHOLE_CHARACTERS}: send a shorter text or token ids",
            code="context_length_exceeded",
        )
    try:
        # The batch call is the one that can leave out character offsets, which nobody needs here.
        encodings: list[Encoding] = tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return encodings
    except BaseException as error:
        # A panic of the library (its regular expressions give up on some millions of blanks) is no Exception.
        if type(error).__name__ != "PanicException":
            raise
        message = f"the tokenizer gives up on this text of {longest} characters: send less of it at once"
        raise ApiError(400, message, code="prompt_not_text") from error


def _bytes(piece: str, ids: "array[int]") -> int:
    return _ENTRY_BYTES + sys.getsizeof(piece) + ids.itemsize * len(ids)


def _longest_token(tokenizer: Tokenizer) -> int:
    # Byte-level tokens have at least one character of theirs a character of text. A normal form joins three at most.
    longest = max(map(len, tokenizer.get_vocab()), default=0)
    return longest if tokenizer.normalizer is None else 3 * longest


class _AddedTokens:
    """Finds added tokens in a text as the tokenizer does.

    The tokenizer first cuts the raw text at the added tokens that are not `normalized`, leftmost and longest first
    (tokenizers, added_vocabulary.rs), and all that follows sees one piece at a time.
    """

    def __init__(self, ids: dict[str, int]) -> None:
        self.ids = ids
        self._pattern = re.compile(f"({_any_of(list(ids))})") if ids else None
        self._longest = max(map(len, ids), default=0)
        self._window = _SEARCH_CHARACTERS // max(1, self._longest // 16)
        # In order, those with which others begin stand right before them.
        self.beginnings = {word for word, following in pairwise(sorted(ids)) if following.startswith(word)}
        """Added tokens with which a longer one begins: the text that follows decides which it is."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "_AddedTokens | None":
        """Returns the added tokens of a tokenizer; None if pieces are unsafe, or too little is known of it."""
        decoder = tokenizer.get_added_tokens_decoder()
        added = [token for token in decoder.values() if not token.normalized]
        if tokenizer.encode_special_tokens or any(t.lstrip or t.rstrip or t.single_word for t in added):
            return None
        if max((len(token.content) for token in added), default=0) > _MAX_WORD_CHARACTERS:
            return None
        parts = [*parts_of(tokenizer.normalizer), *parts_of(tokenizer.pre_tokenizer)]
        if not all(part["type"] in _LOCAL_PARTS and part.get("prepend_scheme") != "first" for part in parts):
            return None
        if getattr(tokenizer.model, "dropout", None):
            return None
        return cls(
            {token.content: number for number, token in decoder.items() if token.content and not token.normalized}
        )

    def split(self, text: str) -> list[str]:
        """Returns the parts between added tokens, which may be empty, and the tokens, in turns; the text is searched at
        once.
        """
        return self._pattern.split(text) if self._pattern else [text]

    def search(self, text: str, start: int) -> tuple[int, int] | None:
        """Returns the begin and end of the first added token at or after `start`; None if there is none."""
        if self._pattern is None:
            return None
        while start < len(text):
            # A match that begins before the window's end has all its characters in sight.
            window = start + self._window
            found = self._pattern.search(text, start, window + self._longest)
            if found and found.start() < window:
                return found.span()
            start = window
        return None


_LOCAL_PARTS = {
    # normalizers: applied to each piece by itself
    "BertNormalizer",
    "ByteLevel",
    "Lowercase",
    "NFC",
    "NFD",
    "NFKC",
    "NFKD",
    "Nmt",
    "Precompiled",
    "Prepend",
    "Replace",
    "Strip",
    "StripAccents",
    # pre-tokenizers
    "BertPreTokenizer",
    "CharDelimiterSplit",
    "Digits",
    "Metaspace",
    "Punctuation",
    "Split",
    "UnicodeScripts",
    "Whitespace",
    "WhitespaceSplit",
}


_MAX_WORD_CHARACTERS = 100
"""Most characters of an added token: a longer one would nest the pattern too deep; no model has any."""


def _any_of(words: list[str]) -> str:
    """Returns a regular expression for the longest of `words`, nested by letters so that hundreds of words cost one
    look.
    """
    by_first: dict[str, list[str]] = {}
    for word in words:
        if word:
            by_first.setdefault(word[0], []).append(word[1:])
    branches = [re.escape(first) + _any_of(rests) for first, rests in by_first.items()]
    if not branches:
        return ""
    pattern = branches[0] if len(branches) == 1 and "" not in words else f"(?:{'|'.join(branches)})"
    return pattern + "?" if "" in words else pattern
