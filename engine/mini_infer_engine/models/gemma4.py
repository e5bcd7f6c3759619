"""Defines Gemma 4 (text): heads of another width in full layers, keys and values that layers share, an input of its own
for each layer, and experts beside the MLP.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import HeadShape, ModelConfig
from mini_infer_engine.layers.attention import Attention, AttentionBlock
from mini_infer_engine.layers.embedding import Embedding
from mini_infer_engine.layers.linear import Linear
from mini_infer_engine.layers.mlp import GatedMLP
from mini_infer_engine.layers.moe import SparseMoE
from mini_infer_engine.layers.norm import RMSNorm, unit_rms
from mini_infer_engine.layers.placement import Placement
from mini_infer_engine.models.decoder import LAYER_NAME, DecoderLayer, DecoderModel, OutputNormLayer
from mini_infer_engine.models.gemma4_config import Gemma4Config, parse_gemma4
from mini_infer_engine.ops.base import AttentionPass, Ops, ResidualState


@dataclass(slots=True)
class Gemma4Pass:
    """An `AttentionPass` with what layers hand on to later ones."""

    attention: AttentionPass
    layer_inputs: Tensor | None  # [tokens, layers, width]
    keys_and_values: dict[int, Tensor] = field(default_factory=dict)
    """Keys before their norm, and values, of the layers that others share."""

    @property
    def logits_indices(self) -> Tensor | None:
        """The tokens whose logits are requested."""
        return self.attention.logits_indices

    @property
    def positions(self) -> Tensor:
        """The position of each token in its text."""
        return self.attention.positions

    def attend(self, qkv: Tensor, layer: AttentionBlock) -> Tensor:
        """Attends as the backend does."""
        return self.attention.attend(qkv, layer)


class Gemma4Attention(Attention):
    """Attention with norms of q, k and v, whose keys and values may be another layer's, or values its keys."""

    def __init__(self, config: Gemma4Config, layer: int) -> None:
        assert config.kv_sources is not None
        self.source = config.kv_sources[layer]
        self.values_are_keys = config.values_are_keys and config.sliding_windows[layer] is None
        if self.source != layer:
            self.projected = ("q_proj",)
        elif self.values_are_keys:
            self.projected = ("q_proj", "k_proj")
        super().__init__(config, layer, has_qk_norm=True)
        if self.source != layer:
            self.k_norm = None  # the source's, once it is loaded
        self.is_shared = layer in config.kv_sources[layer + 1 :]
        self.eps = config.rms_norm_eps


