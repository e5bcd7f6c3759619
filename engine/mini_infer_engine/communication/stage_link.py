"""Hands on data between pipeline stages: hidden states to the next stage, sampled tokens from the last to the first.

Each rank communicates with the same tensor-parallel rank of other stages, in the order of passes, which is the same on
all. A sender never waits for a receiver: sent tensors are kept until they have left.
"""

from collections import deque
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import Work

_SENT_KEPT = 4
"""Sent tensors that are kept, for each stage, because they may still be in flight. The engine has about as many passes
in flight as stages.
"""


class StageLink(Protocol):
    """One rank's connections to other stages. A tensor that is sent belongs to the link from then on."""

    index: int
    """Index of this rank's stage."""
    size: int
    """Number of stages."""

    def open(self) -> None:
        """Begins to transfer, once all ranks have loaded: until then nothing is sent, and zeros are received."""

    def send_hidden(self, hidden: Tensor) -> None:
        """Sends hidden states [tokens, hidden], dense, to the next stage."""

    def receive_hidden(self, out: Tensor) -> Tensor:
        """Receives hidden states from the previous stage into `out`, and returns it."""

    def send_tokens(self, tokens: Tensor) -> None:
        """Sends tokens [tokens] int64 from the last stage to the first."""

    def receive_tokens(self, out: Tensor) -> Tensor:
        """Receives the oldest outstanding tokens into `out` on the first stage, and returns it."""


class NoLink:
    """The link of a model without stages, or one that is not connected yet."""

    def __init__(self, index: int = 0, size: int = 1) -> None:
        self.index, self.size = index, size

    def open(self) -> None:
        """Does nothing."""

    def send_hidden(self, hidden: Tensor) -> None:
        """Drops the hidden states."""

    def receive_hidden(self, out: Tensor) -> Tensor:
        """Returns zeros."""
        return out.zero_()

    def send_tokens(self, tokens: Tensor) -> None:
        """Drops the tokens."""

    def receive_tokens(self, out: Tensor) -> Tensor:
        """Returns zeros."""
        return out.zero_()


NO_LINK = NoLink()


class GroupLink:
    """A link over two process groups of all ranks of all stages, in which the ranks of a stage are consecutive.

    Hidden states and tokens have a group each, so that neither waits for the other, which goes in the other direction.
    """

    def __init__(self, index: int, size: int, rank: int, num_ranks: int) -> None:
        """Computes the neighbours of `rank`, which counts among all ranks."""
        self.index, self.size = index, size
        ranks_per_stage = num_ranks // size
        self._next, self._before = rank + ranks_per_stage, rank - ranks_per_stage
        self._first, self._last = rank % ranks_per_stage, rank % ranks_per_stage + (size - 1) * ranks_per_stage
        self._sent: deque[tuple[Work, Tensor]] = deque()

    def begin_send(self, tensor: Tensor, rank: int, *, forwards: bool) -> "Work":
        """Begins to send to a rank, without waiting for it. Within a group, tensors arrive in the order in which they
        were sent.
        """
        raise NotImplementedError

    def begin_receive(self, out: Tensor, rank: int, *, forwards: bool) -> "Work":
        """Begins to receive from a rank. `out` may be read after `wait`, on a GPU by kernels that are launched after
        it.
        """
        raise NotImplementedError

    def open(self) -> None:
        """Does nothing: the groups are ready."""

    def send_hidden(self, hidden: Tensor) -> None:
        """Sends to the same tensor-parallel rank of the next stage."""
        self._keep(self.begin_send(hidden, self._next, forwards=True), hidden)

    def receive_hidden(self, out: Tensor) -> Tensor:
        """Receives from the same tensor-parallel rank of the previous stage."""
        self.begin_receive(out, self._before, forwards=True).wait()
        return out

    def send_tokens(self, tokens: Tensor) -> None:
        """Sends to the same tensor-parallel rank of the first stage."""
        self._keep(self.begin_send(tokens, self._first, forwards=False), tokens)

    def receive_tokens(self, out: Tensor) -> Tensor:
        """Receives from the same tensor-parallel rank of the last stage."""
        self.begin_receive(out, self._last, forwards=False).wait()
        return out

    def _keep(self, work: "Work", tensor: Tensor) -> None:
        """Keeps a sent tensor until it has left. The oldest one has left long ago, so that waiting for it takes no
        time.
        """
        self._sent.append((work, tensor))
        if len(self._sent) > _SENT_KEPT * self.size:
            self._sent.popleft()[0].wait()


class GlooLink(GroupLink):
    """A link between CPUs, by gloo. One group is enough, because its messages have tags."""

    def __init__(self, index: int, size: int, rank: int, group: torch.distributed.ProcessGroup) -> None:
        super().__init__(index, size, rank, group.size())
        self._group = group

    def begin_send(self, tensor: Tensor, rank: int, *, forwards: bool) -> "Work":
        """Begins to send, with the direction as the tag."""
        return self._group.send([tensor], rank, int(forwards))

    def begin_receive(self, out: Tensor, rank: int, *, forwards: bool) -> "Work":
        """Begins to receive, with the direction as the tag."""
        return self._group.recv([out], rank, int(forwards))


class LateLink:
    """A link whose group forms once all ranks have their weights, and which is used from the first pass on."""

    def __init__(self, index: int, size: int) -> None:
        self.index, self.size = index, size
        self._connected: StageLink = NoLink(index, size)
        self._used: StageLink = NoLink(index, size)

    def connect(self, link: StageLink) -> None:
        """Sets the link of the group that has formed. It is used after `open`."""
        self._connected = link

    def open(self) -> None:
        """Opens the connected link, and uses it from now on."""
        self._connected.open()
        self._used = self._connected

    def send_hidden(self, hidden: Tensor) -> None:
        """Sends by the connected link once it is open."""
        self._used.send_hidden(hidden)

    def receive_hidden(self, out: Tensor) -> Tensor:
        """Receives by the connected link once it is open; zeros before."""
        return self._used.receive_hidden(out)

    def send_tokens(self, tokens: Tensor) -> None:
        """Sends by the connected link once it is open."""
        self._used.send_tokens(tokens)

    def receive_tokens(self, out: Tensor) -> Tensor:
        """Receives by the connected link once it is open; zeros before."""
        return self._used.receive_tokens(out)
