"""What ranks of a tensor-parallel group compute together, in lock-step: every rank calls the same in the same order.

All ranks get the same bits, so that they go on with equal activations and sample equal tokens.
"""

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from mini_infer_engine.config.parallelism.tensor_parallel import ALONE, TensorParallel

if TYPE_CHECKING:
    from mini_infer_engine.communication.peer_memory import PeerMemory


class Collectives(Protocol):
    """One group, as a rank sees it."""

    parallel: TensorParallel

    @property
    def kind(self) -> str:
        """For people."""

    @property
    def peers(self) -> "PeerMemory | None":
        """Memory that all ranks read, for verbs that leave their results there."""

    def begin(self, hidden: Tensor) -> Tensor:
        """`all_reduce` of embeddings, with which every pass begins."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, which may be written over."""

    def gather_columns(self, x: Tensor, width: int, out: Tensor | None = None) -> Tensor:
        """The first `width` columns of all ranks' x [rows, columns] side by side, into `out` where one is given."""


class WithoutPeerMemory:
    """What is the same for all collectives that move messages."""

    peers: "PeerMemory | None" = None

    def begin(self, hidden: Tensor) -> Tensor:
        """See `Collectives.begin`."""
        return self.all_reduce(hidden)

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Collectives.all_reduce`."""
        raise NotImplementedError


class NoCollectives(WithoutPeerMemory):
    """Of a rank that is alone, or that passes over the others for a while."""

    kind = "none"

    def __init__(self, parallel: TensorParallel = ALONE) -> None:
        self.parallel = parallel

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Collectives.all_reduce`: x itself."""
        return x

    def gather_columns(self, x: Tensor, width: int, out: Tensor | None = None) -> Tensor:
        """See `Collectives.gather_columns`: of other ranks, what is there by chance."""
        if x.shape[1] >= width:
            x = x[:, :width]
            return x if out is None else out.copy_(x)
        out = x.new_zeros((x.shape[0], width)) if out is None else out
        out[:, : x.shape[1]] = x
        return out


NO_COLLECTIVES = NoCollectives()


class GlooCollectives(WithoutPeerMemory):
    """Between CPUs."""

    kind = "gloo"

    def __init__(self, parallel: TensorParallel, group: torch.distributed.ProcessGroup) -> None:
        self.parallel, self._group = parallel, group

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Collectives.all_reduce`."""
        x = x.contiguous()
        self._group.allreduce([x]).wait()
        return x

    def gather_columns(self, x: Tensor, width: int, out: Tensor | None = None) -> Tensor:
        """See `Collectives.gather_columns`."""
        x = x.contiguous()
        parts = x.new_empty((self.parallel.size, *x.shape))
        self._group.allgather([list(parts.unbind(0))], [x]).wait()
        gathered = parts.transpose(0, 1).reshape(x.shape[0], -1)[:, :width]
        return gathered if out is None else out.copy_(gathered)
