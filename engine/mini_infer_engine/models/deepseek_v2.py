"""Defines DeepSeek-V2: a decoder with latent attention, and with experts of which some compute every token."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import ModelConfig, parse_activation, parse_decoder
from mini_infer_engine.config.model.rope import RopeParameters, parse_rope
from mini_infer_engine.layers.attention import AttentionBlock
from mini_infer_engine.layers.latent_attention import LatentAttention, LatentSpec
from mini_infer_engine.layers.moe import MoESpec
from mini_infer_engine.models.decoder import DecoderLayer
from mini_infer_engine.models.kv_spec import KVSpec
from mini_infer_engine.models.sparse_decoder import SparseConfig, SparseLayer, SparseModel
from mini_infer_engine.ops.base import Ops, ResidualState


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekConfig(SparseConfig):
    """A `SparseConfig` with the widths of latent attention. `head_dim` is the width that is rotated."""

    latent: LatentSpec


class DeepseekV2Layer(SparseLayer):
    """A layer with latent attention, and with a mixture where the config has one."""

    def make_attention(self, config: ModelConfig, layer: int) -> AttentionBlock:
        """Returns latent attention."""
        assert isinstance(config, DeepseekConfig)
        return LatentAttention(config, layer, config.latent)

    def project(self, ops: Ops, state: ResidualState) -> Tensor:
        """Returns queries, latent and shared key side by side, as `LatentAttention` documents."""
        attention = self.self_attn
        assert isinstance(attention, LatentAttention)
        packed = ops.norm_linear(state, self.input_layernorm, attention.a_proj)
        if attention.q_a_layernorm is None or attention.q_b_proj is None:
            return packed
        rank = attention.q_a_layernorm.weight.shape[0]
        q = ops.norm_linear(ResidualState(packed[:, :rank].contiguous()), attention.q_a_layernorm, attention.q_b_proj)
        return torch.cat((q, packed[:, rank:]), dim=-1)


class DeepseekV2ForCausalLM(SparseModel):
    """DeepSeek-V2 and V2-Lite (DeepSeek-AI 2024, arXiv 2405.04434)."""

    layer_class: ClassVar[type[DecoderLayer]] = DeepseekV2Layer
    caches_latents: ClassVar[bool] = True

    def kv_spec(self, page_size: int, dtype: torch.dtype) -> KVSpec:
        """Returns a page of one latent for each token, whole on every rank."""
        assert isinstance(self.config, DeepseekConfig)
        return KVSpec(len(self.config.layers), page_size, 1, self.config.latent.latent_width, dtype, entries=1)

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Reads the config with transformers' defaults.

        `norm_topk_prob` divides before the scaling factor multiplies, as in vLLM.
        """
        methods = {"greedy": False, "group_limited_greedy": True}
        method = fields.values.get("topk_method") or "greedy"
        if not isinstance(method, str) or method not in methods:
            raise fields.refuse("topk_method", f"supported are {' and '.join(methods)}.")
        if fields.values.get("scoring_func") not in (None, "softmax"):
            raise fields.refuse("scoring_func", "only softmax is supported for this architecture.")
        moe = moe_spec(fields, in_groups=methods[method], normalizes=fields.boolean("norm_topk_prob", False))
        return parse_deepseek(fields, architecture, eos_token_ids, moe, interleaved=True)


def parse_deepseek(
    fields: Fields, architecture: str, eos_token_ids: tuple[int, ...], moe: MoESpec, *, interleaved: bool
) -> DeepseekConfig:
    """Reads the config fields that V2 and V3 share. Raises ModelError if the file requests something unsupported."""
    for key in ("attention_bias", "mlp_bias"):
        if fields.boolean(key, False):
            raise fields.refuse(key, "biases are not supported for this architecture.")
    lacks_rank = "q_lora_rank" in fields.values and fields.values["q_lora_rank"] is None
    latent = LatentSpec(
        q_rank=None if lacks_rank else fields.size("q_lora_rank", 1536),
        kv_rank=fields.size("kv_lora_rank", 512),
        nope_dim=fields.size("qk_nope_head_dim", 128),
        rope_dim=fields.size("qk_rope_head_dim", 64),
        value_dim=fields.size("v_head_dim", 128),
        interleaved=interleaved,
    )
    if fields.size("head_dim", latent.rope_dim) != latent.rope_dim:
        raise fields.refuse("head_dim", f"must be qk_rope_head_dim = {latent.rope_dim}, or be left out.")
    num_layers = fields.size("num_hidden_layers")
    rope = parse_rope(fields, fields.size("max_position_embeddings"))
    different = {
        "activation": parse_activation(fields),
        "default_head_dim": latent.rope_dim,
        "num_kv_heads": 1,  # what is cached is the same for all heads, whatever num_key_value_heads says
        "ropes": (rope,) * num_layers,
        "attention_scale": latent.qk_dim**-0.5 * mscale(rope) ** 2,
    }
    common = parse_decoder(fields, architecture, eos_token_ids, **different)
    sparse = _sparse_layers(fields, num_layers)
    return DeepseekConfig(**common, moe=moe, sparse_layers=sparse, latent=latent)


def _sparse_layers(fields: Fields, num_layers: int) -> frozenset[int]:
    """Returns the layers with a mixture: by `mlp_layer_types`, else every few behind the first dense ones."""
    kinds = fields.values.get("mlp_layer_types")
    if kinds is None:
        first, step = layer_number(fields, "first_k_dense_replace"), fields.size("moe_layer_freq", 1)
        return frozenset(layer for layer in range(first, num_layers) if layer % step == 0)
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= {"dense", "sparse"}:
        raise fields.refuse("mlp_layer_types", f"must list {num_layers} times dense or sparse.")
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "sparse")


def moe_spec(fields: Fields, *, in_groups: bool, normalizes: bool, **different: bool | str) -> MoESpec:
    """Reads the shape of the mixture; its scaling factor multiplies every token's weights.

    Raises ModelError if the numbers contradict each other.
    """
    num_experts = fields.size("n_routed_experts", fields.size("num_experts", 64))
    top_k = fields.size("num_experts_per_tok")
    groups, top_groups = (fields.size("n_group", 1), fields.size("topk_group", 1)) if in_groups else (1, 1)
    if num_experts % groups:
        raise fields.refuse("n_group", f"must divide n_routed_experts = {num_experts}.")
    if top_groups > groups:
        raise fields.refuse("topk_group", f"must be at most n_group = {groups}.")
    if top_k > num_experts // groups * top_groups:
        raise fields.refuse("num_experts_per_tok", "must be at most the experts of the groups that a token may use.")
    return MoESpec(
        hidden_size=fields.size("hidden_size"),
        intermediate_size=fields.size("moe_intermediate_size", 1407),
        num_experts=num_experts,
        top_k=top_k,
        normalizes_top_k=normalizes,
        num_shared=layer_number(fields, "n_shared_experts"),
        scale=fields.number("routed_scaling_factor", 1.0),
        num_groups=groups,
        top_groups=top_groups,
        **different,  # type: ignore[arg-type]  # scoring and has_correction
    )


def mscale(rope: RopeParameters) -> float:
    """Returns Yarn's factor of queries and of keys, if `mscale_all_dim` is set; it is not that of cos and sin."""
    if rope.type == "default" or not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0


def layer_number(fields: Fields, key: str) -> int:
    """Returns a number of layers or experts that may be 0, which is the default."""
    value = fields.optional_integer(key) or 0
    if value < 0:
        raise fields.refuse(key, "must not be negative.")
    return value
