"""Defines the collective operations of a tensor-parallel group. Every rank calls the same ones in the same order.

All ranks get the same bits, so that they go on with equal activations and sample equal tokens.
"""

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from mini_infer_engine.config.parallelism.tensor_parallel import ALONE, TensorParallel

if TYPE_CHECKING:
    from mini_infer_engine.communication.peer_memory import PeerMemory


class Collectives(Protocol):
    """The collective operations of one group, as one of its ranks calls them."""

    parallel: TensorParallel

    @property
    def kind(self) -> str:
        """Name of the implementation, for people."""

    @property
    def peers(self) -> "PeerMemory | None":
        """Memory that all ranks read, for kernels that leave their results there. None if there is none."""

    def begin(self, hidden: Tensor) -> Tensor:
        """Sums the embeddings of all ranks, with which every pass begins. Returns the same as `all_reduce`."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum of all ranks' x, which may be overwritten."""

    def gather_columns(self, x: Tensor, width: int, out: Tensor | None = None) -> Tensor:
        """Returns the first `width` columns of all ranks' x [rows, columns] side by side, in `out` if it is given."""


class WithoutPeerMemory:
    """The common part of all implementations that send messages instead of reading peer memory."""

    peers: "PeerMemory | None" = None

    def begin(self, hidden: Tensor) -> Tensor:
        """Sums the embeddings like any other tensor."""
        return self.all_reduce(hidden)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sums x over all ranks. Subclasses implement it."""
        raise NotImplementedError


class NoCollectives(WithoutPeerMemory):
    """Collectives of a single rank, or of one that leaves out the others for a while."""

    kind = "none"

    def __init__(self, parallel: TensorParallel = ALONE) -> None:
        self.parallel = parallel

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns x itself."""
        return x

    def gather_columns(self, x: Tensor, width: int, out: Tensor | None = None) -> Tensor:
        """Returns the first columns of x. Columns of other ranks are zero, or left as they are in `out`."""
        if x.shape[1] >= width:
            x = x[:, :width]
            return x if out is None else out.copy_(x)
        out = x.new_zeros((x.shape[0], width)) if out is None else out
        out[:, : x.shape[1]] = x
        return out


NO_COLLECTIVES = NoCollectives()


class GlooCollectives(WithoutPeerMemory):
    """Collectives between CPUs, by gloo."""

    kind = "gloo"

    def __init__(self, parallel: TensorParallel, group: torch.distributed.ProcessGroup) -> None:
        self.parallel, self._group = parallel, group

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sums x in place if it is contiguous, and waits for the result."""
        x = x.contiguous()
        self._group.allreduce([x]).wait()
        return x

    def gather_columns(self, x: Tensor, width: int, out: Tensor | None = None) -> Tensor:
        """Gathers whole parts by an all-gather, and then cuts them to `width` columns."""
        x = x.contiguous()
        parts = x.new_empty((self.parallel.size, *x.shape))
        self._group.allgather([list(parts.unbind(0))], [x]).wait()
        gathered = parts.transpose(0, 1).reshape(x.shape[0], -1)[:, :width]
        return gathered if out is None else out.copy_(gathered)
