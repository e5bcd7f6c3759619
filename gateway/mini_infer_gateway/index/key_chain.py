"""The block keys of a long prompt: 16 bytes a key instead of an object and a pointer to it, most of them shared.

A prompt that grew from another one takes over its chunks, so a turn of a long chat costs memory for what is new of it.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from struct import unpack
from typing import overload

from mini_infer_contract.blocks import KEY_BYTES

CHUNK_KEYS = 256
FEW_BISECTIONS = 4
"""Of one prompt's keys, after which all are taken out."""
REMEMBERED_CHUNKS = 256
"""Whose keys stay taken out: a million tokens of chats, in 5 MB."""
_CHUNK_BYTES = CHUNK_KEYS * KEY_BYTES


class Lookup:
    """A prompt's keys while endpoints are asked one by one how many of them, from the first on, they hold.

    Each is first thought to hold as much as the one before. Where that is wrong several times, all keys are taken out
    of their chunks, which costs as much as some bisections, and makes those that follow three times as fast.
    """

    __slots__ = ("_bisections", "_keys", "_likely", "_listed", "_packed", "first", "length")

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys = keys
        self._packed = keys.packed() if isinstance(keys, KeyChain) else b"".join(keys)
        self.length, self.first = len(keys), self._packed[:KEY_BYTES]
        self._likely: dict[int, tuple[int, bytes, bytes]] = {}
        """By step: what was found last, the last key of it, and the one that was not held."""
        self._listed: dict[int, list[bytes]] = {}
        """By step: the last key of each run of so many, the deepest first."""
        self._bisections = 0

    def last_of(self, blocks: int) -> bytes:
        """The last key of so many, from the first on; no key where there are not so many."""
        end = blocks * KEY_BYTES
        return self._packed[end - KEY_BYTES : end]

    def deepest(self, holds: Callable[[bytes], bool], low: int, high: int, step: int = 1) -> int:
        """How many runs of `step` keys are held.

        The first `low` runs are known to be held, those after `high` not to be; `holds` is asked for a run's last key.
        """
        if listed := self._listed.get(step):
            count = len(listed)
            return count - bisect_left(listed, True, count - high, count - low, key=holds)
        if likely := self._likely.get(step):
            runs, last, following = likely
            if low <= runs <= high and holds(last) and not holds(following):
                return runs
        runs = self._bisect(holds, low, high, step)
        self._likely[step] = runs, self.last_of(runs * step), self.last_of(runs * step + step)
        self._bisections += 1
        if self._bisections == FEW_BISECTIONS:
            listed = self._keys.to_list() if isinstance(self._keys, KeyChain) else list(self._keys)
            self._listed[step] = listed = listed[step - 1 :: step] if step > 1 else listed
            listed.reverse()
        return runs

    def _bisect(self, holds: Callable[[bytes], bool], low: int, high: int, step: int) -> int:
        packed, run_bytes = self._packed, step * KEY_BYTES
        while low < high:
            middle = (low + high + 1) >> 1
            end = middle * run_bytes
            if holds(packed[end - KEY_BYTES : end]):
                low = middle
            else:
                high = middle - 1
        return low


def _unpacked(keys: bytes) -> tuple[bytes, ...]:
    return unpack("16s" * (len(keys) // KEY_BYTES), keys)


@lru_cache(maxsize=REMEMBERED_CHUNKS)
def _keys_of_chunk(chunk: bytes) -> tuple[bytes, ...]:
    """Of a whole one, which the next turn of the same chat has too."""
    return _unpacked(chunk)


class KeyChain(Sequence[bytes]):
    """Read like a list of keys."""

    __slots__ = ("_chunks", "_length")

    def __init__(self, keys: Sequence[bytes], begin: "KeyChain | None" = None, blocks: int = 0) -> None:
        """The first `blocks` keys of `begin`, and `keys`."""
        whole = blocks // CHUNK_KEYS
        self._chunks: list[bytes] = []
        if begin:
            self._chunks += begin._chunks[:whole]
        rest = b"".join(keys)
        if begin and blocks % CHUNK_KEYS:
            rest = begin._chunks[whole][: blocks % CHUNK_KEYS * KEY_BYTES] + rest
        self._chunks += [rest[start : start + _CHUNK_BYTES] for start in range(0, len(rest), _CHUNK_BYTES)]
        self._length = blocks + len(keys)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.to_list())

    def to_list(self) -> list[bytes]:
        """All keys."""
        keys: list[bytes] = []
        for chunk in self._chunks:
            keys += _keys_of_chunk(chunk) if len(chunk) == _CHUNK_BYTES else _unpacked(chunk)
        return keys

    def packed(self) -> bytes:
        """All keys, one behind the other."""
        return b"".join(self._chunks)

    @overload
    def __getitem__(self, position: int) -> bytes: ...
    @overload
    def __getitem__(self, position: slice) -> list[bytes]: ...
    def __getitem__(self, position: int | slice) -> bytes | list[bytes]:
        if isinstance(position, slice):
            start, stop, step = position.indices(self._length)
            if step != 1:
                return self.to_list()[position]
            return list(_unpacked(self.packed()[start * KEY_BYTES : stop * KEY_BYTES]))
        if position < 0:
            position += self._length
        if not 0 <= position < self._length:
            raise IndexError(position)
        start = position % CHUNK_KEYS * KEY_BYTES
        return self._chunks[position // CHUNK_KEYS][start : start + KEY_BYTES]
