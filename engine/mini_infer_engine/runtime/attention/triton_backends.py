"""Defines the interface of our kernels' attention backends, and chooses the one for a model's kind of attention."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.kernels.attention.prefill_rows import PrefillRows
from mini_infer_engine.kernels.context import KernelContext
from mini_infer_engine.kernels.sampling.speculate import ChunkInputs
from mini_infer_engine.layers.attention import Attention, AttentionBlock
from mini_infer_engine.layers.latent_attention import LatentAttention
from mini_infer_engine.layers.sparse_latent_attention import SparseLatentAttention
from mini_infer_engine.runtime.attention.mixed_triton import MixedTritonAttention
from mini_infer_engine.runtime.attention.sparse_latent_eager import SparseLatentEager
from mini_infer_engine.runtime.attention.triton_attention import Attend, TritonAttention, TritonAttentionPass
from mini_infer_engine.runtime.attention.triton_latent import TritonLatentAttention
from mini_infer_engine.runtime.attention.triton_selection import SelectingTritonAttention
from mini_infer_engine.runtime.inputs.batch_tensors import PassInputs
from mini_infer_engine.runtime.memory.kv_pool import KVPool
from mini_infer_engine.runtime.memory.mixed_pool import MixedKVPool


class TritonBackend(Protocol):
    """Attention by our kernels over one page pool."""

    page_size: int
    most_captured_tokens: int
    """Largest captured pass with prompts: longer ones gain nothing from a graph."""

    def decode(self, tables: Tensor, slots: Tensor, positions: Tensor, kv_lengths: Tensor) -> Attend:
        """Plans one new token a row, at `positions` [rows] of the text and after `kv_lengths` [rows] tokens in the
        cache.

        `tables` [KV groups, slots, width] are read at row `slots`.
        """

    def check(self, tables: Tensor, slots: Tensor, inputs: ChunkInputs, count: int) -> Attend:
        """Plans `count` new tokens a row, after its cached ones. `tables` [KV groups, slots, width] are read at row
        `slots`.
        """

    def prefill(
        self, rows: Sequence[PrefillRows], positions: Tensor, kv_index: Tensor, selected: Tensor | None = None
    ) -> Attend:
        """Plans prompt chunks, which `rows` describe for each KV group; kv_index [KV groups, tokens].

        If `selected` is given, only those tokens attend, and `rows` describe them.
        """

    def plan(self, inputs: PassInputs, *, every_token: bool) -> TritonAttentionPass:
        """Plans a mixed pass, decode rows first. With `every_token` the logits of all tokens are computed."""

    def most_pages(self, tokens: int, sequences: int) -> int:
        """Returns the most pages of all prompts together, in a captured pass of so many padded tokens and prompts."""

    def compile_rare(self, tables: Tensor, dtype: torch.dtype) -> None:
        """Compiles the kernels of passes that are not captured, over page tables [KV groups, 1, width]."""


def triton_backend(
    layers: Sequence[AttentionBlock],
    pool: KVPool,
    longest_sequence: int,
    kernels: KernelContext,
    run_prefill: Callable[..., Tensor] | None = None,
    *,
    sees_later_keys: bool = False,
) -> TritonBackend:
    """Returns the backend for layers, which must all be of one kind. `sees_later_keys` is True if tokens of some chunks
    see keys of tokens after them, as those of images may.

    Raises ModelError if `run_prefill`, another kernel for prompts, cannot compute it.
    """
    latent = [layer for layer in layers if isinstance(layer, LatentAttention)]
    if not latent:
        plain = [layer for layer in layers if isinstance(layer, Attention)]
        if run_prefill is not None and any(layer.sinks is not None for layer in plain):
            raise ModelError("attention_backend = 'flash': attention sinks need 'triton', 'torch' or 'auto'.")
        if isinstance(pool, MixedKVPool):
            return MixedTritonAttention(plain, pool, longest_sequence, kernels)
        rest = (longest_sequence, kernels, run_prefill)
        if pool.bounds is not None:
            return SelectingTritonAttention(plain, pool, pool.bounds, *rest, sees_later_keys=sees_later_keys)
        return TritonAttention(plain, pool, *rest, sees_later_keys=sees_later_keys)
    if run_prefill is not None:
        raise ModelError("attention_backend = 'flash': latent attention needs 'triton', 'torch' or 'auto'.")
    if sparse := [layer for layer in latent if isinstance(layer, SparseLatentAttention)]:
        return SparseLatentEager(sparse, pool)
    return TritonLatentAttention(latent, pool, longest_sequence, kernels)
