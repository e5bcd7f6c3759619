"""Allocates scratch memory of split kernels, whose programs finish each other's work, and of widened pages.

Split kernels use partial sums and arrival counters. One workspace belongs to one runner, whose kernels run one after
another on one stream. Kernels of two runners may run at the same time, so they never share one. Does not depend on any
kernel.
"""

import threading

import torch

COUNTERS = 1 << 16
"""The number of arrival counters: output tiles or (row, head) pairs that one kernel may split."""
_MIN_PARTIAL_FLOATS = 1 << 22
"""Floats of partial sums at the start: enough for decode steps of common models."""


class Workspace:
    """Partial sums, which grow before graphs are captured, and counters, which are zero between two kernels."""

    def __init__(self, device: torch.device) -> None:
        self.counters = torch.zeros(COUNTERS, dtype=torch.int32, device=device)  # [COUNTERS] int32, device
        self._partials = torch.empty(_MIN_PARTIAL_FLOATS, device=device)
        self._outgrown: list[torch.Tensor] = []
        """Earlier partial sums, to which captured graphs and launches in flight still write."""
        self._growing = threading.Lock()
        self.wide_pages = torch.empty(0, dtype=torch.uint8, device=device)
        """Pages of one layer in 16 bits, made by `attention.widen_pages`."""

    def reserve_wide_pages(self, size_bytes: int) -> None:
        """Allocates the wide pages before any pass, so that memory planning counts them and captured graphs keep their
        address.
        """
        if self.wide_pages.numel() < size_bytes:
            self._outgrown.append(self.wide_pages)
            self.wide_pages = torch.empty(size_bytes, dtype=torch.uint8, device=self.wide_pages.device)

    def partials(self, floats: int = 0) -> torch.Tensor:
        """Returns at least this many floats of fp32 memory. Several threads may call it at the same time."""
        with self._growing:
            if self._partials.numel() < floats:
                self._outgrown.append(self._partials)
                self._partials = torch.empty(floats, device=self._partials.device)
            return self._partials
