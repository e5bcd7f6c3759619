"""Proves what comes back from main memory to a preempted sequence: pages, hidden states and recurrent states.

A digest is made of the device's bytes before they leave and after they are back, on the stream of the passes, and kept
where the passes run. It is that of the tiers (`kernels.page_digest`).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mini_infer_engine.kv_transfer.token_digests import GOLDEN, MODULUS


class PageDigests:
    """Digests of rows of memory."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        """Takes the parts of a row, each [rows, words] int64. On a GPU the kernel is compiled now."""
        self._parts = parts
        self.device = parts[0].device
        widths = [part.shape[1] for part in parts]
        self._starts = [sum(widths[:index]) for index in range(len(widths))]
        if self.device.type == "cuda":
            self.of([0])
            return
        with np.errstate(over="ignore"):
            factors = (2 * np.arange(sum(widths), dtype=np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
        self._factors = [factors[start : start + width] for start, width in zip(self._starts, widths, strict=True)]

    def of(self, rows: Sequence[int]) -> Tensor:  # [n] int64
        """Returns the digest of each of these rows, without waiting for the device."""
        if self.device.type == "cuda":
            return self._on_gpu(rows)
        sums = np.zeros(len(rows), np.uint64)
        for part, factors in zip(self._parts, self._factors, strict=True):
            words = part.numpy().view(np.uint64)
            sums += np.array([np.dot(words[row], factors) for row in rows], np.uint64)
        return torch.from_numpy(sums.view(np.int64))

    def _on_gpu(self, rows: Sequence[int]) -> Tensor:
        from mini_infer_engine.kernels.page_digest import page_digests

        places = torch.tensor(rows, dtype=torch.int64).pin_memory().to(self.device, non_blocking=True)
        sums = [
            page_digests(part, places, start, GOLDEN - MODULUS)
            for part, start in zip(self._parts, self._starts, strict=True)
        ]
        return sums[0] if len(sums) == 1 else torch.stack(sums).sum(dim=0)


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
    """What a pass has found out about the pages and states that came back before it."""

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
