"""Prompts of before: how far their text, token count and block keys can be taken over into one that begins alike.

A mark is a place in a text behind an added token: whatever follows there, the token ids before it stay. A new prompt
takes over all up to the last mark that lies in the common part, compared character by character, so a chat costs what
is new of it, and a template that changes what is behind costs a comparison that fails. Pure: no tokenizer, no clock.
"""

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from mini_infer_contract.blocks import KEY_BYTES
from mini_infer_gateway.index.key_chain import KeyChain

MIN_CHARACTERS = 4096
"""Shorter texts are tokenised again, which takes about a millisecond at most."""
MAX_MARKS = 24
"""Kept of a text: the last ones, where the next turn parts from this one."""
_TAIL_CHARACTERS = 64
_REPLACED_CHARACTERS = 4096
"""A text that parts from another one this close to its last mark stands for it."""
_ENTRY_BYTES = 1500
CHUNK_CHARACTERS = 16 << 10
"""Of a text that is kept: copied and compared without asking the system for memory."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a text."""

    end: int
    """Characters before it."""
    tokens: int
    rest: tuple[int, ...]
    """The token ids after the last full block before it."""


class Remembered:
    """The beginning of a text, up to its last mark, with its block keys.

    It is kept in chunks, most of them those of the text that it grew from, so that a turn copies what is new.
    """

    __slots__ = ("_chunks", "_tails", "keys", "kind", "marks", "size_bytes")

    def __init__(
        self,
        kind: Hashable,
        text: str,
        keys: KeyChain,
        marks: tuple[Mark, ...],
        grown_from: "tuple[Remembered, Mark] | None" = None,
    ) -> None:
        """`kind`: what else the keys depend on. `keys`: of all blocks before the last mark, or more."""
        self.kind, self.keys, self.marks = kind, keys, marks
        end = marks[-1].end
        self._chunks: list[str] = []
        if grown_from:
            self._chunks += grown_from[0]._chunks[: grown_from[1].end // CHUNK_CHARACTERS]
        for start in range(len(self._chunks) * CHUNK_CHARACTERS, end, CHUNK_CHARACTERS):
            self._chunks.append(text[start : min(end, start + CHUNK_CHARACTERS)])
        self._tails = [text[max(0, mark.end - _TAIL_CHARACTERS) : mark.end] for mark in marks]
        """The characters before each mark: most comparisons that fail, fail there."""
        self.size_bytes = sum(map(sys.getsizeof, self._chunks)) + KEY_BYTES * len(keys) + _ENTRY_BYTES

    def mark_in(self, text: str) -> Mark | None:
        """The last mark whose text `text` begins with."""
        for mark, tail in zip(reversed(self.marks), reversed(self._tails), strict=True):
            if text.startswith(tail, mark.end - len(tail)) and self._begins(text, mark.end):
                return mark
        return None

    def beginnings(self) -> list[Hashable]:
        """Under which it is found: also by a text that is a little shorter."""
        level = _level(self.marks[-1].end)
        return [_beginning(self.kind, self._part, level - less) for less in range(min(2, level + 1))]

    def _begins(self, text: str, end: int) -> bool:
        """Whether the first `end` characters are the same."""
        whole = end // CHUNK_CHARACTERS
        chunks = enumerate(self._chunks[:whole])
        if not all(text.startswith(chunk, number * CHUNK_CHARACTERS) for number, chunk in chunks):
            return False
        rest = end - whole * CHUNK_CHARACTERS
        return not rest or text.startswith(self._chunks[whole][:rest], whole * CHUNK_CHARACTERS)

    def _part(self, start: int, end: int) -> str:
        """Some characters, which lie within one chunk or two."""
        start = max(0, start)
        number = start // CHUNK_CHARACTERS
        offset = number * CHUNK_CHARACTERS
        return "".join(self._chunks[number : number + 2])[start - offset : end - offset]


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

        def part(start: int, end: int) -> str:
            return text[max(0, start) : end]

        with self._lock:
            for level in range(_level(len(text)), -1, -1):
                best: tuple[Remembered, Mark] | None = None
                for entry in self._by_beginning.get(_beginning(kind, part, level), ()):
                    mark = entry.mark_in(text)
                    if mark and (best is None or mark.end > best[1].end):
                        best = entry, mark
                if best:
                    self._all.move_to_end(best[0])
                    return best
        return None

    def remember(self, entry: Remembered, instead_of: tuple[Remembered, Mark] | None) -> None:
        """Keeps a text whose last mark is at MIN_CHARACTERS or after; `instead_of`: what `find` said of it."""
        size = entry.size_bytes
        if size > self.max_bytes // 4:
            return
        with self._lock:
            if instead_of:
                known, mark = instead_of
                if known.marks[-1].end - mark.end < _REPLACED_CHARACTERS and known in self._all:
                    self._forget(known)
            self._all[entry] = None
            self._bytes += size
            for key in entry.beginnings():
                self._by_beginning.setdefault(key, []).append(entry)
            while self._bytes > self.max_bytes:
                self._forget(next(iter(self._all)))

    def _forget(self, entry: Remembered) -> None:
        del self._all[entry]
        self._bytes -= entry.size_bytes
        for key in entry.beginnings():
            entries = self._by_beginning[key]
            entries.remove(entry)
            if not entries:
                del self._by_beginning[key]


def _level(characters: int) -> int:
    """How often MIN_CHARACTERS can be doubled without leaving a text of this length."""
    return (characters // MIN_CHARACTERS).bit_length() - 1


def _beginning(kind: Hashable, part: Callable[[int, int], str], level: int) -> Hashable:
    """A sample of a text's first MIN_CHARACTERS * 2**level characters."""
    length = MIN_CHARACTERS << level
    return kind, level, part(length // 2, length // 2 + 64), part(length - 64, length)
