"""How many layers of a pass have their keys and values in the page pool, for whoever sends them on meanwhile."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from mini_infer_engine.layers.attention import AttentionBlock
from mini_infer_engine.ops.base import AttentionPass


@dataclass(slots=True)
class CountedLayers:
    """See `kv_transfer.LayerProgress`. Of a pass on a CPU, which counts them as it computes."""

    count: int = 0

    def num_done(self) -> int:
        """See `LayerProgress.num_done`."""
        return self.count

    def mark(self, layer: int) -> None:
        """The layers up to it are done."""
        self.count = layer + 1


@dataclass(slots=True, frozen=True)
class _DeviceLayers:
    """See `kv_transfer.LayerProgress`."""

    newest: np.ndarray
    number: int

    def num_done(self) -> int:
        """See `LayerProgress.num_done`."""
        is_late = self.newest - np.int32(self.number) < 0  # numbers wrap around, hence the difference
        return int(is_late.argmax()) if is_late.any() else len(is_late)


class LayerCounters:
    """Of a GPU, whose passes have numbers: behind each layer a kernel writes its pass's into main memory.

    So CUDA graphs can tell of their layers, too, which events within them cannot: those are bound to one replay's end.
    """

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self._newest = torch.zeros(num_layers, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._number = torch.zeros(1, dtype=torch.int32, device=device)
        self._last = 0

    def begin(self) -> _DeviceLayers:
        """The pass that is launched next has a number of its own: how far it is."""
        self._last = (self._last + 1 + 2**31) % 2**32 - 2**31
        self._number.fill_(self._last)
        return _DeviceLayers(self._newest.numpy(), self._last)

    def mark(self, layer: int) -> None:
        """What has been launched of the pass ends with this layer's attention."""
        from mini_infer_engine.kernels.tell_layer import tell_layer  # Triton is on GPUs alone

        tell_layer(self._newest, self._number, layer)


@dataclass(slots=True)
class MarkedAttention:
    """An `AttentionPass` that marks each layer once it has attended."""

    inner: AttentionPass
    mark: Callable[[int], None]
    logits_indices: Tensor | None = field(init=False)
    _layer: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.logits_indices = self.inner.logits_indices

    def attend(self, qkv: Tensor, layer: AttentionBlock) -> Tensor:
        """See `AttentionPass.attend`."""
        mixed = self.inner.attend(qkv, layer)
        self.mark(self._layer)
        self._layer += 1
        return mixed
