"""Accounts for what an engine keeps on its device: weights, KV cache, CUDA graphs and scratch memory, in bytes by tag.

It is told sizes and measures a GPU's allocator; it knows neither models nor pages.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

import torch


class MemoryTag(StrEnum):
    """The uses of a device's memory. vLLM's sleep mode has the first two."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    GRAPHS = "graphs"
    """Memory that captured CUDA graphs share."""
    WORKSPACE = "workspace"
    """State of the slots, and scratch memory that passes reuse."""


class DeviceMemory:
    """The memory that one engine keeps on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes = dict.fromkeys(MemoryTag, 0)

    def add(self, tag: MemoryTag, num_bytes: int) -> None:
        """Counts memory that was allocated under a tag."""
        self._bytes[tag] += num_bytes

    @contextmanager
    def measure(self, tag: MemoryTag) -> Iterator[None]:
        """Counts the memory that a GPU's allocator reserves in this block and retains after it.

        It counts nothing on a CPU, whose allocator has no counters: use `add` there.
        """
        if self._device.type != "cuda":
            yield
            return
        before = self._reserved()
        yield
        self.add(tag, max(0, self._reserved() - before))

    def _reserved(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device)

    def bytes_by_tag(self) -> dict[str, int]:
        """Returns the bytes of each tag, those of unused ones too."""
        return {tag.value: num_bytes for tag, num_bytes in self._bytes.items()}

    def __str__(self) -> str:
        """Returns the sizes in words, for the log."""
        parts = [f"{tag.replace('_', ' ')} {size / 1e9:.2f} GB" for tag, size in self._bytes.items() if size]
        return f"{self._device}: {', '.join(parts)}"
