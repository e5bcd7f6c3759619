"""Prompts of before: how far their text, token count and block keys can be taken over into one that begins alike.

A mark is a place in a text behind an added token: whatever follows there, the token ids before it stay. A new prompt
takes over all up to the last mark that lies in the common part, compared character by character, so a chat costs what
is new of it, and a template that changes what is behind costs a comparison that fails. Pure: no tokenizer, no clock.
"""

import sys
import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

MIN_CHARACTERS = 4096
"""Shorter texts are tokenised again, which takes about a millisecond at most."""
MAX_MARKS = 24
"""Kept of a text: the last ones, where the next turn parts from this one."""
_TAIL_CHARACTERS = 64
_REPLACED_CHARACTERS = 4096
"""A text that parts from another one this close to its last mark stands for it."""
_ENTRY_BYTES = 1500


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a text."""

    end: int
    """Characters before it."""
    tokens: int
    rest: tuple[int, ...]
    """The token ids after the last full block before it."""


@dataclass(frozen=True, slots=True, eq=False)
class Remembered:
    """A text with its block keys and marks."""

    kind: Hashable
    """What else the keys depend on."""
    text: str
    packed_keys: bytes
    marks: tuple[Mark, ...]
    """In order."""
    tails: tuple[str, ...] = field(init=False)
    """The characters before each mark: most comparisons that fail, fail there."""

    def __post_init__(self) -> None:
        tails = tuple(self.text[max(0, mark.end - _TAIL_CHARACTERS) : mark.end] for mark in self.marks)
        object.__setattr__(self, "tails", tails)

    def mark_in(self, text: str) -> Mark | None:
        """The last mark whose text `text` begins with."""
        for mark, tail in zip(reversed(self.marks), reversed(self.tails), strict=True):
            if text.startswith(tail, mark.end - len(tail)) and text.startswith(self.text[: mark.end]):
                return mark
        return None

    def size_bytes(self) -> int:
        """Of memory."""
        return sys.getsizeof(self.text) + len(self.packed_keys) + _ENTRY_BYTES


class RememberedPrompts:
    """The texts last seen, at most `max_bytes` of them. It may be shared by threads."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._all: OrderedDict[Remembered, None] = OrderedDict()  # the least recently used first
        self._bytes = 0
        self._by_beginning: dict[Hashable, list[Remembered]] = {}

    def find(self, kind: Hashable, text: str) -> tuple[Remembered, Mark] | None:
        """The longest beginning of `text` that is known."""
        if len(text) < MIN_CHARACTERS:
            return None
        with self._lock:
            for level in range(_level(len(text)), -1, -1):
                best: tuple[Remembered, Mark] | None = None
                for entry in self._by_beginning.get(_beginning(kind, text, level), ()):
                    mark = entry.mark_in(text)
                    if mark and (best is None or mark.end > best[1].end):
                        best = entry, mark
                if best:
                    self._all.move_to_end(best[0])
                    return best
        return None

    def remember(self, entry: Remembered, instead_of: tuple[Remembered, Mark] | None) -> None:
        """Keeps a text whose last mark is at MIN_CHARACTERS or after; `instead_of`: what `find` said of it."""
        size = entry.size_bytes()
        if size > self.max_bytes // 4:
            return
        with self._lock:
            if instead_of:
                known, mark = instead_of
                if known.marks[-1].end - mark.end < _REPLACED_CHARACTERS and known in self._all:
                    self._forget(known)
            self._all[entry] = None
            self._bytes += size
            for key in _beginnings(entry):
                self._by_beginning.setdefault(key, []).append(entry)
            while self._bytes > self.max_bytes:
                self._forget(next(iter(self._all)))

    def _forget(self, entry: Remembered) -> None:
        del self._all[entry]
        self._bytes -= entry.size_bytes()
        for key in _beginnings(entry):
            entries = self._by_beginning[key]
            entries.remove(entry)
            if not entries:
                del self._by_beginning[key]


def _level(characters: int) -> int:
    """How often MIN_CHARACTERS can be doubled without leaving a text of this length."""
    return (characters // MIN_CHARACTERS).bit_length() - 1


def _beginnings(entry: Remembered) -> list[Hashable]:
    """Under which an entry is found: also by a text that is a little shorter than it."""
    level = _level(entry.marks[-1].end)
    return [_beginning(entry.kind, entry.text, level - less) for less in range(min(2, level + 1))]


def _beginning(kind: Hashable, text: str, level: int) -> Hashable:
    """A sample of the text's first MIN_CHARACTERS * 2**level characters."""
    length = MIN_CHARACTERS << level
    return kind, level, text[length // 2 : length // 2 + 64], text[length - 64 : length]
