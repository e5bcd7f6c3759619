"""Copies arrays of one size to one device tensor, pass after pass. It does not know what they contain."""

import torch
from torch import Tensor


class PinnedStaging:
    """Pinned buffers, used round-robin: pinning a fresh one for each pass would cost the host more than the copy."""

    def __init__(self, target: Tensor, depth: int = 2) -> None:
        """Allocates `depth` buffers, which the host fills through `arrays`; `target`, dense, is what the device reads.

        The host waits before it fills a buffer whose last copy has not run: with two uses a pass, choose a depth of
        four.
        """
        on_gpu = target.is_cuda
        self._target = target
        self._buffers = [torch.zeros(target.shape, dtype=target.dtype, pin_memory=on_gpu) for _ in range(depth)]
        self._copied = [torch.cuda.Event() for _ in self._buffers] if on_gpu else []  # type: ignore[no-untyped-call]  # torch's
        self.arrays = [buffer.numpy() for buffer in self._buffers]
        self._current = 0

    def begin(self) -> int:
        """Returns the index of the array to fill now. Waits if its last copy has not run yet."""
        self._current = (self._current + 1) % len(self.arrays)
        if self._copied:
            self._copied[self._current].synchronize()
        return self._current

    def send(self, rows: int | None = None) -> Tensor:
        """Queues the copy of the array that `begin` chose, or of its first `rows`. Returns the device tensor."""
        target = self._target[:rows]
        target.copy_(self._buffers[self._current][:rows], non_blocking=True)
        if self._copied:
            self._copied[self._current].record()
        return target
