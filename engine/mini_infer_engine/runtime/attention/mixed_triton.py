"""Plans attention by our kernels of layers whose KV heads differ: one backend for the layers of each shape."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from mini_infer_engine.config.model.model_config import HeadShape
from mini_infer_engine.kernels.attention.prefill_rows import PrefillRows
from mini_infer_engine.kernels.context import KernelContext
from mini_infer_engine.kernels.sampling.speculate import ChunkInputs
from mini_infer_engine.layers.attention import Attention, AttentionBlock
from mini_infer_engine.runtime.attention.triton_attention import Attend, TritonAttention, TritonAttentionPass
from mini_infer_engine.runtime.inputs.batch_tensors import PassInputs
from mini_infer_engine.runtime.memory.mixed_pool import MixedKVPool


class MixedTritonAttention:
    """The backends, by the shape of their layers' KV heads. Each plans a pass for its own layers."""

    most_captured_tokens = TritonAttention.most_captured_tokens

    def __init__(
        self, layers: Sequence[Attention], pool: MixedKVPool, longest_sequence: int, kernels: KernelContext
    ) -> None:
        self.page_size = pool.spec.page_size
        self._backends = {
            shape: TritonAttention(
                [layer for layer in layers if layer.head_shape == shape], view, longest_sequence, kernels
            )
            for shape, view in pool.views.items()
        }

    def decode(self, tables: Tensor, slots: Tensor, positions: Tensor, kv_lengths: Tensor) -> Attend:
        """Plans one new token a row."""
        return self._planned(lambda backend: backend.decode(tables, slots, positions, kv_lengths))

    def check(self, tables: Tensor, slots: Tensor, inputs: ChunkInputs, count: int) -> Attend:
        """Plans `count` new tokens a row."""
        return self._planned(lambda backend: backend.check(tables, slots, inputs, count))

    def prefill(
        self, rows: Sequence[PrefillRows], positions: Tensor, kv_index: Tensor, selected: Tensor | None = None
    ) -> Attend:
        """Plans prompt chunks."""
        return self._planned(lambda backend: backend.prefill(rows, positions, kv_index, selected))

    def plan(self, inputs: PassInputs, *, every_token: bool) -> TritonAttentionPass:
        """Plans a mixed pass, decode rows first."""
        passes = {shape: backend.plan(inputs, every_token=every_token) for shape, backend in self._backends.items()}
        first = next(iter(passes.values()))
        return TritonAttentionPass(
            _by_shape({shape: each.every_token for shape, each in passes.items()}),
            _by_shape({shape: each.selected for shape, each in passes.items()}),
            first.logits_indices,
            first.positions,
        )

    def most_pages(self, tokens: int, sequences: int) -> int:
        """Returns the most pages of all prompts together that every backend takes in a captured pass."""
        return min(backend.most_pages(tokens, sequences) for backend in self._backends.values())

    def compile_rare(self, tables: Tensor, dtype: torch.dtype) -> None:
        """Compiles the kernels of passes that are not captured."""
        for backend in self._backends.values():
            backend.compile_rare(tables, dtype)

    def _planned(self, plan: Callable[[TritonAttention], Attend]) -> Attend:
        return _by_shape({shape: plan(backend) for shape, backend in self._backends.items()})


def _by_shape(attends: Mapping[HeadShape, Attend]) -> Attend:
    def attend(qkv: Tensor, layer: AttentionBlock) -> Tensor:
        return attends[layer.head_shape](qkv, layer)

    return attend
