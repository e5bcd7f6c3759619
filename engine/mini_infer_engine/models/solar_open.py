"""Defines Solar Open: GLM-4.5's decoder whose heads are rotated whole, with a mixture in every layer."""

from typing import ClassVar

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.models.glm4_moe import Glm4MoeForCausalLM
from mini_infer_engine.models.mtp_names import MtpNames


class SolarOpenForCausalLM(Glm4MoeForCausalLM):
    """Solar Open 100B (Upstage 2025)."""

    mtp_names: ClassVar[MtpNames | None] = None

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Reads the config with transformers' defaults. No layer has the plain MLP whose width files omit."""
        width = fields.size("moe_intermediate_size", 1280)
        defaults = {"partial_rotary_factor": 1.0, "head_dim": 128, "moe_intermediate_size": width}
        only = {"first_k_dense_replace": 0, "use_qk_norm": False, "intermediate_size": width}
        fields = Fields(fields.path, defaults | dict(fields.values) | only)
        return super().parse_config(fields, architecture, eos_token_ids)
