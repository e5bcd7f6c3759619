"""The block keys of a long prompt: 16 bytes a key instead of an object and a pointer to it, most of them shared.

A prompt that grew from another one takes over its chunks, so a turn of a long chat costs memory for what is new of it.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from struct import unpack
from typing import Protocol, overload

from mini_infer_contract.blocks import KEY_BYTES

CHUNK_KEYS = 256
_CHUNK_BYTES = CHUNK_KEYS * KEY_BYTES


class Keys(Protocol):
    """What looking up needs of a prompt's keys."""

    def __len__(self) -> int: ...
    def __getitem__(self, position: int, /) -> bytes: ...


class Probes(dict[int, bytes]):
    """Keys of a prompt that several look at in the same few places: each is taken out of its chunk once."""

    __slots__ = ("_keys", "_length")

    def __init__(self, keys: Sequence[bytes]) -> None:
        super().__init__()
        self._keys, self._length = keys, len(keys)

    def __missing__(self, position: int) -> bytes:
        key = self[position] = self._keys[position]
        return key

    def __len__(self) -> int:
        return self._length


class ListedKeys(list[bytes]):
    """Keys of a prompt that many look at, each in other places: all taken out at once."""

    __slots__ = ("_descending",)

    def __init__(self, keys: Sequence[bytes]) -> None:
        super().__init__(keys)
        self._descending: dict[int, list[bytes]] = {}

    def descending(self, step: int) -> list[bytes]:
        """The last key of each run of `step` keys, the deepest first."""
        listed = self._descending.get(step)
        if listed is None:
            listed = self._descending[step] = self[step - 1 :: step][::-1]
        return listed


def deepest(keys: Keys, holds: Callable[[bytes], bool], low: int, high: int, step: int = 1) -> int:
    """How many runs of `step` keys are held, from the first on, by bisection.

    The first `low` runs are known to be held, those after `high` not to be; `holds` is asked for a run's last key.
    """
    if isinstance(keys, ListedKeys):  # The library's bisection is ten times as fast as the one below.
        listed = keys.descending(step)
        count = len(listed)
        return count - bisect_left(listed, True, count - high, count - low, key=holds)
    while low < high:
        middle = (low + high + 1) >> 1
        if holds(keys[middle * step - 1]):
            low = middle
        else:
            high = middle - 1
    return low


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
        return chain.from_iterable(unpack("16s" * (len(chunk) // KEY_BYTES), chunk) for chunk in self._chunks)

    @overload
    def __getitem__(self, position: int) -> bytes: ...
    @overload
    def __getitem__(self, position: slice) -> list[bytes]: ...
    def __getitem__(self, position: int | slice) -> bytes | list[bytes]:
        if isinstance(position, slice):
            return [self[number] for number in range(*position.indices(self._length))]
        if position < 0:
            position += self._length
        if not 0 <= position < self._length:
            raise IndexError(position)
        start = position % CHUNK_KEYS * KEY_BYTES
        return self._chunks[position // CHUNK_KEYS][start : start + KEY_BYTES]
