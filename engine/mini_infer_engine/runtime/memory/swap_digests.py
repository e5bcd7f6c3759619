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

    def left(self, rows: Sequence[int], host_rows: Sequence[int]) -> None:
        """Records what is copied from the device's rows to those of main memory."""
        if rows:
            self._known[list(host_rows)] = self._digests.of(rows)

    def returned(self, rows: Sequence[int], host_rows: Sequence[int]) -> Tensor:  # [n] bool
        """Returns True for each row that has come back with other bytes."""
        if not rows:
            return torch.zeros(0, dtype=torch.bool, device=self._known.device)
        return self._digests.of(rows) != self._known[list(host_rows)]


class SwapCheck:
    """A check of the pages and states that came back before a pass."""

    def __init__(self, faults: Tensor) -> None:
        """Takes True for each page and each state that came back with other bytes."""
        self._event: Any = None
        self._faults = faults
        if faults.is_cuda:
            self._faults = torch.empty(faults.shape, dtype=torch.bool, pin_memory=True)
            self._faults.copy_(faults, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
            self._event.record()

    def faults(self) -> list[int]:
        """Waits for the copies. Returns the places of faults in a batch's `swap_in`, which its `states_in` follow."""
        if self._event is not None:
            self._event.synchronize()
        return [place for place, is_fault in enumerate(self._faults.tolist()) if is_fault]
