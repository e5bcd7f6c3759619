"""Token ids to text while they come, one token at a time. Knows nothing of stop strings.

A token may be part of a character (byte-level and byte-fallback vocabularies) and may look different at the beginning
of a text (Metaspace), so that a piece of text is the difference between two decodings of a short window of tokens.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol, cast

from tokenizers import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_WINDOW_TOKENS = 48
"""A longer run of bytes that make no text is given up on, or each token would cost more than the one before."""


class Decoder(Protocol):
    """The part of `tokenizers.Tokenizer` that is needed."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`."""


class MarkerDecoder:
    """A decoder that leaves out special tokens but for some."""

    __slots__ = ("_decoder", "_hidden")

    def __init__(self, decoder: Decoder, hidden: frozenset[int]) -> None:
        """`hidden`: the special tokens that are left out."""
        self._decoder = decoder
        self._hidden = hidden

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """See `Decoder`."""
        if skip_special_tokens:
            ids = [token_id for token_id in ids if token_id not in self._hidden]
        return self._decoder.decode(ids, skip_special_tokens=False)


def decoder_showing(tokenizer: Tokenizer, markers: Iterable[str]) -> Decoder:
    """The tokenizer's decoder, or one that also shows those `markers` that are special tokens."""
    special = {
        token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
    }
    shown = {marker for marker in markers if marker in special}
    if not shown:
        return cast("Decoder", tokenizer)
    return MarkerDecoder(tokenizer, frozenset(token_id for text, token_id in special.items() if text not in shown))


class Detokenizer:
    """The text of one sequence. What `push` and the last `flush` return makes, joined, the text of all tokens."""

    __slots__ = ("_context", "_decoder", "_emitted", "_skip_special_tokens", "_window")

    def __init__(self, decoder: Decoder, skip_special_tokens: bool = True) -> None:
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        """The tokens of the last finished piece, then those of the unfinished one."""
        self._context = 0
        """How many tokens of the window are the last finished piece."""
        self._emitted = 0
        """Characters of the window's text that were returned already."""

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while a character is unfinished."""
        window = self._window
        window.append(token_id)
        text = self._decode(window)
        stable = len(text)
        if text.endswith(_REPLACEMENT) and len(window) <= _MAX_WINDOW_TOKENS:
            # A byte fallback turns all bytes of a run into these while its last character is unfinished.
            stable = len(text.rstrip(_REPLACEMENT))
        piece = text[self._emitted : stable]
        if stable < len(text):
            self._emitted = max(self._emitted, stable)
        elif piece:
            self._window = window[self._context :] if len(window) <= _MAX_WINDOW_TOKENS else [token_id]
            self._context = len(self._window)
            self._emitted = len(self._decode(self._window))
        elif len(window) > _MAX_WINDOW_TOKENS:
            window.pop()  # a run of special tokens, which leave no trace in the text
        return piece

    def flush(self, *, drop_unfinished: bool = False) -> str:
        """What is left when no more tokens will come: an unfinished character shows as U+FFFD, or not at all."""
        text = self._decode(self._window)
        piece = text[self._emitted :]
        self._emitted = len(text)
        return piece.rstrip(_REPLACEMENT) if drop_unfinished else piece

    def _decode(self, token_ids: list[int]) -> str:
        return self._decoder.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
