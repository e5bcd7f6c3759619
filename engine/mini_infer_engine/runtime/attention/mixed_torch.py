"""Attention in plain torch of layers whose KV heads differ: one backend for the layers of each shape."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from mini_infer_engine.config.model.model_config import HeadShape
from mini_infer_engine.layers.attention import AttentionBlock
from mini_infer_engine.runtime.attention.torch_reference import TorchAttention, TorchAttentionPass
from mini_infer_engine.runtime.inputs.batch_tensors import PassInputs
from mini_infer_engine.runtime.memory.mixed_pool import MixedKVPool


class MixedTorchAttention:
    """The backends, by the shape of their layers' KV heads."""

    def __init__(self, layers: Sequence[AttentionBlock], pool: MixedKVPool) -> None:
        self._backends = {
            shape: TorchAttention([layer for layer in layers if layer.head_shape == shape], view)
            for shape, view in pool.views.items()
        }

    def prepare(self, inputs: PassInputs, logits_indices: Tensor | None) -> "MixedTorchPass":
        """Returns the attention of one pass."""
        passes = {shape: backend.prepare(inputs, logits_indices) for shape, backend in self._backends.items()}
        return MixedTorchPass(passes, logits_indices, inputs.positions)


class MixedTorchPass:
    """The attention of one pass, an `ops.base.AttentionPass`."""

    def __init__(
        self, passes: Mapping[HeadShape, TorchAttentionPass], logits_indices: Tensor | None, positions: Tensor
    ) -> None:
        self._passes, self.logits_indices, self.positions = passes, logits_indices, positions

    def attend(self, qkv: Tensor, layer: AttentionBlock) -> Tensor:
        """Attends by the backend of the layer's shape."""
        return self._passes[layer.head_shape].attend(qkv, layer)
