"""Remembers prompts, so that a new prompt reuses the token count and block keys of one with the same beginning.

A mark is a position in a text after an added token: whatever follows there, the token ids before it stay the same. A
new prompt reuses everything up to the last mark within the common part, compared character by character. A chat
therefore costs only its new part, and a template that changes earlier text costs only a failed comparison. Pure: no
tokenizer, no clock.
"""

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from mini_infer_contract.blocks import KEY_BYTES
from mini_infer_gateway.index.key_chain import KeyChain

MIN_CHARACTERS = 4096
"""Smallest length of a remembered text; a shorter one is tokenised again in about a millisecond."""
MAX_MARKS = 24
"""Largest number of marks of a text: the last ones, near which the next turn diverges."""
_TAIL_CHARACTERS = 64
_REPLACED_CHARACTERS = 4096
"""Distance from the last mark within which a text that diverges from a remembered one replaces it."""
_ENTRY_BYTES = 1500
CHUNK_CHARACTERS = 16 << 10
"""Characters of a chunk of a remembered text: it is copied and compared without a system call for memory."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A position in a text before which the token ids are fixed."""

    end: int
    """Number of characters before the position."""
    tokens: int
    rest: tuple[int, ...]
    """Token ids between the last full block and the position."""


class CachedPrompt:
    """The beginning of a text, up to its last mark, with its block keys.

    The text is stored in chunks, most of them shared with the text that it extends, so that a turn copies only its new
    part.
    """

    __slots__ = ("_chunks", "_tails", "keys", "kind", "marks", "size_bytes")

    def __init__(
        self,
        kind: Hashable,
        text: str,
        keys: KeyChain,
        marks: tuple[Mark, ...],
        grown_from: "tuple[CachedPrompt, Mark] | None" = None,
    ) -> None:
        """`kind` is whatever else the keys depend on. `keys` include those of all blocks before the last mark."""
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
        """Returns the last mark up to which `text` has the same characters."""
        for mark, tail in zip(reversed(self.marks), reversed(self._tails), strict=True):
            if text.startswith(tail, mark.end - len(tail)) and self._begins(text, mark.end):
                return mark
        return None

    def beginnings(self) -> list[Hashable]:
        """Returns the keys under which the text is found, also by a slightly shorter text."""
        level = _level(self.marks[-1].end)
        return [_beginning(self.kind, self._part, level - less) for less in range(min(2, level + 1))]

    def _begins(self, text: str, end: int) -> bool:
        """True if the first `end` characters are the same."""
        whole = end // CHUNK_CHARACTERS
        chunks = enumerate(self._chunks[:whole])
        if not all(text.startswith(chunk, number * CHUNK_CHARACTERS) for number, chunk in chunks):
            return False
        rest = end - whole * CHUNK_CHARACTERS
        return not rest or text.startswith(self._chunks[whole][:rest], whole * CHUNK_CHARACTERS)

    def _part(self, start: int, end: int) -> str:
        """Returns some characters, which lie within one or two chunks."""
        start = max(0, start)
        number = start // CHUNK_CHARACTERS
        offset = number * CHUNK_CHARACTERS
        return "".join(self._chunks[number : number + 2])[start - offset : end - offset]


class PromptCache:
    """The most recently used texts, at most `max_bytes` of them. Threads may share it."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._all: OrderedDict[CachedPrompt, None] = OrderedDict()  # the least recently used first
        self._bytes = 0
        self._by_beginning: dict[Hashable, list[CachedPrompt]] = {}

    def find(self, kind: Hashable, text: str) -> tuple[CachedPrompt, Mark] | None:
        """Returns the longest known beginning of `text`."""
        if len(text) < MIN_CHARACTERS:
            return None

        def part(start: int, end: int) -> str:
            return text[max(0, start) : end]

        with self._lock:
            for level in range(_level(len(text)), -1, -1):
                best: tuple[CachedPrompt, Mark] | None = None
                for entry in self._by_beginning.get(_beginning(kind, part, level), ()):
                    mark = entry.mark_in(text)
                    if mark and (best is None or mark.end > best[1].end):
                        best = entry, mark
                if best:
                    self._all.move_to_end(best[0])
                    return best
        return None

    def add(self, entry: CachedPrompt, instead_of: tuple[CachedPrompt, Mark] | None) -> None:
        """Stores a text whose last mark is at MIN_CHARACTERS or later. `instead_of` is the result of `find` for it."""
        size = entry.size_bytes
        if size > self.max_bytes // 4:
            return
        with self._lock:
            if instead_of:
                replaced, mark = instead_of
                if replaced.marks[-1].end - mark.end < _REPLACED_CHARACTERS and replaced in self._all:
                    self._remove(replaced)
            self._all[entry] = None
            self._bytes += size
            for key in entry.beginnings():
                self._by_beginning.setdefault(key, []).append(entry)
            while self._bytes > self.max_bytes:
                self._remove(next(iter(self._all)))

    def _remove(self, entry: CachedPrompt) -> None:
        del self._all[entry]
        self._bytes -= entry.size_bytes
        for key in entry.beginnings():
            entries = self._by_beginning[key]
            entries.remove(entry)
            if not entries:
                del self._by_beginning[key]


def _level(characters: int) -> int:
    """Returns how often MIN_CHARACTERS can be doubled within a text of this length."""
    return (characters // MIN_CHARACTERS).bit_length() - 1


def _beginning(kind: Hashable, part: Callable[[int, int], str], level: int) -> Hashable:
    """Returns a sample of a text's first MIN_CHARACTERS * 2**level characters, as a key."""
    length = MIN_CHARACTERS << level
    return kind, level, part(length // 2, length // 2 + 64), part(length - 64, length)
