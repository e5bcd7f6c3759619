"""Registers attention with transformers' attention interface: modules of a model hand us rotated queries, keys and
values, and the pass that runs attends over the page pool.

It knows no architecture. What a module's call means, and whether it can be served, is decided by `probe`.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from mini_infer_engine.config.parallelism.tensor_parallel import TensorParallel
from mini_infer_engine.layers.attention import Attention
from mini_infer_engine.layers.norm import RMSNorm
from mini_infer_engine.models.transformers_backend.alibi import positions_of
from mini_infer_engine.models.transformers_backend.sharding.forwards import gather
from mini_infer_engine.ops.base import AttentionPass, ResidualState

PAGED = "mini_infer_paged"
"""The name of our attention for `attn_implementation`. No mask function has this name, so that no mask is made."""


class AttentionCalls(Protocol):
    """The receiver of the attention calls of one forward pass."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        options: Mapping[str, Any],
    ) -> Tensor:
        """Returns the output [1, tokens, heads, value_dim] of one layer.

        query is [1, heads, tokens, head_dim]; key and value are [1, kv_heads, tokens, dim].
        """


_calls: ContextVar[AttentionCalls] = ContextVar("attention calls")
"""The receiver of this forward pass: several threads may run passes of one model while its kernels compile."""


@contextmanager
def receiving(calls: AttentionCalls) -> Iterator[None]:
    """Sends the attention calls of this thread to `calls`."""
    token = _calls.set(calls)
    try:
        yield
    finally:
        _calls.reset(token)


def paged_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    """Implements transformers' attention interface; there are no attention weights to return."""
    return _calls.get().attend(module, query, key, value, attention_mask, options), None


AttentionInterface.register(PAGED, paged_attention)


@dataclass(frozen=True, slots=True)
class Handover:
    """The state behind a layer's output, in which the norm that reads the output is computed already."""

    output: Tensor | None = None
    state: ResidualState | None = None
    norm: RMSNorm | None = None

    def take(self, hidden: Tensor, norm: RMSNorm) -> ResidualState | None:
        """Returns the state if it is that of `hidden` and has this norm, or None."""
        return self.state if self.output is hidden and self.norm is norm else None


def paged_calls() -> "PagedCalls":
    """Returns the receiver of the pass that runs in this thread."""
    calls = _calls.get()
    assert isinstance(calls, PagedCalls), "fused layers do not run in probes"
    return calls


class PagedCalls:
    """Attends over the page pool: keys and values are written to pages, and read through the page tables of a pass.

    Where a plan of tensor parallelism gathers all heads before attention, as for norms over them, a rank attends with
    its own and gathers the results. Its pages are those of other models of as many heads.
    """

    def __init__(
        self,
        attention: AttentionPass,
        blocks: Iterable[tuple[Attention, Tensor | None]],
        dtype: torch.dtype,
        parallel: TensorParallel,
    ) -> None:
        """Takes the attention blocks in the order in which a pass calls them, and the dtype in which they compute.

        Each comes with the dimensions [heads, width] by which ALiBi extends its queries, or None.
        """
        self._attention, self._blocks, self._dtype, self._parallel = attention, iter(blocks), dtype, parallel
        self.handover = Handover()

    def attend_projected(self, qkv: Tensor, cos: Tensor, sin: Tensor, norms: tuple[RMSNorm, RMSNorm] | None) -> Tensor:
        """Rotates queries and keys of qkv [tokens, width] by cos and sin [tokens, head_dim], after the norms of heads
        if there are any, and attends: [tokens, heads * head_dim].
        """
        block, _ = next(self._blocks)
        rotated = block.num_heads + block.num_kv_heads
        if qkv.is_cuda:
            from mini_infer_engine.kernels.attention.rotate_heads import rotate_heads_

            weights = None if norms is None else (norms[0].weight, norms[1].weight)
            eps = 0.0 if norms is None else norms[0].eps
            rotate_heads_(qkv, cos, sin, block.num_heads, block.num_kv_heads, weights, eps)
        else:
            heads = qkv[:, : rotated * block.head_dim].view(len(qkv), rotated, block.head_dim)
            if norms is not None:
                counts = [block.num_heads, block.num_kv_heads]
                for part, norm in zip(torch.split(heads, counts, dim=1), norms, strict=True):
                    part.copy_(norm(part))
            first, second = heads.chunk(2, dim=-1)
            turned = torch.cat((-second, first), dim=-1)
            heads.copy_(heads * cos.unsqueeze(1) + turned * sin.unsqueeze(1))
        return self._attention.attend(qkv.to(self._dtype), block).to(qkv.dtype)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        options: Mapping[str, Any],
    ) -> Tensor:
        """Attends by the pass. Module, mask and options are those of the probe, by which the blocks were made."""
        del module, mask, options
        block, slopes = next(self._blocks)
        counts = (block.num_heads, block.num_kv_heads, block.num_kv_heads)
        own = [self._own(heads[0], count) for heads, count in zip((query, key, value), counts, strict=True)]
        qkv = torch.cat([heads.transpose(0, 1) for heads in own], dim=1)
        if slopes is not None:
            qkv = torch.cat([qkv, self._further(slopes, block)], dim=2)
        mixed = self._attention.attend(qkv.flatten(1).to(self._dtype), block).to(value.dtype)
        if slopes is not None:
            mixed = mixed.view(-1, block.num_heads, block.head_dim)[..., : value.shape[3]]
        if query.shape[1] > block.num_heads:
            mixed = gather(mixed, query.shape[1] * value.shape[3])
        return mixed.reshape(1, query.shape[2], query.shape[1], value.shape[3])

    def _further(self, slopes: Tensor, block: Attention) -> Tensor:
        """Returns the further dimensions [tokens, heads, width] of queries, keys and values, which have none."""
        keys = positions_of(self._attention.positions, slopes.dtype).unsqueeze(1)
        queries = slopes.expand(len(keys), -1, -1)
        keys = keys.expand(-1, block.num_kv_heads, -1)
        return torch.cat([queries, keys, torch.zeros_like(keys)], dim=1)

    def _own(self, heads: Tensor, count: int) -> Tensor:
        """Returns the rank's heads out of all [heads, tokens, dim], or these if they are its own already."""
        if heads.shape[0] == count:
            return heads
        first = self._parallel.rank * heads.shape[0] // self._parallel.size
        return heads[first : first + count]
