"""Text to token ids piece by piece between special tokens, so that a growing chat is tokenised only at its end.

The pieces are those that the `tokenizers` library itself cuts first, so the ids equal those of the whole text; where a
tokenizer has a part for which that does not hold, or that is not known here, the whole text is encoded.
"""

import json
import re
import threading
from array import array
from collections import OrderedDict
from typing import Any

from tokenizers import Tokenizer

MAX_CACHED_BYTES = 64_000_000
"""Of all pieces kept and their ids: ASCII text takes about two bytes a character, so some 8 million tokens."""

_ENTRY_BYTES = 300
"""What a piece costs beside its characters and ids: without it, a flood of tiny pieces would have no bound."""


class SegmentEncoder:
    """Encodes without the special tokens that a post-processor adds. It may be shared by threads."""

    def __init__(self, tokenizer: Tokenizer, max_cached_bytes: int = MAX_CACHED_BYTES) -> None:
        self._tokenizer = tokenizer
        self._splitter = _splitter(tokenizer)
        self._cached: OrderedDict[str, array[int]] = OrderedDict()  # piece -> ids, least recently used first
        self._cached_bytes = 0
        self._max_cached_bytes = max_cached_bytes
        self._lock = threading.Lock()
        self.encoded_characters = 0
        """Characters that went through the tokenizer so far: what the cache did not save."""

    @property
    def splits(self) -> bool:
        """Whether this tokenizer allows pieces."""
        return self._splitter is not None

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, equal to those of the tokenizer without a cache."""
        if self._splitter is None:
            return self._encode(text)
        pattern, token_ids = self._splitter
        ids: list[int] = []
        # With one group in the pattern, pieces and added tokens alternate.
        for index, piece in enumerate(pattern.split(text)):
            if index % 2:
                ids.append(token_ids[piece])
            elif piece:
                ids.extend(self._piece(piece))
        return ids

    def _piece(self, piece: str) -> "array[int]":
        with self._lock:
            ids = self._cached.get(piece)
            if ids is not None:
                self._cached.move_to_end(piece)
                return ids
        ids = array("I", self._encode(piece))
        if _bytes(piece, ids) > self._max_cached_bytes:
            return ids
        with self._lock:
            if piece not in self._cached:
                self._cached[piece] = ids
                self._cached_bytes += _bytes(piece, ids)
            while self._cached_bytes > self._max_cached_bytes:
                self._cached_bytes -= _bytes(*self._cached.popitem(last=False))
        return ids

    def _encode(self, text: str) -> list[int]:
        self.encoded_characters += len(text)
        # The batch call is the one that can leave out character offsets, which nobody needs here.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids


def _bytes(piece: str, ids: "array[int]") -> int:
    return _ENTRY_BYTES + len(piece.encode()) + ids.itemsize * len(ids)


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
"""Longer added tokens would nest the pattern too deep; no model has any."""


def _splitter(tokenizer: Tokenizer) -> tuple[re.Pattern[str], dict[str, int]] | None:
    """A pattern with one group that finds added tokens as the tokenizer does, and their ids; None: pieces are unsafe.

    The tokenizer first cuts the raw text at the added tokens that are not `normalized`, leftmost and longest first
    (tokenizers, added_vocabulary.rs), and all that follows sees one piece at a time.
    """
    added = [token for token in tokenizer.get_added_tokens_decoder().values() if not token.normalized]
    if not added or tokenizer.encode_special_tokens or any(t.lstrip or t.rstrip or t.single_word for t in added):
        return None
    if max(len(token.content) for token in added) > _MAX_WORD_CHARACTERS:
        return None
    parts = [*_parts(_description(tokenizer.normalizer)), *_parts(_description(tokenizer.pre_tokenizer))]
    if not all(part["type"] in _LOCAL_PARTS and part.get("prepend_scheme") != "first" for part in parts):
        return None
    if getattr(tokenizer.model, "dropout", None):
        return None
    return re.compile(f"({_any_of([token.content for token in added])})"), {
        token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()
    }


def _description(part: Any) -> dict[str, Any] | None:
    """A normalizer or pre-tokenizer as JSON: what the library pickles."""
    return None if part is None else json.loads(part.__getstate__())


def _parts(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer and all that it is made of."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [leaf for child in part.get("normalizers") or part.get("pretokenizers") or [] for leaf in _parts(child)]


def _any_of(words: list[str]) -> str:
    """A regular expression for the longest of `words`, nested by letters so that hundreds of words cost one look."""
    by_first: dict[str, list[str]] = {}
    for word in words:
        if word:
            by_first.setdefault(word[0], []).append(word[1:])
    branches = [re.escape(first) + _any_of(rests) for first, rests in by_first.items()]
    if not branches:
        return ""
    pattern = branches[0] if len(branches) == 1 and "" not in words else f"(?:{'|'.join(branches)})"
    return pattern + "?" if "" in words else pattern
