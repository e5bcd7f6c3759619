"""The block keys of a long prompt in one piece of memory: 16 bytes a key instead of an object and a pointer to it."""

from collections.abc import Sequence
from typing import overload

from mini_infer_contract.blocks import KEY_BYTES


class KeyChain(Sequence[bytes]):
    """Read like a list of keys."""

    __slots__ = ("_length", "packed")

    def __init__(self, packed: bytes) -> None:
        self.packed = packed
        """All keys, one after the other."""
        self._length = len(packed) // KEY_BYTES

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, position: int) -> bytes: ...
    @overload
    def __getitem__(self, position: slice) -> "KeyChain": ...
    def __getitem__(self, position: int | slice) -> "bytes | KeyChain":
        if isinstance(position, slice):
            start, stop, step = position.indices(self._length)
            if step != 1:
                raise ValueError("keys are taken in order")
            return KeyChain(self.packed[start * KEY_BYTES : max(start, stop) * KEY_BYTES])
        if position < 0:
            position += self._length
        if not 0 <= position < self._length:
            raise IndexError(position)
        return self.packed[position * KEY_BYTES : (position + 1) * KEY_BYTES]
