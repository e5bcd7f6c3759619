"""Scratch memory of split kernels, whose programs finish each other's work: partial sums and arrival counters.

One workspace belongs to one runner, whose kernels run one after another on one stream. Kernels of two runners may run
at the same time, so they never share one. Does not depend on any kernel.
"""

import threading

import torch

COUNTERS = 1 << 16
"""Arrival counters: output tiles or (row, head) pairs that one kernel may split."""
_MIN_PARTIAL_FLOATS = 1 << 22
"""Floats of partial sums to begin with: what decode steps of common models need."""


class Workspace:
    """Partial sums, which grow before graphs are captured, and counters, which are zero between two kernels."""

    def __init__(self, device: torch.device) -> None:
        self.counters = torch.zeros(COUNTERS, dtype=torch.int32, device=device)  # [COUNTERS] int32, device
        self._partials = torch.empty(_MIN_PARTIAL_FLOATS, device=device)
        self._outgrown: list[torch.Tensor] = []
        """Earlier partial sums, which captured graphs and launches under way still write to."""
        self._growing = threading.Lock()

    def partials(self, floats: int = 0) -> torch.Tensor:
        """At least so many floats of fp32 memory; several threads may ask at the same time."""
        with self._growing:
            if self._partials.numel() < floats:
                self._outgrown.append(self._partials)
                self._partials = torch.empty(floats, device=self._partials.device)
            return self._partials
