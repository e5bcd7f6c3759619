"""What stages of a pipeline hand on: hidden states to the next one, sampled tokens from the last one to the first.

Each rank talks with its own tensor-parallel rank of other stages, in the order of passes, which is the same on all. A
sender never waits for a receiver: what it has sent is kept until it has left.
"""

from collections import deque
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import Work

_SENT_KEPT = 4
"""For each stage, tensors that may still be on their way. The engine has about as many passes in flight as stages."""


class StageLink(Protocol):
    """One rank's connections. Tensors that are sent are the link's from then on."""

    index: int
    """Of this rank's stage."""
    size: int
    """Stages."""

    def open(self) -> None:
        """All ranks have loaded, and passes follow: until now nothing is sent, and zeros are received."""

    def send_hidden(self, hidden: Tensor) -> None:
        """To the next stage: [tokens, hidden], dense."""

    def receive_hidden(self, out: Tensor) -> Tensor:
        """From the stage before, into `out`, which is returned."""

    def send_tokens(self, tokens: Tensor) -> None:
        """From the last stage to the first: [tokens] int64."""

    def receive_tokens(self, out: Tensor) -> Tensor:
        """On the first stage, the oldest that it has not received, into `out`, which is returned."""


class NoLink:
    """Of a model that is not split into stages, or not linked yet."""

    def __init__(self, index: int = 0, size: int = 1) -> None:
        self.index, self.size = index, size

    def open(self) -> None:
        """See `StageLink.open`."""

    def send_hidden(self, hidden: Tensor) -> None:
        """See `StageLink.send_hidden`: to nobody."""

    def receive_hidden(self, out: Tensor) -> Tensor:
        """See `StageLink.receive_hidden`: zeros."""
        return out.zero_()

    def send_tokens(self, tokens: Tensor) -> None:
        """See `StageLink.send_tokens`: to nobody."""

    def receive_tokens(self, out: Tensor) -> Tensor:
        """See `StageLink.receive_tokens`: zeros."""
        return out.zero_()


NO_LINK = NoLink()


class GroupLink:
    """Over two groups of all ranks of all stages, in which the ranks of a stage follow each other.

    Hidden states and tokens have a group each: neither ever waits for the other, which goes the other way.
    """

    def __init__(self, index: int, size: int, rank: int, num_ranks: int) -> None:
        """`rank`: this one's among all."""
        self.index, self.size = index, size
        ranks_per_stage = num_ranks // size
        self._next, self._before = rank + ranks_per_stage, rank - ranks_per_stage
        self._first, self._last = rank % ranks_per_stage, rank % ranks_per_stage + (size - 1) * ranks_per_stage
        self._sent: deque[tuple[Work, Tensor]] = deque()

    def begin_send(self, tensor: Tensor, rank: int, *, forwards: bool) -> "Work":
        """To a rank; of one group what is sent first arrives first. Does not wait for the receiver."""
        raise NotImplementedError

    def begin_receive(self, out: Tensor, rank: int, *, forwards: bool) -> "Work":
        """From a rank; `out` may be read after the call of `wait`, on a GPU by what is launched after it."""
        raise NotImplementedError

    def open(self) -> None:
        """See `StageLink.open`."""

    def send_hidden(self, hidden: Tensor) -> None:
        """See `StageLink.send_hidden`."""
        self._keep(self.begin_send(hidden, self._next, forwards=True), hidden)

    def receive_hidden(self, out: Tensor) -> Tensor:
        """See `StageLink.receive_hidden`."""
        self.begin_receive(out, self._before, forwards=True).wait()
        return out

    def send_tokens(self, tokens: Tensor) -> None:
        """See `StageLink.send_tokens`."""
        self._keep(self.begin_send(tokens, self._first, forwards=False), tokens)

    def receive_tokens(self, out: Tensor) -> Tensor:
        """See `StageLink.receive_tokens`."""
        self.begin_receive(out, self._last, forwards=False).wait()
        return out

    def _keep(self, work: "Work", tensor: Tensor) -> None:
        """What is sent stays until it has left: what was sent so long ago has, so that nothing waits here."""
        self._sent.append((work, tensor))
        if len(self._sent) > _SENT_KEPT * self.size:
            self._sent.popleft()[0].wait()


class GlooLink(GroupLink):
    """Between CPUs; one group is enough, for its messages have tags."""

    def __init__(self, index: int, size: int, rank: int, group: torch.distributed.ProcessGroup) -> None:
        super().__init__(index, size, rank, group.size())
        self._group = group

    def begin_send(self, tensor: Tensor, rank: int, *, forwards: bool) -> "Work":
        """See `GroupLink.begin_send`."""
        return self._group.send([tensor], rank, int(forwards))

    def begin_receive(self, out: Tensor, rank: int, *, forwards: bool) -> "Work":
        """See `GroupLink.begin_receive`."""
        return self._group.recv([out], rank, int(forwards))


class LateLink:
    """A link of a group that forms once all ranks have their weights, and is used from the first pass on."""

    def __init__(self, index: int, size: int) -> None:
        self.index, self.size = index, size
        self._connected: StageLink = NoLink(index, size)
        self._used: StageLink = NoLink(index, size)

    def connect(self, link: StageLink) -> None:
        """The group has formed."""
        self._connected = link

    def open(self) -> None:
        """See `StageLink.open`."""
        self._connected.open()
        self._used = self._connected

    def send_hidden(self, hidden: Tensor) -> None:
        """See `StageLink.send_hidden`."""
        self._used.send_hidden(hidden)

    def receive_hidden(self, out: Tensor) -> Tensor:
        """See `StageLink.receive_hidden`."""
        return self._used.receive_hidden(out)

    def send_tokens(self, tokens: Tensor) -> None:
        """See `StageLink.send_tokens`."""
        self._used.send_tokens(tokens)

    def receive_tokens(self, out: Tensor) -> Tensor:
        """See `StageLink.receive_tokens`."""
        return self._used.receive_tokens(out)
