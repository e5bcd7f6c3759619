"""Defines the layers of Qwen3-Next and Qwen3.5: gated delta nets, and attention whose output a gate weighs."""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import ModelConfig, parse_activation, parse_decoder
from mini_infer_engine.config.model.recurrence import GatedDeltaSpec, Mixer, mixers_by_layer
from mini_infer_engine.config.model.rope import parse_partial_rope
from mini_infer_engine.layers.attention import Attention, AttentionBlock
from mini_infer_engine.layers.gated_delta_net import GatedDeltaNet
from mini_infer_engine.layers.head_order import reordered
from mini_infer_engine.layers.linear import Linear, PackedLinear
from mini_infer_engine.layers.norm import RMSNorm
from mini_infer_engine.layers.recurrent import RecurrentBlock
from mini_infer_engine.layers.rotary import rotary_order
from mini_infer_engine.models.causal_model import StoredWeights
from mini_infer_engine.models.decoder import DecoderLayer
from mini_infer_engine.models.mtp_names import QWEN, MtpNames
from mini_infer_engine.models.recurrent_decoder import HybridModel, RecurrentLayer
from mini_infer_engine.models.sparse_decoder import SparseLayer, find_stacks
from mini_infer_engine.ops.base import AttentionPass, Ops, RecurrentPass, ResidualState

_KINDS: dict[str, Mixer] = {"linear_attention": "recurrent", "full_attention": "attention"}
_DEFAULT_INTERVAL = 4
_DEFAULT_HEAD_DIM = 256
_DEFAULT_PARTIAL = 0.25


class _GatedProjection(PackedLinear):
    """The product of gates, queries, keys and values, in this order: `attend` reads the last three.

    Checkpoints have the rows of each head's query and gate together, in `q_proj`.
    """

    def __init__(self, config: ModelConfig, order: Tensor) -> None:
        parallel, head_dim = config.tensor_parallel, config.head_dim
        keys = parallel.heads(config.num_kv_heads, head_dim)
        parts = {"q_proj": parallel.heads(config.num_heads, 2 * head_dim), "k_proj": keys, "v_proj": keys}
        super().__init__(config.hidden_size, parts, bias=config.qkv_bias)
        self._head_dim, self._order = head_dim, order

    def row_order(self, rows: slice) -> Callable[[Tensor], Tensor] | None:
        """Returns the function that reorders the rows of queries and gates, or of keys."""
        width = self.parts["q_proj"]
        orders: dict[int, Callable[[Tensor], Tensor]] = {
            0: self._gates_and_queries,
            width: partial(reordered, self._order),
        }
        return orders.get(rows.start)

    def _gates_and_queries(self, weight: Tensor) -> Tensor:
        heads = weight.reshape(-1, 2, self._head_dim, *weight.shape[1:])
        return torch.cat((heads[:, 1].flatten(0, 1), reordered(self._order, heads[:, 0].flatten(0, 1))))


class GatedAttention(Attention):
    """Grouped-query attention whose output is weighed by a sigmoid (Qiu et al. 2025, arXiv 2505.06708)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        order = rotary_order(config.head_dim, self.rope.rotary_dim(config.head_dim))
        self.qkv_proj: Linear = _GatedProjection(config, order)
        self.q_norm, self.k_norm = (RMSNorm.of(config, config.head_dim, order=order) for _ in range(2))


class GatedAttentionLayer(SparseLayer):
    """A layer with gated attention, and with a mixture of experts where the config has one."""

    def make_attention(self, config: ModelConfig, layer: int) -> AttentionBlock:
        """Returns gated attention."""
        return GatedAttention(config, layer)

    def attend(self, ops: Ops, state: ResidualState, attention: AttentionPass) -> tuple[Tensor, ResidualState]:
        """Returns attention's output times the gates, and the residual state of the same tokens."""
        block = self.self_attn
        projected = self.project(ops, state)
        gates, qkv = torch.split(projected, [block.out_width, projected.shape[1] - block.out_width], dim=1)
        mixed = attention.attend(qkv.contiguous(), block)
        if block.is_last and attention.logits_indices is not None:
            gates, state = gates.index_select(0, attention.logits_indices), state.select(attention.logits_indices)
        return mixed * gates.sigmoid(), state

    def normed_products(self) -> list[tuple[RMSNorm, Linear]]:
        """Returns no products: their rows have an order of their own."""
        return []


