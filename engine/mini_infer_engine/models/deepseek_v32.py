"""Defines DeepSeek-V3.2: V3's decoder with sparse attention, whose tokens are chosen by an indexer in each layer."""

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.layers.attention import AttentionBlock
from mini_infer_engine.layers.sparse_latent_attention import IndexerSpec, SparseLatentAttention
from mini_infer_engine.models.decoder import DecoderLayer
from mini_infer_engine.models.deepseek_v2 import DeepseekConfig, DeepseekV2Layer
from mini_infer_engine.models.deepseek_v3 import DeepseekV3ForCausalLM
from mini_infer_engine.models.kv_spec import KVSpec
from mini_infer_engine.models.mtp_names import MtpNames
from mini_infer_engine.ops.base import Ops, ResidualState

_DEFAULTS: dict[str, Any] = {
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "index_n_heads": 64,
}
"""The defaults of transformers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseLatentConfig(DeepseekConfig):
    """A `DeepseekConfig` with an indexer."""

    indexer: IndexerSpec
    indexed_layers: frozenset[int]
    """The layers with an indexer; the others read what the last of these has chosen."""


class DeepseekV32Layer(DeepseekV2Layer):
    """A layer with sparse latent attention, and with a mixture where the config has one."""

    def make_attention(self, config: ModelConfig, layer: int) -> AttentionBlock:
        """Returns sparse latent attention."""
        assert isinstance(config, SparseLatentConfig)
        has_indexer = layer in config.indexed_layers
        return SparseLatentAttention(config, layer, config.latent, config.indexer, has_indexer=has_indexer)

    def project(self, ops: Ops, state: ResidualState) -> Tensor:
        """Returns queries, latent, shared key and the indexer's input, as `SparseLatentAttention` documents."""
        attention = self.self_attn
        assert isinstance(attention, SparseLatentAttention)
        assert attention.q_a_layernorm is not None
        assert attention.q_b_proj is not None
        x = ops.norm(state, self.input_layernorm)
        packed = ops.norm_linear(ResidualState(x), None, attention.a_proj)
        rank = attention.q_a_layernorm.weight.shape[0]
        latent = ops.norm(ResidualState(packed[:, :rank].contiguous()), attention.q_a_layernorm)
        q = ops.norm_linear(ResidualState(latent), None, attention.q_b_proj)
        if (indexer := attention.indexer) is None:
            return torch.cat((q, packed[:, rank:]), dim=-1)
        key = indexer.k_norm(ops.norm_linear(ResidualState(x), None, indexer.wk))
        queries = ops.norm_linear(ResidualState(latent), None, indexer.wq_b)
        weights = indexer.weights_proj(x).view(x.dtype)
        return torch.cat((q, packed[:, rank:], key, queries, weights), dim=-1)


class DeepseekV32ForCausalLM(DeepseekV3ForCausalLM):
    """DeepSeek-V3.2 (DeepSeek-AI 2025, arXiv 2512.02556), without multi-token prediction."""

    layer_class: ClassVar[type[DecoderLayer]] = DeepseekV32Layer
    mtp_names: ClassVar[MtpNames | None] = None

    def kv_spec(self, page_size: int, dtype: torch.dtype) -> KVSpec:
        """Returns a page of one latent and one key of the indexer for each token, whole on every rank."""
        assert isinstance(self.config, SparseLatentConfig)
        width = self.config.latent.latent_width + self.config.indexer.head_dim
        return KVSpec(len(self.config.layers), page_size, 1, width, dtype, entries=1)

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Reads the config with transformers' defaults."""
        fields = Fields(fields.path, _DEFAULTS | dict(fields.values))
        num_layers = fields.size("num_hidden_layers")
        return sparse_config(
            super().parse_config(fields, architecture, eos_token_ids), fields, frozenset(range(num_layers)), False
        )


def sparse_config(
    config: ModelConfig, file: Fields, indexed_layers: frozenset[int], interleaved: bool
) -> SparseLatentConfig:
    """Returns a config with the indexer that the file describes. Raises ModelError if it is not supported."""
    assert isinstance(config, DeepseekConfig)
    if config.latent.q_rank is None:
        raise file.refuse("q_lora_rank", "the indexer needs it.")
    if not config.latent.interleaved:
        raise file.refuse("rope_interleave", "only true is supported for this architecture.")
    indexer = IndexerSpec(
        num_heads=file.size("index_n_heads"),
        head_dim=file.size("index_head_dim", 128),
        top_k=file.size("index_topk", 2048),
        interleaved=interleaved,
    )
    if file.boolean("indexer_rope_interleave", interleaved) != interleaved:
        raise file.refuse("indexer_rope_interleave", f"only {interleaved} is supported for this architecture.")
    if indexer.head_dim < config.latent.rope_dim:
        raise file.refuse("index_head_dim", f"must be at least qk_rope_head_dim = {config.latent.rope_dim}.")
    common = {field.name: getattr(config, field.name) for field in fields(config)}
    return SparseLatentConfig(**common, indexer=indexer, indexed_layers=indexed_layers)
