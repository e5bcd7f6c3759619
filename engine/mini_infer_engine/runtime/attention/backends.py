"""Chooses the backend of plain torch for a model's kind of attention; `triton_backends` chooses among our kernels."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from mini_infer_engine.layers.attention import AttentionBlock
from mini_infer_engine.layers.latent_attention import LatentAttention
from mini_infer_engine.layers.sparse_latent_attention import SparseLatentAttention
from mini_infer_engine.ops.base import AttentionPass
from mini_infer_engine.runtime.attention.mixed_torch import MixedTorchAttention
from mini_infer_engine.runtime.attention.torch_latent import TorchLatentAttention
from mini_infer_engine.runtime.attention.torch_reference import TorchAttention
from mini_infer_engine.runtime.attention.torch_selection import SelectingTorchAttention
from mini_infer_engine.runtime.attention.torch_sparse_latent import TorchSparseLatentAttention
from mini_infer_engine.runtime.inputs.batch_tensors import PassInputs
from mini_infer_engine.runtime.memory.kv_pool import KVPool
from mini_infer_engine.runtime.memory.mixed_pool import MixedKVPool


class TorchBackend(Protocol):
    """Attention in plain torch over one page pool."""

    def prepare(self, inputs: PassInputs, logits_indices: Tensor | None) -> AttentionPass:
        """Returns the attention of one pass. Logits are computed of the tokens `logits_indices` [rows], or of all if
        None.
        """


def torch_backend(layers: Sequence[AttentionBlock], pool: KVPool) -> TorchBackend:
    """Returns the backend for layers, which must all be of one kind."""
    if isinstance(pool, MixedKVPool):
        return MixedTorchAttention(layers, pool)
    if sparse := [layer for layer in layers if isinstance(layer, SparseLatentAttention)]:
        return TorchSparseLatentAttention(sparse, pool)
    if latent := [layer for layer in layers if isinstance(layer, LatentAttention)]:
        return TorchLatentAttention(latent, pool)
    return TorchAttention(layers, pool) if pool.bounds is None else SelectingTorchAttention(layers, pool, pool.bounds)