class Gemma4Layer(OutputNormLayer):
    """Gemma 3's layer with a factor, an input of its own, and experts beside the MLP, where the config has them."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        assert isinstance(config, Gemma4Config)
        self.number = layer
        self.layer_scalar = nn.Parameter(torch.empty(1), requires_grad=False)
        self.moe: SparseMoE | None = None
        if config.moe is not None:
            self.moe = SparseMoE(config.moe, config.tensor_parallel)
            self.moe.reads_stacks = True
            self.router_norm = _RouterNorm.of(config)
            self.pre_feedforward_layernorm_2 = RMSNorm.of(config)
            self.post_feedforward_layernorm_1 = RMSNorm.of(config)
            self.post_feedforward_layernorm_2 = RMSNorm.of(config)
        self.per_layer_input_gate: Linear | None = None
        if width := config.layer_input_size:
            self.per_layer_input_gate = Linear(config.hidden_size, width)
            self.per_layer_projection = Linear(width, config.hidden_size)
            self.post_per_layer_input_norm = RMSNorm.of(config)

    def make_attention(self, config: ModelConfig, layer: int) -> AttentionBlock:
        """Returns attention with this layer's heads."""
        assert isinstance(config, Gemma4Config)
        return Gemma4Attention(config, layer)

    def make_mlp(self, config: ModelConfig, layer: int) -> nn.Module:
        """Returns the MLP, which may be twice as wide in layers that share keys and values."""
        assert isinstance(config, Gemma4Config)
        assert config.kv_sources is not None
        is_wide = config.widens_mlp and config.kv_sources[layer] != layer
        return GatedMLP(replace(config, intermediate_size=config.intermediate_size * (2 if is_wide else 1)))

    def forward(
        self, ops: Ops, state: ResidualState, attention: AttentionPass, next_norm: RMSNorm | None
    ) -> ResidualState:
        """Returns the residual state after this layer, all of which is multiplied by the layer's factor."""
        del next_norm  # what the factor precedes
        assert isinstance(attention, Gemma4Pass)
        mixed, state = self.attend(ops, state, attention)
        if not mixed.shape[0]:
            return state
        before = self.pre_feedforward_layernorm
        state = ops.linear_norm_add_norm(mixed, self.self_attn.o_proj, self.post_attention_layernorm, state, before)
        state = self._feed_forward(ops, state)
        if self.per_layer_input_gate is not None:
            gate = ops.norm_linear(state, None, self.per_layer_input_gate)
            own = functional.gelu(gate, approximate="tanh").mul_(self._own_input(attention))
            norm = self.post_per_layer_input_norm
            state = ops.linear_norm_add_norm(own, self.per_layer_projection, norm, state, None)
        return ResidualState(state.residual.mul_(self.layer_scalar))

    def project(self, ops: Ops, state: ResidualState) -> Tensor:
        """Returns queries, and this layer's keys and values if it has its own."""
        assert isinstance(self.self_attn, Gemma4Attention)
        return ops.norm_linear(state, self.input_layernorm, self.self_attn.qkv_proj)

    def attend(self, ops: Ops, state: ResidualState, attention: AttentionPass) -> tuple[Tensor, ResidualState]:
        """Returns attention's output, and the residual state of the same tokens.

        A layer without keys of its own writes its source's once more: they are equal, and backends need not know.
        """
        block = self.self_attn
        assert isinstance(block, Gemma4Attention)
        assert isinstance(attention, Gemma4Pass)
        projected, q_width = self.project(ops, state), block.out_width
        if block.source != self.number:
            qkv = torch.cat((projected, attention.keys_and_values[block.source]), dim=1)
        else:
            kv_width = block.num_kv_heads * block.head_dim
            values = projected[:, -kv_width:].reshape(len(projected), block.num_kv_heads, block.head_dim)
            keys = projected[:, : q_width + kv_width]
            qkv = torch.cat((keys, unit_rms(values, block.eps).flatten(1)), dim=1)
            if block.is_shared:  # the backend normalises and rotates in place
                attention.keys_and_values[self.number] = qkv[:, q_width:].clone()
        mixed = attention.attend(qkv, block)
        if block.is_last and attention.logits_indices is not None:
            state = state.select(attention.logits_indices)
        return mixed, state

    def _feed_forward(self, ops: Ops, state: ResidualState) -> ResidualState:
        """Returns the residual state after the MLP, or after the sum of MLP and experts."""
        assert isinstance(self.mlp, GatedMLP)
        gated = ops.norm_gated_linear(state, self.pre_feedforward_layernorm, self.mlp.gate_up_proj, self.mlp.activation)
        if self.moe is None:
            return ops.linear_norm_add_norm(gated, self.mlp.down_proj, self.post_feedforward_layernorm, state, None)
        both = ResidualState(torch.zeros_like(state.residual))
        both = ops.linear_norm_add_norm(gated, self.mlp.down_proj, self.post_feedforward_layernorm_1, both, None)
        plain = ResidualState(state.residual)
        routed_by, x = ops.norm(plain, self.router_norm), ops.norm(plain, self.pre_feedforward_layernorm_2)
        made = ResidualState(ops.experts(x, routed_by, self.moe))
        both = ops.add_norm(ops.norm(made, self.post_feedforward_layernorm_2), both, None)
        return ops.add_norm(ops.norm(both, self.post_feedforward_layernorm), plain, None)

    def _own_input(self, attention: Gemma4Pass) -> Tensor:
        """Returns this layer's own input of the tokens that it computes to the end."""
        assert attention.layer_inputs is not None
        own = attention.layer_inputs[:, self.number]
        selected = attention.logits_indices if self.self_attn.is_last else None
        return own if selected is None else own.index_select(0, selected)

    def normed_products(self) -> list[tuple[RMSNorm, Linear]]:
        """Returns no products: layers hand on keys and values, and are not calibrated alone."""
        return []


class _RouterNorm(RMSNorm):
    """The norm of the router's input, whose weight the checkpoint has without the factor of the width."""

    def checkpoint_tensors(self, path: str) -> dict[str, Placement]:
        """Maps the checkpoint's scale to the weight."""
        factor = self.weight.shape[0] ** -0.5
        return {
            name: replace(placement, expand=lambda scale: scale * factor)
            for name, placement in super().checkpoint_tensors(path).items()
        }


