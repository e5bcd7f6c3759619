"""When keys and values of each layer of a pass are in the page pool, for whoever sends them on while it computes."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mini_infer_engine.layers.attention import AttentionBlock
from mini_infer_engine.ops.base import AttentionPass


@dataclass(slots=True, frozen=True)
class LayerMark:
    """After one layer's attention; None: on a CPU it is done when the call returns."""

    event: torch.cuda.Event | None

    def is_done(self) -> bool:
        """Whether the device has come so far; any thread may ask."""
        if self.event is None:
            return True
        is_done: bool = self.event.query()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return is_done


LayerMarks = list[LayerMark]
"""One a layer, in order."""


@dataclass(slots=True)
class MarkedAttention:
    """An `AttentionPass` that leaves a mark behind each layer."""

    inner: AttentionPass
    marks: LayerMarks
    logits_indices: Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        self.logits_indices = self.inner.logits_indices

    def attend(self, qkv: Tensor, layer: AttentionBlock) -> Tensor:
        """See `AttentionPass.attend`."""
        mixed = self.inner.attend(qkv, layer)
        event = None
        if mixed.is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            event.record()
        self.marks.append(LayerMark(event))
        return mixed
