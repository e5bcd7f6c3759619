"""Defines Qwen3-MoE: Qwen3's decoder with mixtures of experts as feed-forward blocks, in all layers or every few."""

from typing import ClassVar

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import ModelConfig, parse_activation, parse_decoder
from mini_infer_engine.layers.moe import MoESpec
from mini_infer_engine.models.causal_model import StoredWeights
from mini_infer_engine.models.decoder import DecoderLayer
from mini_infer_engine.models.qwen2 import qwen_windows
from mini_infer_engine.models.sparse_decoder import (
    SparseConfig,
    SparseLayer,
    SparseModel,
    experts_per_token,
    find_stacks,
)


class Qwen3MoeLayer(SparseLayer):
    """Qwen3's layer, with a mixture where the config has one."""

    has_qk_norm: ClassVar[bool] = True


class Qwen3MoeForCausalLM(SparseModel):
    """Qwen3's decoder with sparse feed-forward blocks (Yang et al. 2025, arXiv 2505.09388)."""

    layer_class: ClassVar[type[DecoderLayer]] = Qwen3MoeLayer

    def read_names(self, checkpoint: StoredWeights) -> None:
        """Finds out if experts are stored as stacks, as in Qwen3-VL's files, or one by one."""
        find_stacks(self, checkpoint)

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Reads the config with transformers' defaults."""
        # The hub's files say num_experts, those that transformers 5 writes num_local_experts.
        num_experts = fields.size("num_local_experts", fields.size("num_experts", 128))
        top_k = experts_per_token(fields, 8, num_experts, "num_experts")
        moe = MoESpec(
            hidden_size=fields.size("hidden_size"),
            intermediate_size=fields.size("moe_intermediate_size", 768),
            num_experts=num_experts,
            top_k=top_k,
            normalizes_top_k=fields.boolean("norm_topk_prob", False),
        )
        bias = fields.boolean("attention_bias", False)
        different = {
            "qkv_bias": bias,
            "output_bias": bias,
            "sliding_windows": qwen_windows(fields),
            "activation": parse_activation(fields),
        }
        common = parse_decoder(fields, architecture, eos_token_ids, **different)
        return SparseConfig(**common, moe=moe, sparse_layers=sparse_layers(fields))


def sparse_layers(fields: Fields) -> frozenset[int]:
    """Returns the layers with a mixture: every few, without those that `mlp_only_layers` names."""
    dense = fields.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise fields.refuse("mlp_only_layers", "must be a list of layer numbers.")
    step = fields.size("decoder_sparse_step", 1)
    return frozenset(range(step - 1, fields.size("num_hidden_layers"), step)) - set(dense)
