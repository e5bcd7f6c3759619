"""Sums tensors of two ranks by copy engines while matrix products run (see `kernels.all_reduce.overlapped_sum`).

It orders streams and flags. The caller decides where in a rank's memory the summands lie.
"""

import torch
from torch import Tensor

from mini_infer_engine.kernels.all_reduce.overlapped_sum import FLAG_BYTES, FLAGS, halves, launch_add_received

_FLAG_WORDS = FLAG_BYTES // 4


class OverlappedSums:
    """Creates the overlapped sums of one rank. Both ranks construct it at the same time, over flags that are zero."""

    def __init__(self, flags: Tensor, peer_flags: Tensor, released: Tensor) -> None:
        """Takes flags [FLAGS * FLAG_BYTES] uint8 of this rank's memory and of its peer's. `one_shot` explains
        `released`.
        """
        self.flags = flags.view(torch.int32).view(FLAGS, _FLAG_WORDS)
        self.released = released
        self._peer_flags = peer_flags.view(torch.uint32)
        self._copies = torch.cuda.Stream(flags.device)  # type: ignore[no-untyped-call]  # torch's
        self._number = 0
        self.num_pending = 0
        """Halves of the newest sum that have not been added yet."""

    def begin(self, received: Tensor, place: Tensor) -> "OverlappedSum":
        """Begins the next sum. The peer writes its summand to `received` [rows, width], and this rank writes its own to
        `place`.
        """
        self.check_added()
        self._number = (self._number + 1) % 2**32
        self.num_pending = FLAGS
        return OverlappedSum(self, self._number, received, place)

    def check_added(self) -> None:
        """Asserts that no sum is pending, before any other exchange of the ranks."""
        assert not self.num_pending, "a pending sum was forgotten"

    def send(self, half: int, number: int, summand: Tensor, place: Tensor) -> torch.cuda.Event:
        """Copies a summand to the peer after all kernels launched before, and then raises the peer's flag.

        Returns the event of the copy's end. Both tensors are dense, so that a copy engine does it.
        """
        self._copies.wait_stream(torch.cuda.current_stream(summand.device))
        with torch.cuda.stream(self._copies):
            place.copy_(summand)
            copied: torch.cuda.Event = self._copies.record_event()
            # It is preceded by a fence for all GPUs, as `__threadfence_system` is one.
            torch.ops.symm_mem.stream_write_value32_(self._peer_flags, half * _FLAG_WORDS, number)
        return copied


class OverlappedSum:
    """One overlapped sum, from its first product to the norm of its second half."""

    def __init__(self, sums: OverlappedSums, number: int, received: Tensor, place: Tensor) -> None:
        self._sums, self._number = sums, number
        self._received, self._place = received, place
        self._copied: list[torch.cuda.Event] = []
        self.halves = halves(*received.shape)
        self.summand = torch.empty_like(received)
        """The summand [rows, width], to which this rank's products are written."""

    def send(self, half: int) -> None:
        """Sends a half whose product has been launched. The first half goes first."""
        rows = self.halves[half]
        self._copied.append(self._sums.send(half, self._number, self.summand[rows], self._place[rows]))

    def add_norm(self, half: int, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """Adds this half to its rows of the residual stream [rows, width] in place, and writes their RMSNorm to out.

        The GPU waits for the peer's summand, and for the copy of this rank's own: the allocator does not know of that
        copy, and reuses the memory for kernels that are launched from here on.
        """
        rows = self.halves[half]
        torch.cuda.current_stream(out.device).wait_event(self._copied[half])
        launch_add_received(
            self.summand[rows],
            self._received[rows],
            self._sums.flags[half],
            self._number,
            self._sums.released,
            residual=residual,
            weight=weight,
            eps=eps,
            out=out,
        )
        self._sums.num_pending -= 1
