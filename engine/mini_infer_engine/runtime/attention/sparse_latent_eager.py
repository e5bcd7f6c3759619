"""Sparse latent attention for passes that are launched kernel by kernel on a GPU: plain torch between our kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mini_infer_engine.kernels.attention.prefill_rows import UNKNOWN_PAGES, PrefillRows
from mini_infer_engine.kernels.sampling.speculate import ChunkInputs
from mini_infer_engine.layers.attention import AttentionBlock
from mini_infer_engine.layers.sparse_latent_attention import SparseLatentAttention
from mini_infer_engine.runtime.attention.torch_sparse_latent import TorchSparseLatentAttention
from mini_infer_engine.runtime.attention.triton_attention import Attend, TritonAttentionPass
from mini_infer_engine.runtime.inputs.batch_tensors import PassInputs
from mini_infer_engine.runtime.memory.kv_pool import KVPool

_NO_GRAPHS = "a start without enforce_eager, or with guesses, is refused (runtime.attention.sparse_limits)"


class SparseLatentEager:
    """The `TritonBackend` of sparse latent attention, which plans mixed passes alone: nothing of it is captured."""

    most_captured_tokens = 0

    def __init__(self, layers: Sequence[SparseLatentAttention], pool: KVPool) -> None:
        self.page_size = pool.spec.page_size
        self._backend = TorchSparseLatentAttention(layers, pool)

    def decode(self, tables: Tensor, slots: Tensor, positions: Tensor, kv_lengths: Tensor) -> Attend:
        """Fails: decode graphs are not made."""
        raise AssertionError(_NO_GRAPHS)

    def check(self, tables: Tensor, slots: Tensor, inputs: ChunkInputs, count: int) -> Attend:
        """Fails: guesses are not checked."""
        raise AssertionError(_NO_GRAPHS)

    def prefill(
        self, rows: Sequence[PrefillRows], positions: Tensor, kv_index: Tensor, selected: Tensor | None = None
    ) -> Attend:
        """Fails: graphs of prompts are not made."""
        raise AssertionError(_NO_GRAPHS)

    def plan(self, inputs: PassInputs, *, every_token: bool) -> TritonAttentionPass:
        """Plans a mixed pass, decode rows first."""
        attention = self._backend.prepare(inputs, None)

        def attend(packed: Tensor, layer: AttentionBlock, out: Tensor | None = None) -> Tensor:
            mixed = attention.attend(packed, layer)
            return mixed if out is None else out.copy_(mixed)

        def attend_selected(packed: Tensor, layer: AttentionBlock, out: Tensor | None = None) -> Tensor:
            mixed = attention.attend(packed, layer).index_select(0, inputs.sample_rows)
            return mixed if out is None else out.copy_(mixed)

        selected = None if every_token else inputs.sample_rows
        return TritonAttentionPass(attend, attend_selected, selected, inputs.positions)

    def most_pages(self, tokens: int, sequences: int) -> int:
        """Returns `UNKNOWN_PAGES`, since no pass is captured."""
        return UNKNOWN_PAGES

    def compile_rare(self, tables: Tensor, dtype: torch.dtype) -> None:
        """Does nothing: torch compiles nothing."""
