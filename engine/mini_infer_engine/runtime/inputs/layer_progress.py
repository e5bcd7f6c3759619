"""Follows a pass layer by layer: counts those whose keys and values are in the page pool, so that they can be sent
meanwhile, and waits for those that are being loaded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from mini_infer_engine.core.kv_tiers.tier_memory import LayerwiseLoad
from mini_infer_engine.layers.attention import AttentionBlock
from mini_infer_engine.ops.base import AttentionPass


@dataclass(slots=True)
class CountedLayers:
    """The `kv_transfer.LayerProgress` of a pass on a CPU, which counts its layers as it computes."""

    count: int = 0

    def num_done(self) -> int:
        """Returns the number of layers that are done."""
        return self.count

    def mark(self, layer: int) -> None:
        """Records that this layer and all before it are done."""
        self.count = layer + 1


@dataclass(slots=True, frozen=True)
class _DeviceLayers:
    """The `kv_transfer.LayerProgress` of a pass on a GPU, which compares numbers that kernels have written."""

    newest: np.ndarray
    number: int

    def num_done(self) -> int:
        """Returns the number of layers whose newest pass is this one or a later one."""
        is_late = self.newest - np.int32(self.number) < 0  # numbers wrap around, hence the difference
        return int(is_late.argmax()) if is_late.any() else len(is_late)


class LayerCounters:
    """Counters of a GPU's layers: each pass has a number, which a kernel writes to main memory after each layer.

    This works in CUDA graphs too, unlike events within them, which are bound to the end of one replay.
    """

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self._newest = torch.zeros(num_layers, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._number = torch.zeros(1, dtype=torch.int32, device=device)
        self._last = 0

    def begin(self) -> _DeviceLayers:
        """Gives the pass that is launched next a number of its own, and returns its progress."""
        self._last = (self._last + 1 + 2**31) % 2**32 - 2**31
        self._number.fill_(self._last)
        return _DeviceLayers(self._newest.numpy(), self._last)

    def mark(self, layer: int) -> None:
        """Queues the kernel that reports this layer, after its attention."""
        from mini_infer_engine.kernels.report_layer import report_layer  # Triton is on GPUs alone

        report_layer(self._newest, self._number, layer)


@dataclass(slots=True)
class LoadedAttention:
    """An `AttentionPass` that waits for each layer of the loads that its pass follows, before it attends."""

    inner: AttentionPass
    loads: Sequence[LayerwiseLoad]
    logits_indices: Tensor | None = field(init=False)
    positions: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.logits_indices, self.positions = self.inner.logits_indices, self.inner.positions

    def attend(self, qkv: Tensor, layer: AttentionBlock) -> Tensor:
        """Waits for the layer's pages, then attends by the inner pass."""
        for load in self.loads:
            load.wait_for_layer(layer.layer)
        return self.inner.attend(qkv, layer)


@dataclass(slots=True)
class MarkedAttention:
    """An `AttentionPass` that marks each layer once it has attended."""

    inner: AttentionPass
    mark: Callable[[int], None]
    logits_indices: Tensor | None = field(init=False)
    positions: Tensor = field(init=False)
    _layer: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.logits_indices, self.positions = self.inner.logits_indices, self.inner.positions

    def attend(self, qkv: Tensor, layer: AttentionBlock) -> Tensor:
        """Attends by the inner pass, then marks the layer."""
        mixed = self.inner.attend(qkv, layer)
        self.mark(self._layer)
        self._layer += 1
        return mixed
