"""Finds the tokens of a text among those that were generated: together they are the text, byte for byte.

Others were generated beside them: markers of reasoning and calls, white space around these, the end of the turn, a stop
string. Knows no parser: the text was made of the tokens, so it is found among them.
"""

from collections.abc import Sequence
from typing import Any

Logprob = dict[str, Any]
"""A token's log probability, as OpenAI's chat has it."""


class TextLogprobs:
    """Log probabilities of one text as it comes in pieces."""

    def __init__(self) -> None:
        self._pending: list[Logprob] = []
        """Tokens whose text has not come, or not completely."""
        self._skipped = 0
        """Bytes of the first pending token that come before the text."""
        self._shown = 0
        """Bytes of the first pending token that are in the text."""

    def push(self, logprobs: Sequence[Logprob]) -> None:
        """Adds tokens that were generated; their text comes now or later, if ever."""
        self._pending += logprobs

    def clear(self) -> None:
        """Drops tokens that are no text."""
        self._pending, self._skipped, self._shown = [], 0, 0

    def take(self, text: str) -> list[Logprob]:
        """Returns the tokens that end within the next piece of the text."""
        data = text.encode("utf-8", "surrogatepass")
        if not self._shown and not self._find(data):
            complete, self._pending = self._pending, []  # a decoder has changed the text: no place is known
            return complete
        complete = []
        while data and self._pending:
            rest = _bytes(self._pending[0])[self._skipped + self._shown :]
            if len(rest) > len(data):
                self._shown += len(data)
                break
            complete.append(self._first(len(rest)))
            del self._pending[0]
            self._skipped = self._shown = 0
            data = data[len(rest) :]
        return complete

    def finish(self) -> list[Logprob]:
        """Returns the token of which the text has only the beginning, cut to that, and drops the others."""
        complete = [self._first(0)] if self._shown else []
        self.clear()
        return complete

    def _first(self, more: int) -> Logprob:
        """Returns the first pending token, cut to the part that is in the text: the bytes shown before and `more`."""
        token = self._pending[0]
        kept = _bytes(token)[self._skipped : self._skipped + self._shown + more]
        if len(kept) == len(_bytes(token)):
            return token
        return token | {"token": kept.decode("utf-8", "replace"), "bytes": list(kept)}

    def _find(self, data: bytes) -> bool:
        """Drops the pending tokens before the text that begins with `data`. Returns False if it begins in none of them.

        It begins where a token does, or behind a token's white space; rather where it also ends where a token does.
        """
        found: tuple[int, int] | None = None
        for index in range(len(self._pending)):
            first = _bytes(self._pending[index])
            for skipped in {0: None, len(first) - len(first.lstrip()): None}:
                fit = self._fit(data, index, skipped)
                if fit == _ENDS_WITH_TOKEN:
                    self._begin_at(index, skipped)
                    return True
                if fit == _ENDS_WITHIN and found is None:
                    found = index, skipped
        if found is None:
            return False
        self._begin_at(*found)
        return True

    def _begin_at(self, index: int, skipped: int) -> None:
        del self._pending[:index]
        self._skipped = skipped

    def _fit(self, data: bytes, index: int, skipped: int) -> int:
        at = 0
        for token in self._pending[index:]:
            part = _bytes(token)[skipped:]
            skipped = 0
            rest = data[at : at + len(part)]
            if not part.startswith(rest):
                return _NOT_HERE
            at += len(part)
            if at >= len(data):
                return _ENDS_WITH_TOKEN if at == len(data) else _ENDS_WITHIN
        return _NOT_HERE


_NOT_HERE, _ENDS_WITHIN, _ENDS_WITH_TOKEN = range(3)


def _bytes(token: Logprob) -> bytes:
    return bytes(token["bytes"] or b"")
