"""How stages with a GPU each hand on hidden states and tokens: NCCL's send and receive, beside what is computed.

Hidden states and tokens have a communicator each, and so a stream: on one of them a stage that sends hidden states
would wait for the next one, which waits on its own stream with tokens for this one.
"""

from typing import TYPE_CHECKING

import torch
import torch.distributed
from torch import Tensor

from mini_infer_engine.communication.stage_link import GroupLink

if TYPE_CHECKING:
    from torch.distributed import Work


class NcclLink(GroupLink):
    """See `GroupLink`. What is sent or received waits for what was launched before it; the host waits for nothing."""

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
        """Send something each way, with all ranks at the same time: communicators are made when they are first used."""
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
        """See `GroupLink.begin_send`."""
        work = torch.distributed.isend(tensor, rank, group=self._groups[forwards])
        assert work is not None
        return work

    def begin_receive(self, out: Tensor, rank: int, *, forwards: bool) -> "Work":
        """See `GroupLink.begin_receive`."""
        work = torch.distributed.irecv(out, rank, group=self._groups[forwards])
        assert work is not None
        return work
