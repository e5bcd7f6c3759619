"""Ends a text at the first stop string, whatever pieces it comes in. Knows nothing of tokens.

Of several stop strings the one that is complete first wins (the longest, if two end together), so that the end of a
text depends on the text alone and never on how it was cut into pieces.
"""

from collections.abc import Sequence


class StopStrings:
    """Buffers the end of a text for as long as it may become a stop string."""

    __slots__ = ("_buffered", "_include", "_stops", "matched")

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include_in_output
        self._buffered = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, piece: str) -> str:
        """Returns the text that is certain now that `piece` has come. Nothing may be pushed after a match."""
        if not self._stops:
            return piece
        text = self._buffered + piece
        match = min(
            ((text.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in text), default=None
        )
        if match is not None:
            end, negative_length, self.matched = match
            self._buffered = ""
            return text[: end if self._include else end + negative_length]
        length = self._length_to_buffer(text)
        self._buffered = text[len(text) - length :]
        return text[: len(text) - length]

    def flush(self) -> str:
        """Returns the buffered text when no more text will come."""
        buffered, self._buffered = self._buffered, ""
        return buffered

    def _length_to_buffer(self, text: str) -> int:
        """Returns the length of the longest end of `text` that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
