"""Defines DeepSeek-V3: V2's decoder with a router that scores experts by sigmoid and chooses them with a correction."""

from typing import ClassVar

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.models.deepseek_v2 import DeepseekV2ForCausalLM, moe_spec, parse_deepseek
from mini_infer_engine.models.mtp_names import DEEPSEEK, MtpNames
from mini_infer_engine.models.sparse_decoder import predicts_further


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """DeepSeek-V3 and R1 (DeepSeek-AI 2024, arXiv 2412.19437); `mtp` has the layers that predict further tokens."""

    mtp_names: ClassVar[MtpNames | None] = DEEPSEEK

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Reads the config with transformers' defaults."""
        if fields.values.get("topk_method") not in (None, "noaux_tc"):
            raise fields.refuse("topk_method", "only noaux_tc is supported for this architecture.")
        if fields.values.get("scoring_func") not in (None, "sigmoid"):
            raise fields.refuse("scoring_func", "only sigmoid is supported for this architecture.")
        normalizes = fields.boolean("norm_topk_prob", True)
        moe = moe_spec(fields, in_groups=True, normalizes=normalizes, scoring="sigmoid", has_correction=True)
        interleaved = fields.boolean("rope_interleave", True)
        return parse_deepseek(fields, architecture, eos_token_ids, moe, interleaved=interleaved)

    def is_elsewhere(self, checkpoint_name: str) -> bool:
        """True also for tensors of the layers that predict further tokens."""
        return predicts_further(self.config, checkpoint_name) or super().is_elsewhere(checkpoint_name)
