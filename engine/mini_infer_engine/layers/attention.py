"""Describes the attention block of a decoder as data: projections, norms of q and k, rotation, window. Backends compute
it.

All kinds of attention derive from `AttentionBlock`; `latent_attention` has the other kind.
"""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from mini_infer_engine.config.model.model_config import HeadShape, ModelConfig
from mini_infer_engine.layers.head_order import RotatedProjection, head_order
from mini_infer_engine.layers.linear import Linear, PackedLinear, row_parallel
from mini_infer_engine.layers.norm import RMSNorm
from mini_infer_engine.layers.placement import Part, Placement
from mini_infer_engine.layers.rotary import Rotary


class AttentionBlock(nn.Module):
    """The common part of all kinds of attention, which models, executors and backends read.

    All layers of a model are of one kind, because one backend computes them all.
    """

    def __init__(self, config: ModelConfig, layer: int, *, value_dim: int) -> None:
        """Takes `value_dim`, the width that one head contributes to the output."""
        super().__init__()
        self.layer = config.kv_index(layer)
        """The index of the layer's keys and values among those of equal width that this process stores, and so in the
        page pool. Layers that share them have the same index.
        """
        self.is_last = layer == config.num_layers - 1
        parallel = config.tensor_parallel
        self.num_heads, self.head_dim = parallel.num_heads(config.num_heads), config.head_shape(layer).head_dim
        """The heads of this rank."""
        self.out_width = self.num_heads * value_dim
        """The width of attention's output, which `o_proj` reads."""
        self.scale = config.attention_scale
        self.softcap = config.attention_softcap
        self.sinks: Tensor | None = None  # [heads]
        """Attention sinks (Xiao et al. 2023, arXiv 2309.17453) as learned logits, one for each head of this rank."""
        self.sliding_window = config.sliding_windows[layer]
        self.rope = config.ropes[layer]
        self.rotary: Rotary | None = None  # set by `DecoderModel.finish_loading`, shared by layers of one rotation
        self.o_proj = row_parallel(config.num_heads * value_dim, config.hidden_size, parallel, bias=config.output_bias)

    @property
    def head_shape(self) -> HeadShape:
        """The KV heads of this rank, whose layers one backend computes."""
        return HeadShape(1, self.head_dim)

    def finish_loading(self) -> None:
        """Derives tensors from the weights, after all linear layers have finished loading."""


class Attention(AttentionBlock):
    """Grouped-query self-attention over the page pool (Ainslie et al. 2023, arXiv 2305.13245), optionally windowed."""

    projected: Collection[str] = ("q_proj", "k_proj", "v_proj")
    """The products that the checkpoint has; a subclass may make keys and values from others."""

    def __init__(self, config: ModelConfig, layer: int, *, has_qk_norm: bool = False) -> None:
        shape, parallel = config.head_shape(layer), config.tensor_parallel
        super().__init__(config, layer, value_dim=shape.head_dim)
        self.num_kv_heads = parallel.num_heads(shape.num_kv_heads)
        """The KV heads of this rank; if there are fewer KV heads than ranks, several ranks have the same one."""
        sizes = {"q_proj": config.num_heads, "k_proj": shape.num_kv_heads, "v_proj": shape.num_kv_heads}
        parts = {name: parallel.heads(heads, self.head_dim) for name, heads in sizes.items() if name in self.projected}
        order = head_order(self.rope, self.head_dim)
        self.qkv_proj: Linear = (
            PackedLinear(config.hidden_size, parts, bias=config.qkv_bias)
            if order is None
            else RotatedProjection(config.hidden_size, parts, order, bias=config.qkv_bias)
        )
        self.q_norm = RMSNorm.of(config, self.head_dim, order=order) if has_qk_norm else None
        self.k_norm = RMSNorm.of(config, self.head_dim, order=order) if has_qk_norm else None
        self.qk_norm_weight: Tensor | None = None  # [heads + kv_heads, head_dim]
        self._heads = parallel.heads(config.num_heads, 1)
        if config.attention_sinks:
            self.sinks = nn.Parameter(torch.empty(self.num_heads), requires_grad=False)

    @property
    def head_shape(self) -> HeadShape:
        """The KV heads of this rank, whose layers one backend computes."""
        return HeadShape(self.num_kv_heads, self.head_dim)

    def checkpoint_tensors(self, path: str) -> dict[str, Placement]:
        """Maps the checkpoint's sinks to those of this rank's heads; its layers and norms have placements of their
        own.
        """
        if self.sinks is None:
            return {}
        part = None if self._heads.count == self._heads.total else Part(0, self._heads)
        return {f"{path}.sinks": Placement(self.sinks, part=part)}

    def finish_loading(self) -> None:
        """Expands the two norms' weights to one row for each head, so that one product scales q and k."""
        if self.q_norm is not None and self.k_norm is not None:
            q_weight, k_weight = self.q_norm.weight, self.k_norm.weight
            rows = (q_weight.expand(self.num_heads, -1), k_weight.expand(self.num_kv_heads, -1))
            self.qk_norm_weight = torch.cat(rows)
