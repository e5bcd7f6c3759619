"""The largest number of each row, which its scale is made of: where ranks share out the columns, of the whole row."""

from collections.abc import Callable

from torch import Tensor

from mini_infer_engine.communication.collectives import Collectives

OverRanks = Callable[[Tensor], Tensor]
"""From this rank's [rows, 1] to the largest of all ranks'."""


def row_maxima(weight: Tensor) -> Tensor:
    """[rows, 1] fp32 of the magnitudes of [rows, columns]."""
    return weight.abs().amax(dim=1, keepdim=True).float()


def as_here(maxima: Tensor) -> Tensor:
    """Where rows are whole."""
    return maxima


def over_ranks_of(collectives: Collectives) -> OverRanks:
    """All ranks ask for the same, in the same order, once they have come together."""
    size = collectives.parallel.size
    if size == 1:
        return as_here
    return lambda maxima: collectives.gather_columns(maxima, size).amax(dim=1, keepdim=True)
