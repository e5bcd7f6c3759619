"""Wraps the forwards of modules of which a rank has a part, so that their results are those of whole modules.

It knows neither plans nor parameters. The collectives are those of the pass that runs in this thread.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from mini_infer_engine.config.parallelism.tensor_parallel import Shard
from mini_infer_engine.ops.base import Ops


class RankOps(Protocol):
    """The operations by which modules of a rank communicate: `ops.Ops`, or collectives."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum of all ranks' x, which may be overwritten."""

    def gather_columns(self, x: Tensor, width: int) -> Tensor:
        """Returns the first `width` columns of all ranks' x [rows, columns] side by side."""


_rank_ops: ContextVar[RankOps] = ContextVar("operations of the rank")


@contextmanager
def communicating(ops: RankOps) -> Iterator[None]:
    """Has sharded modules that run in this thread communicate by `ops`."""
    token = _rank_ops.set(ops)
    try:
        yield
    finally:
        _rank_ops.reset(token)


def pass_ops() -> Ops:
    """Returns the operations of the pass that runs in this thread."""
    return cast("Ops", _rank_ops.get())


def gather(x: Tensor, width: int) -> Tensor:
    """Returns the columns of all ranks' x [..., columns] side by side."""
    return _rank_ops.get().gather_columns(x.flatten(0, -2), width).view(*x.shape[:-1], width)


def summed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns a forward whose result is the sum of all ranks'."""

    def run(*arguments: Any, **named: Any) -> Tensor:
        return _rank_ops.get().all_reduce(forward(*arguments, **named))

    return run


def gathered(forward: Callable[[Tensor], Tensor], width: int) -> Callable[[Tensor], Tensor]:
    """Returns a forward whose result has the columns of all ranks."""

    def run(x: Tensor) -> Tensor:
        return gather(forward(x), width)

    return run


def own_columns(forward: Callable[[Tensor], Tensor], columns: Shard) -> Callable[[Tensor], Tensor]:
    """Returns a forward that takes the columns of all ranks, and reads this rank's."""
    ((begin, end),) = columns.ranges

    def run(x: Tensor) -> Tensor:
        return forward(x[..., begin:end])

    return run


def own_experts(forward: Callable[..., Tensor], experts: tuple[int, int], elsewhere: int) -> Callable[..., Tensor]:
    """Returns a forward over this rank's experts, whose results for tokens of other experts are zeros.

    `elsewhere` is the index that stands for an expert of another rank.
    """
    begin, end = experts

    def run(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        is_here = (top_k_index >= begin) & (top_k_index < end)
        indices = torch.where(is_here, top_k_index - begin, elsewhere)
        return forward(hidden_states, indices, top_k_weights.masked_fill(~is_here, 0))

    return run
