"""Defines GLM-5: DeepSeek-V3.2's decoder, of whose layers some read the tokens that an earlier layer has chosen."""

from typing import Any

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.models.deepseek_v3 import DeepseekV3ForCausalLM
from mini_infer_engine.models.deepseek_v32 import DeepseekV32ForCausalLM, sparse_config

_DEFAULTS: dict[str, Any] = {
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "rms_norm_eps": 1e-5,
    "index_n_heads": 32,
}
"""The defaults of transformers."""
_KINDS = {"F": "full", "S": "shared", "full": "full", "shared": "shared"}


class GlmMoeDsaForCausalLM(DeepseekV32ForCausalLM):
    """GLM-5 (Z.ai 2026), whose layers may share choices (arXiv 2603.12201)."""

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Reads the config with transformers' defaults."""
        fields = Fields(fields.path, _DEFAULTS | dict(fields.values))
        config = DeepseekV3ForCausalLM.parse_config(fields, architecture, eos_token_ids)
        return sparse_config(config, fields, _indexed_layers(fields), interleaved=True)


def _indexed_layers(fields: Fields) -> frozenset[int]:
    """Returns the layers with an indexer: by a list, by a pattern of F and S, or every few."""
    num_layers = fields.size("num_hidden_layers")
    key = "index_topk_pattern" if fields.values.get("indexer_types") is None else "indexer_types"
    kinds = fields.values.get(key)
    if kinds is None:
        step, offset = fields.size("index_topk_freq", 1), fields.optional_integer("index_skip_topk_offset")
        offset = 2 if offset is None else offset
        return frozenset(layer for layer in range(num_layers) if max(layer - offset + 1, 0) % step == 0)
    known = isinstance(kinds, list | str) and all(isinstance(kind, str) and kind in _KINDS for kind in kinds)
    if not known or len(kinds) != num_layers or _KINDS[kinds[0]] != "full":
        raise fields.refuse(key, f"must say full or shared {num_layers} times, and full of the first layer.")
    return frozenset(layer for layer, kind in enumerate(kinds) if _KINDS[kind] == "full")
