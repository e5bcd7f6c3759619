"""The block keys of a long prompt: 16 bytes a key instead of an object and a pointer to it, most of them shared.

A prompt that extends another one reuses its chunks, so a turn of a long chat costs memory only for its new part.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from struct import unpack
from typing import overload

from mini_infer_contract.blocks import KEY_BYTES

CHUNK_KEYS = 256
FEW_BISECTIONS = 4
"""Number of bisections over one prompt's keys after which all keys are unpacked."""
CACHED_CHUNKS = 256
"""Number of chunks whose keys stay unpacked: a million tokens of chats, in 5 MB."""
_CHUNK_BYTES = CHUNK_KEYS * KEY_BYTES


class Lookup:
    """Finds how many of a prompt's keys, from the first on, each of several endpoints has cached.

    Each endpoint is first assumed to have as many cached as the previous one. If that is wrong several times, all keys
    are unpacked from their chunks. That costs as much as some bisections, and makes further ones three times as fast.
    """

    __slots__ = ("_bisections", "_keys", "_likely", "_listed", "_packed", "first", "length")

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys = keys
        self._packed = keys.packed() if isinstance(keys, KeyChain) else b"".join(keys)
        self.length, self.first = len(keys), self._packed[:KEY_BYTES]
        self._likely: dict[int, tuple[int, bytes, bytes]] = {}
        """By step: the last result, the last key of it, and the following key, which was not cached."""
        self._listed: dict[int, list[bytes]] = {}
        """By step: the last key of each run of `step` keys, the deepest first."""
        self._bisections = 0

    def last_of(self, blocks: int) -> bytes:
        """Returns the last key of the first `blocks` keys; empty if there are fewer."""
        end = blocks * KEY_BYTES
        return self._packed[end - KEY_BYTES : end]

    def deepest(self, contains: Callable[[bytes], bool], low: int, high: int, step: int = 1) -> int:
        """Returns the number of cached runs of `step` keys.

        The first `low` runs are known to be cached, and those after `high` not to be. `contains` is called with a run's
        last key.
        """
        if listed := self._listed.get(step):
            count = len(listed)
            return count - bisect_left(listed, True, count - high, count - low, key=contains)
        if likely := self._likely.get(step):
            runs, last, following = likely
            if low <= runs <= high and contains(last) and not contains(following):
                return runs
        runs = self._bisect(contains, low, high, step)
        self._likely[step] = runs, self.last_of(runs * step), self.last_of(runs * step + step)
        self._bisections += 1
        if self._bisections == FEW_BISECTIONS:
            listed = self._keys.to_list() if isinstance(self._keys, KeyChain) else list(self._keys)
            self._listed[step] = listed = listed[step - 1 :: step] if step > 1 else listed
            listed.reverse()
        return runs

    def _bisect(self, contains: Callable[[bytes], bool], low: int, high: int, step: int) -> int:
        packed, run_bytes = self._packed, step * KEY_BYTES
        while low < high:
            middle = (low + high + 1) >> 1
            end = middle * run_bytes
            if contains(packed[end - KEY_BYTES : end]):
                low = middle
            else:
                high = middle - 1
        return low


def _unpacked(keys: bytes) -> tuple[bytes, ...]:
    return unpack("16s" * (len(keys) // KEY_BYTES), keys)


@lru_cache(maxsize=CACHED_CHUNKS)
def _keys_of_chunk(chunk: bytes) -> tuple[bytes, ...]:
    """Unpacks a whole chunk, which the next turn of the same chat contains too."""
    return _unpacked(chunk)


class KeyChain(Sequence[bytes]):
    """A sequence of keys, packed in chunks."""

    __slots__ = ("_chunks", "_length")

    def __init__(self, keys: Sequence[bytes], begin: "KeyChain | None" = None, blocks: int = 0) -> None:
        """Joins the first `blocks` keys of `begin` and `keys`."""
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
        """Returns all keys."""
        keys: list[bytes] = []
        for chunk in self._chunks:
            keys += _keys_of_chunk(chunk) if len(chunk) == _CHUNK_BYTES else _unpacked(chunk)
        return keys

    def packed(self) -> bytes:
        """Returns all keys as one string of bytes."""
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
