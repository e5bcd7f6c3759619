"""Computes the digests of pages on the device: before they leave for main memory, and after they are back.

Tiers and swapping use the same one (`kernels.page_digest`): a multilinear hash, which any change of one word changes.
On a GPU it takes one small copy, which brings row numbers, and one launch for each part of a page.
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
        starts = [sum(widths[:index]) for index in range(len(widths))]
        if self.device.type == "cuda":
            from mini_infer_engine.kernels.page_digest import PageSums

            signed = GOLDEN - MODULUS
            self._kernels = [PageSums(part, start, signed) for part, start in zip(parts, starts, strict=True)]
            self.of([0])
            return
        with np.errstate(over="ignore"):
            factors = (2 * np.arange(sum(widths), dtype=np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
        self._factors = [factors[start : start + width] for start, width in zip(starts, widths, strict=True)]

    def of(self, rows: Sequence[int]) -> Tensor:  # [n] int64
        """Returns the digest of each of these rows, without waiting for the device."""
        return self._on_gpu(rows)[0] if self.device.type == "cuda" else self._on_cpu(rows)

    def for_places(self, rows: Sequence[int], places: Sequence[int]) -> tuple[Tensor, Tensor]:  # [n] int64 each
        """Returns the digest of each of these rows, and `places`, both on the device, as `of` does."""
        if self.device.type == "cuda":
            digests, _, on_device = self._on_gpu(rows, places).unbind(0)
            return digests, on_device
        return self._on_cpu(rows), torch.tensor(places)

    def differences(self, rows: Sequence[int], known: Tensor, places: Sequence[int]) -> Tensor:  # [n] int64
        """Returns the digest of each of these rows minus that in `known` [any] int64 at its place, as `of` does."""
        if self.device.type == "cuda":
            return self._on_gpu(rows, places, known)[0]
        return self._on_cpu(rows) - known[torch.tensor(places)]

    def _on_cpu(self, rows: Sequence[int]) -> Tensor:
        sums = np.zeros(len(rows), np.uint64)
        for part, factors in zip(self._parts, self._factors, strict=True):
            words = part.numpy().view(np.uint64)
            sums += np.array([np.dot(words[row], factors) for row in rows], np.uint64)
        return torch.from_numpy(sums.view(np.int64))

    def _on_gpu(self, rows: Sequence[int], places: Sequence[int] = (), known: Tensor | None = None) -> Tensor:
        """Returns [2 or 3, n] int64: the digests, the rows, and the places if there are any."""
        numbers = np.array([[0] * len(rows), rows, places] if places else [[0] * len(rows), rows], np.int64)
        on_device = to_device(numbers, self.device)
        first, *others = self._kernels
        first.add(on_device, known)
        for kernel in others:
            kernel.add(on_device)
        return on_device
