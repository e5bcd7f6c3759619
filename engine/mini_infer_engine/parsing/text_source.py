"""Lets a reader parse text that comes in pieces as if it were whole: it waits for what it needs. Knows no format.

Readers are generators that yield where the text ends for now. They see the text through these methods alone, whose
results do not depend on where it was cut into pieces; so neither do the readers'.
"""

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

Result = TypeVar("Result")
Waiting = Generator[None, None, Result]
"""A reader: it yields when it needs more text, and returns its result."""
TextSink = Callable[[str], None]
"""Takes text that is certain."""

_IN_WORDS = "_-."


class TextSource:
    """A buffer of text that was fed and has not been read yet."""

    __slots__ = ("_at", "_mark", "_text", "is_closed")

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        """Index up to which all has been read."""
        self._mark: int | None = None
        self.is_closed = False
        """True if no more text will come."""

    def feed(self, text: str) -> None:
        """Adds the next piece."""
        start = self._at if self._mark is None else self._mark
        self._text = self._text[start:] + text
        self._at -= start
        self._mark = None if self._mark is None else 0

    def close(self) -> None:
        """Says that there is no next piece."""
        self.is_closed = True

    @property
    def available(self) -> str:
        """The unread text so far. Only for text that a reader emits as it is: its length depends on the pieces."""
        return self._text[self._at :]

    def take(self, count: int) -> str:
        """Reads characters that are known to be there."""
        text = self._text[self._at : self._at + count]
        self._at += count
        return text

    def mark(self) -> None:
        """Retains the text that is read from here on, in case it turns out to be something else."""
        self._mark = self._at

    def release(self) -> str:
        """Returns the text that was read since the mark, and retains it no longer."""
        start = self._at if self._mark is None else self._mark
        self._mark = None
        return self._text[start : self._at]

    def peek(self, count: int = 1) -> Waiting[str]:
        """Returns the next characters, unread; fewer only at the end."""
        while len(self._text) - self._at < count and not self.is_closed:
            yield
        return self._text[self._at : self._at + count]

    def is_followed(self, marker: str, expected: str) -> Waiting[bool]:
        """Returns True if `expected` stands behind `marker`, which comes next, white space aside; reads neither."""
        count = len(marker) + len(expected)
        while True:
            ahead = yield from self.peek(count)
            rest = ahead[len(marker) :].lstrip()
            if len(rest) >= len(expected) or len(ahead) < count:
                return rest.startswith(expected)
            count += len(expected) - len(rest)

    def accept(self, expected: str) -> Waiting[bool]:
        """Reads `expected` if it comes next, and returns True then; waits only for as long as it may come."""
        while True:
            have = self._text[self._at : self._at + len(expected)]
            if have == expected:
                self._at += len(expected)
                return True
            if self.is_closed or not expected.startswith(have):
                return False
            yield

    def accept_end(self, marker: str) -> Waiting[bool]:
        """Reads a marker that ends something, as `accept` does; if the text is cut within it, reads its beginning."""
        if (yield from self.accept(marker)):
            return True
        if self.is_closed and marker.startswith(self.available):
            self._at = len(self._text)
        return False

    def skip_space(self) -> Waiting[str]:
        """Reads white space and returns it."""
        skipped = ""
        while True:
            rest = self._text[self._at :]
            length = len(rest) - len(rest.lstrip())
            skipped += self.take(length)
            if length < len(rest) or self.is_closed:
                return skipped
            yield

    def word(self, longest: int = 128) -> Waiting[str]:
        """Reads letters, digits, `_`, `-` and `.` as far as they go, or up to so many."""
        word = ""
        while len(word) < longest:
            character = yield from self.peek()
            if not (character.isalnum() or character in _IN_WORDS) or not character:
                break
            word += self.take(1)
        return word

    def through(self, markers: Sequence[str], emit: TextSink) -> Waiting[str | None]:
        """Emits the text before the first of `markers` and reads the marker. Returns it, or None if the text ended
        without.
        """
        marker = yield from self.until(markers, emit)
        self._at += len(marker or "")
        return marker

    def until(self, markers: Sequence[str], emit: TextSink) -> Waiting[str | None]:
        """Emits the text before the first of `markers`. Returns the marker, unread, or None if the text ended without.

        The end of the text is buffered for as long as it may begin a marker. No marker may begin another, or contain
        the beginning of another.
        """
        while True:
            rest = self._text[self._at :]
            found = min(((at, marker) for marker in markers if (at := rest.find(marker)) >= 0), default=None)
            certain = len(rest) if found is None else found[0]
            if found is None and not self.is_closed:
                certain -= _beginning_at_end(rest, markers)
            self._at += certain
            if certain:
                emit(rest[:certain])
            if found is not None:
                return found[1]
            if self.is_closed:
                return None
            yield


def _beginning_at_end(text: str, markers: Sequence[str]) -> int:
    """Returns the length of the longest end of `text` that begins a marker."""
    return max((_beginning_of(marker, text) for marker in markers), default=0)


def _beginning_of(marker: str, text: str) -> int:
    at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while at >= 0:
        if marker.startswith(text[at:]):
            return len(text) - at
        at = text.find(marker[0], at + 1)
    return 0
