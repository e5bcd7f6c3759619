"""Arrays of one size on their way to one device tensor, pass after pass. It knows nothing of what they hold."""

import torch
from torch import Tensor


class PinnedStaging:
    """Pinned buffers, used round-robin: to pin a fresh one for each pass costs the host more than the copy."""

    def __init__(self, target: Tensor, depth: int = 2) -> None:
        """`target`, dense, is what the device reads; `depth` buffers are filled by the host, through `arrays`.

        The host waits before it fills a buffer whose last copy has not run: with two uses a pass, give it four.
        """
        on_gpu = target.is_cuda
        self._target = target
        self._buffers = [torch.zeros(target.shape, dtype=target.dtype, pin_memory=on_gpu) for _ in range(depth)]
        self._copied = [torch.cuda.Event() for _ in self._buffers] if on_gpu else []  # type: ignore[no-untyped-call]  # torch's
        self.arrays = [buffer.numpy() for buffer in self._buffers]
        self._current = 0

    def begin(self) -> int:
        """Which of `arrays` to fill now: waits, should its last copy not have been made yet."""
        self._current = (self._current + 1) % len(self.arrays)
        if self._copied:
            self._copied[self._current].synchronize()
        return self._current

    def send(self, rows: int | None = None) -> Tensor:
        """Queue the copy of the array that `begin` named, or of its first `rows`; what it is copied to."""
        target = self._target[:rows]
        target.copy_(self._buffers[self._current][:rows], non_blocking=True)
        if self._copied:
            self._copied[self._current].record()
        return target
