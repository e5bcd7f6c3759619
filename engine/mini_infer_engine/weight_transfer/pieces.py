"""Divides tensors into pieces, the unit of transfer and of digests. Pure; no torch here."""

from collections.abc import Sequence
from typing import NamedTuple

from mini_infer_engine.weight_transfer.messages import TensorSpec

PIECE_BYTES = 8 << 20
"""Bytes of a piece: large enough that Python costs little, small enough for pinned buffers of each connection."""


class Piece(NamedTuple):
    """A range of bytes of one tensor."""

    tensor: int
    """Index of the tensor in the manifest."""
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the piece."""
        return self.end - self.begin


def pieces_of(tensors: Sequence[TensorSpec], piece_bytes: int = PIECE_BYTES) -> list[Piece]:
    """Returns the pieces of all tensors in order; a tensor without bytes has none."""
    return [
        Piece(index, begin, min(begin + piece_bytes, spec.num_bytes))
        for index, spec in enumerate(tensors)
        for begin in range(0, spec.num_bytes, piece_bytes)
    ]


def manifest_fault(ours: Sequence[TensorSpec], theirs: Sequence[TensorSpec]) -> str:
    """Returns the first difference of a peer's manifest from this model's tensors, or an empty string."""
    if len(ours) != len(theirs):
        return f"{len(theirs)} tensors, and this model has {len(ours)}"
    for our, their in zip(ours, theirs, strict=True):
        if our != their:
            return f"tensor {their.name[:100]!r} {their.dtype} {list(their.shape)}, and this model has {our}"
    return ""
