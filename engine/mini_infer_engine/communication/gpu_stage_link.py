"""Hands on hidden states and tokens between pipeline stages with a GPU each, by NCCL send and receive beside the
computation.

Hidden states and tokens have a communicator each, and therefore a stream each. On a single one, a stage that sends
hidden states would wait for the next stage, which waits on its own stream with tokens for this one.
"""

from typing import TYPE_CHECKING

import torch
import torch.distributed
from torch import Tensor

from mini_infer_engine.communication.stage_link import GroupLink

if TYPE_CHECKING:
    from torch.distributed import Work


class NcclLink(GroupLink):
    """Implements `GroupLink` by NCCL. A send or receive runs after the work launched before it; the host
    never waits.
    """

    def __init__(
        self,
        index: int,
        size: int,
        rank: int,
        forwards: torch.distributed.ProcessGroup,
        backwards: torch.distributed.ProcessGroup,
        device: torch.device,
    ) -> None:
        super().__init__(index, size, rank, forwards.size())
        self._groups = (backwards, forwards)
        self._device = device

    def open(self) -> None:
        """Sends a tensor in each direction, with all ranks at the same time, because communicators are created at first
        use.
        """
        something = torch.zeros(1, dtype=torch.int64, device=self._device)
        if self.index > 0:
            self.receive_hidden(something)
        if self.index < self.size - 1:
            self.send_hidden(something)
        if self.index == self.size - 1:
            self.send_tokens(something)
        elif self.index == 0:
            self.receive_tokens(something)
        torch.cuda.synchronize(self._device)

    def begin_send(self, tensor: Tensor, rank: int, *, forwards: bool) -> "Work":
        """Queues a send on the communicator of this direction."""
        work = torch.distributed.isend(tensor, rank, group=self._groups[forwards])
        assert work is not None
        return work

    def begin_receive(self, out: Tensor, rank: int, *, forwards: bool) -> "Work":
        """Queues a receive on the communicator of this direction."""
        work = torch.distributed.irecv(out, rank, group=self._groups[forwards])
        assert work is not None
        return work
