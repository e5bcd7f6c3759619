"""Computes each row's largest magnitude, from which its scale follows; over all ranks if they share out the columns."""

from collections.abc import Callable

from torch import Tensor

from mini_infer_engine.communication.collectives import Collectives

OverRanks = Callable[[Tensor], Tensor]
"""Maps this rank's maxima [rows, 1] to the largest of all ranks."""


def row_maxima(weight: Tensor) -> Tensor:
    """Returns the largest magnitude of each row of [rows, columns], [rows, 1] fp32."""
    return weight.abs().amax(dim=1, keepdim=True).float()


def as_here(maxima: Tensor) -> Tensor:
    """Returns the maxima unchanged, for rows that are whole on each rank."""
    return maxima


def over_ranks_of(collectives: Collectives) -> OverRanks:
    """Returns a function that takes maxima over all ranks; every rank must call it for the same tensors, in the same
    order.
    """
    size = collectives.parallel.size
    if size == 1:
        return as_here
    return lambda maxima: collectives.gather_columns(maxima, size).amax(dim=1, keepdim=True)
