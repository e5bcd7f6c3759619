"""Converts token ids to text one token at a time, as they come. Knows nothing of stop strings.

A token may be part of a character (byte-level and byte-fallback vocabularies) and may look different at the beginning
of a text (Metaspace), so that a piece of text is the difference between two decodings of a short window of tokens.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol, cast

from tokenizers import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_WINDOW_TOKENS = 48
"""Longest run of bytes that make no text: beyond it the run is given up, or each token would cost more than the last.
"""


_PROMPT_TOKENS = (4, 16, 64, 256, 1024, 4096)
"""Numbers of tokens of a prompt's end to try until they show some text: more are all special tokens, or broken bytes.
"""
_CHARACTER_BYTES = 4
"""Bytes of the longest character in UTF-8."""


class Decoder(Protocol):
    """The part of `tokenizers.Tokenizer` that is needed."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of `ids`."""


class MarkerDecoder:
    """A decoder that skips special tokens except for some."""

    __slots__ = ("_decoder", "_hidden")

    def __init__(self, decoder: Decoder, hidden: frozenset[int]) -> None:
        """Wraps a decoder; `hidden` are the special tokens that it skips."""
        self._decoder = decoder
        self._hidden = hidden

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of `ids`, without the hidden tokens if special tokens are skipped."""
        if skip_special_tokens:
            ids = [token_id for token_id in ids if token_id not in self._hidden]
        return self._decoder.decode(ids, skip_special_tokens=False)


def decoder_showing(tokenizer: Tokenizer, markers: Iterable[str]) -> Decoder:
    """Returns the tokenizer's decoder, or one that also shows those `markers` that are special tokens."""
    special = {
        token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
    }
    shown = {marker for marker in markers if marker in special}
    if not shown:
        return cast("Decoder", tokenizer)
    return MarkerDecoder(tokenizer, frozenset(token_id for text, token_id in special.items() if text not in shown))


class Detokenizer:
    """The text of one sequence after its prompt. The pieces that `push` and `flush` return, joined, are that text.

    It is the text of prompt and output together less that of the prompt: a Metaspace decoder drops the first space of a
    text, but not one between the prompt and its continuation.
    """

    __slots__ = ("_context", "_decoder", "_emitted", "_most", "_skip_special_tokens", "_unfinished", "_window")

    def __init__(self, decoder: Decoder, skip_special_tokens: bool = True, prompt: Sequence[int] = ()) -> None:
        """Begins an output; `prompt` has the token ids before those that are pushed."""
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        self._window = self._end_of(prompt)
        """The tokens of the last finished piece, then those of the unfinished one."""
        self._context = len(self._window)
        """Number of the window's tokens that are the last finished piece."""
        text = self._decode(self._window) if self._window else ""
        self._emitted = len(text)
        """Characters of the window's text that were returned already, or are the prompt's."""
        self._unfinished = self._unfinished_prompt(text)
        """Set if the prompt may end within a character: its text, and how much of that and of its tokens is finished.
        """
        self._most = _MAX_WINDOW_TOKENS + len(self._window)

    def push(self, token_id: int) -> str:
        """Returns the text that `token_id` completes; empty while a character is unfinished."""
        window = self._window
        window.append(token_id)
        text = self._decode(window)
        if self._unfinished is not None:
            self._settle_prompt(text, self._unfinished)
        stable = len(text)
        if text.endswith(_REPLACEMENT) and len(window) <= self._most:
            # A byte fallback turns all bytes of a run into these while its last character is unfinished.
            stable = len(text.rstrip(_REPLACEMENT))
        piece = text[self._emitted : stable]
        if stable < len(text):
            self._emitted = max(self._emitted, stable)
        elif piece:
            self._window = window[self._context :] if len(window) <= self._most else [token_id]
            self._context = len(self._window)
            self._emitted = len(self._decode(self._window))
            self._most = _MAX_WINDOW_TOKENS
        elif len(window) > self._most:
            window.pop()  # a run of special tokens, which leave no trace in the text
        return piece

    def flush(self, *, drop_unfinished: bool = False) -> str:
        """Returns the rest when no more tokens will come: an unfinished character becomes U+FFFD, or is dropped."""
        text = self._decode(self._window)
        piece = text[self._emitted :]
        self._emitted = len(text)
        return piece.rstrip(_REPLACEMENT) if drop_unfinished else piece

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        """Returns the last tokens of the prompt: as many as show some text, and begin with a whole character of it."""
        window: list[int] = []
        for size in _PROMPT_TOKENS:
            if len(window) == len(prompt):
                break
            window = list(prompt[-size:])
            text = self._decode(window)
            if text and not text.startswith(_REPLACEMENT):
                break
        return window

    def _unfinished_prompt(self, text: str) -> tuple[str, int, int] | None:
        if not text.endswith(_REPLACEMENT):
            return None
        for tokens in range(1, min(_CHARACTER_BYTES, len(self._window) + 1)):
            finished = self._decode(self._window[:-tokens])
            if not finished.endswith(_REPLACEMENT):
                return text, len(finished), len(self._window) - tokens
        return None

    def _settle_prompt(self, text: str, prompt: tuple[str, int, int]) -> None:
        """Determines, as soon as that is possible, if the output completes the prompt's last character."""
        before, characters, tokens = prompt
        if not text.startswith(before):
            self._emitted, self._context, self._unfinished = characters, tokens, None
        elif text[len(before) :].strip(_REPLACEMENT):
            self._unfinished = None

    def _decode(self, token_ids: list[int]) -> str:
        return self._decoder.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
