"""Defines GLM-4.7-Flash: DeepSeek-V3's decoder with other defaults."""

from typing import Any

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.models.deepseek_v3 import DeepseekV3ForCausalLM

_DEFAULTS: dict[str, Any] = {
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1536,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.8,
    "first_k_dense_replace": 1,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "rms_norm_eps": 1e-5,
}
"""The defaults of transformers."""


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    """GLM-4.7-Flash (Z.ai 2026)."""

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Reads the config with transformers' defaults."""
        return super().parse_config(Fields(fields.path, _DEFAULTS | dict(fields.values)), architecture, eos_token_ids)