class GatedDeltaLayer(RecurrentLayer, SparseLayer):
    """A layer with a gated delta net, and with a mixture of experts where the config has one."""

    by_key_head: ClassVar[bool] = False
    """True if checkpoints have the rows of each key head together."""

    def make_recurrence(self, config: ModelConfig, layer: int) -> RecurrentBlock:
        """Returns the gated delta net of this layer."""
        assert isinstance(config.recurrence, GatedDeltaSpec)
        return GatedDeltaNet(config, layer, config.recurrence, by_key_head=self.by_key_head)

    def mix(self, ops: Ops, state: ResidualState, recurrent: RecurrentPass) -> Tensor:
        """Projects, convolves queries, keys and values, applies the gated delta rule, and gates its output."""
        block = self.recurrence
        assert isinstance(block, GatedDeltaNet)
        wide = ops.norm_linear(state, self.input_layernorm, block.in_proj)
        if block.in_proj_ba is None:
            return recurrent.gated_delta_net(block.divide(wide), block)
        return recurrent.gated_delta_net((wide, ops.norm_linear(state, self.input_layernorm, block.in_proj_ba)), block)


class GatedDeltaModel(HybridModel):
    """A decoder of gated delta nets, with gated attention in every few layers."""

    mtp_names: ClassVar[MtpNames | None] = QWEN
    layer_class: ClassVar[type[DecoderLayer]] = GatedAttentionLayer
    recurrent_layer_class: ClassVar[type[DecoderLayer]] = GatedDeltaLayer
    checkpoint_names: ClassVar[dict[str, str]] = {
        ".recurrence.": ".linear_attn.",
        ".shared_experts.": ".shared_expert.",
        ".shared_gate.": ".shared_expert_gate.",
    }

    def read_names(self, checkpoint: StoredWeights) -> None:
        """Finds out if experts are stored as stacks, as in Qwen3.5's files, or one by one."""
        find_stacks(self, checkpoint)

    def is_elsewhere(self, checkpoint_name: str) -> bool:
        """True also for tensors of the layers that predict further tokens."""
        return checkpoint_name.startswith("mtp.") or super().is_elsewhere(checkpoint_name)


def parse_gated_delta_decoder(fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> dict[str, Any]:
    """Returns the arguments of the config, with transformers' defaults, which all of these models share."""
    num_layers, interval = fields.size("num_hidden_layers"), fields.size("full_attention_interval", _DEFAULT_INTERVAL)
    otherwise = ["full_attention" if (layer + 1) % interval == 0 else "linear_attention" for layer in range(num_layers)]
    spec = GatedDeltaSpec(
        num_key_heads=fields.size("linear_num_key_heads", 16),
        num_value_heads=fields.size("linear_num_value_heads", 32),
        key_dim=fields.size("linear_key_head_dim", 128),
        value_dim=fields.size("linear_value_head_dim", 128),
        kernel_size=fields.size("linear_conv_kernel_dim", 4),
    )
    if spec.num_value_heads % spec.num_key_heads:
        raise fields.refuse("linear_num_value_heads", f"must be a multiple of {spec.num_key_heads} key heads.")
    bias = fields.boolean("attention_bias", False)
    different = {
        "qkv_bias": bias,
        "output_bias": bias,
        "activation": parse_activation(fields),
        "ropes": (parse_partial_rope(fields, _DEFAULT_PARTIAL),) * num_layers,
        "norm_offset": 1.0,
        "default_head_dim": _DEFAULT_HEAD_DIM,
        "mixers": mixers_by_layer(fields, num_layers, _KINDS, otherwise),
        "recurrence": spec,
    }
    return parse_decoder(fields, architecture, eos_token_ids, **different)
