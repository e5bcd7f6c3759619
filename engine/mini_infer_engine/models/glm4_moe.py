"""Defines GLM-4.5 to 4.7: heads rotated in part, q and k norms in the larger models, and DeepSeek-V3's router."""

from dataclasses import dataclass
from typing import Any, ClassVar

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import ModelConfig, parse_activation, parse_decoder
from mini_infer_engine.config.model.rope import parse_partial_rope
from mini_infer_engine.layers.attention import Attention, AttentionBlock
from mini_infer_engine.models.decoder import DecoderLayer
from mini_infer_engine.models.deepseek_v2 import layer_number, moe_spec
from mini_infer_engine.models.mtp_names import DEEPSEEK, MtpNames
from mini_infer_engine.models.sparse_decoder import SparseConfig, SparseLayer, SparseModel, predicts_further

PARTIAL_ROTATION = 0.5
_DEFAULTS: dict[str, Any] = {
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
}
"""The defaults of transformers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Glm4MoeConfig(SparseConfig):
    """A `SparseConfig` of a model that may have norms of q and k."""

    has_qk_norm: bool


class Glm4MoeLayer(SparseLayer):
    """Llama's layer, with a mixture where the config has one, and with q and k norms if the config says so."""

    def make_attention(self, config: ModelConfig, layer: int) -> AttentionBlock:
        """Returns attention with the norms of the config."""
        assert isinstance(config, Glm4MoeConfig)
        return Attention(config, layer, has_qk_norm=config.has_qk_norm)


class Glm4MoeForCausalLM(SparseModel):
    """GLM-4.5, 4.6 and 4.7, and GLM-4.5-Air (GLM Team 2025, arXiv 2508.06471)."""

    mtp_names: ClassVar[MtpNames | None] = DEEPSEEK
    layer_class: ClassVar[type[DecoderLayer]] = Glm4MoeLayer

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Reads the config with transformers' defaults."""
        fields = Fields(fields.path, _DEFAULTS | dict(fields.values))
        if fields.values.get("scoring_func") not in (None, "sigmoid"):
            raise fields.refuse("scoring_func", "only sigmoid is supported for this architecture.")
        normalizes = fields.boolean("norm_topk_prob", True)
        moe = moe_spec(fields, in_groups=True, normalizes=normalizes, scoring="sigmoid", has_correction=True)
        num_layers = fields.size("num_hidden_layers")
        different = {
            "qkv_bias": fields.boolean("attention_bias", False),
            "activation": parse_activation(fields),
            "ropes": (parse_partial_rope(fields, PARTIAL_ROTATION),) * num_layers,
            "default_eps": 1e-5,
        }
        common = parse_decoder(fields, architecture, eos_token_ids, **different)
        sparse = frozenset(range(layer_number(fields, "first_k_dense_replace"), num_layers))
        has_qk_norm = fields.boolean("use_qk_norm", False)
        return Glm4MoeConfig(**common, moe=moe, sparse_layers=sparse, has_qk_norm=has_qk_norm)

    def is_elsewhere(self, checkpoint_name: str) -> bool:
        """True also for tensors of the layers that predict further tokens."""
        return predicts_further(self.config, checkpoint_name) or super().is_elsewhere(checkpoint_name)
