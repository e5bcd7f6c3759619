"""Proves what comes back from main memory to a preempted sequence: pages, hidden states and recurrent states.

A digest is made of the device's bytes before they leave and after they are back, on the stream of the passes, and kept
where the passes run.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mini_infer_engine.runtime.memory.page_digests import PageDigests


class SwapDigests:
    """The digests of what is in main memory."""

    def __init__(self, parts: Sequence[Tensor], num_host_rows: int) -> None:
        """Takes the parts of the device's rows, as `PageDigests` does."""
        self._digests = PageDigests(parts)
        self._known = torch.zeros(num_host_rows, dtype=torch.int64, device=self._digests.device)

    def prepare(self) -> None:
        """Compiles and loads now, on a GPU, what a pass would wait for."""
        self.left([0], [0])
        SwapCheck([self.returned([0], [0])])

    def left(self, rows: Sequence[int], host_rows: Sequence[int]) -> None:
        """Records what is copied from the device's rows to those of main memory."""
        digests, places = self._digests.for_places(rows, host_rows)
        self._known.index_copy_(0, places, digests)

    def returned(self, rows: Sequence[int], host_rows: Sequence[int]) -> Tensor:  # [n] int64
        """Returns a difference of digests for each row, which is not zero if it has come back with other bytes."""
        return self._digests.differences(rows, self._known, host_rows)


class SwapCheck:
    """A check of the pages and states that came back before a pass."""

    def __init__(self, differences: Sequence[Tensor]) -> None:
        """Takes what `SwapDigests.returned` has found [n] int64 of pages, of states, or of both."""
        found = differences[0] if len(differences) == 1 else torch.cat(tuple(differences))
        self._event: Any = None
        self._differences = found
        if found.is_cuda:
            self._differences = torch.empty(found.shape, dtype=torch.int64, pin_memory=True)
            self._differences.copy_(found, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
            self._event.record()

    def faults(self) -> list[int]:
        """Waits for the copies. Returns the places of faults in a batch's `swap_in`, which its `states_in` follow."""
        if self._event is not None:
            self._event.synchronize()
        return [place for place, difference in enumerate(self._differences.tolist()) if difference]
