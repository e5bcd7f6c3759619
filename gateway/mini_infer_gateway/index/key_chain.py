"""The block keys of a long prompt: 16 bytes a key instead of an object and a pointer to it, most of them shared.

A prompt that grew from another one takes over its chunks, so a turn of a long chat costs memory for what is new of it.
"""

from collections.abc import Sequence
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