class LayerInputs(nn.Module):
    """Makes an input of its own for each layer, from the token's id and from its embedding (Gemma 3n's per-layer
    embeddings).
    """

    def __init__(self, config: Gemma4Config) -> None:
        super().__init__()
        self.num_layers, self.width = config.num_layers, config.layer_input_size
        self.total_width = self.num_layers * self.width
        self.embed_tokens_per_layer = Embedding(config.layer_input_vocab_size, self.total_width)
        self.per_layer_model_projection = Linear(config.hidden_size, self.total_width)
        self.per_layer_projection_norm = RMSNorm.of(config, self.width)

    def forward(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """Returns the inputs [tokens, layers, width] for scaled embeddings [tokens, hidden]."""
        sizes = (len(token_ids), self.num_layers, self.width)
        by_id = self.embed_tokens_per_layer(token_ids).view(sizes)
        scale = torch.tensor(self.width**0.5, dtype=by_id.dtype).item()
        projected = self.per_layer_model_projection(hidden).mul_(hidden.shape[1] ** -0.5).view(sizes)
        normed: Tensor = self.per_layer_projection_norm(projected)
        return normed.add_(by_id.mul_(scale)).mul_(2.0**-0.5)


class Gemma4ForCausalLM(DecoderModel):
    """The text model of Gemma 4 (Google DeepMind 2026)."""

    layer_class: ClassVar[type[DecoderLayer]] = Gemma4Layer
    checkpoint_names: ClassVar[dict[str, str]] = {
        "layer_inputs.": "model.",
        ".moe.gate.": ".router.proj.",
        ".moe.expert_scale.": ".router.per_expert_scale.",
        ".moe.experts.": ".experts.",
        ".router_norm.weight.": ".router.scale.",
    }

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        assert isinstance(config, Gemma4Config)
        self.layer_inputs = LayerInputs(config) if config.layer_input_size else None

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Reads the config with transformers' defaults."""
        return parse_gemma4(fields, architecture, eos_token_ids)

    @classmethod
    def check_split(cls, config: ModelConfig) -> None:
        """Raises ModelError if the ranks cannot share the heads of each width, or the experts."""
        super().check_split(config)
        assert isinstance(config, Gemma4Config)
        parallel = config.tensor_parallel
        shapes: Mapping[HeadShape, None] = dict.fromkeys(config.head_shapes or ())
        heads = [parallel.obstacle("num_key_value_heads", shape.num_kv_heads, copies=True) for shape in shapes]
        experts = None
        if config.moe is not None and parallel.whole_experts:
            experts = parallel.obstacle("enable_expert_parallel: the number of experts", config.moe.num_experts)
        elif config.moe is not None:
            experts = parallel.obstacle("moe_intermediate_size", config.moe.intermediate_size)
        for obstacle in filter(None, (*heads, experts)):
            raise ModelError(f"{config.architecture}: {obstacle}.")

    def is_unused(self, checkpoint_name: str) -> bool:
        """True also for keys and values of layers that read another layer's."""
        if (found := LAYER_NAME.match(checkpoint_name)) is not None:
            layer, part = int(found[1]), checkpoint_name[found.end() :]
            sources = self.config.kv_sources or ()
            if layer < len(sources) and sources[layer] != layer and part.startswith(("self_attn.k_", "self_attn.v_")):
                return True
        return super().is_unused(checkpoint_name)

    def finish_loading(self, max_positions: int) -> None:
        """Finishes as other decoders do, and lends the norms of keys to the layers that share these."""
        blocks = [layer.self_attn for layer in self.layers]
        for block in blocks:
            assert isinstance(block, Gemma4Attention)
            if block.k_norm is None:
                source = blocks[block.source]
                assert isinstance(source, Gemma4Attention)
                block.k_norm = source.k_norm
        super().finish_loading(max_positions)

    def embed(self, ops: Ops, token_ids: Tensor) -> Tensor:
        """Maps token ids [tokens] int64 to their embeddings, beside them the inputs of all layers if there are some."""
        hidden = super().embed(ops, token_ids)
        if self.layer_inputs is None:
            return hidden
        return torch.cat((hidden, self.layer_inputs(token_ids, hidden).flatten(1)), dim=1)

    def forward(self, ops: Ops, hidden: Tensor, attention: AttentionPass) -> ResidualState:
        """Maps the output of `embed` to the residual state after the last layer."""
        inputs = None
        if self.layer_inputs is not None:
            width, num_layers = self.config.hidden_size, self.config.num_layers
            inputs = hidden[:, width:].reshape(len(hidden), num_layers, -1)
            hidden = hidden[:, :width].contiguous()
        return super().forward(ops, hidden, Gemma4Pass(attention, inputs))
