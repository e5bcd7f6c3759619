"""Computes the digests of pages on the device: before they leave for main memory, and after they are back.

Tiers and swapping use the same one (`kernels.page_digest`): a multilinear hash, which any change of one word changes.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mini_infer_engine.device import to_device
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

        places = to_device(np.array(rows, np.int64), self.device)
        sums = [
            page_digests(part, places, start, GOLDEN - MODULUS)
            for part, start in zip(self._parts, self._starts, strict=True)
        ]
        return sums[0] if len(sums) == 1 else torch.stack(sums).sum(dim=0)
