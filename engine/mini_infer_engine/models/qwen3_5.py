"""Defines the text models of Qwen3.5: the layers of Qwen3-Next, with plain MLPs or with mixtures in all layers."""

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.models.gated_delta_decoder import GatedDeltaModel, parse_gated_delta_decoder
from mini_infer_engine.models.qwen3_next import parse_gated_moe
from mini_infer_engine.models.sparse_decoder import SparseConfig


class Qwen3_5ForCausalLM(GatedDeltaModel):  # noqa: N801  # the name in config.json
    """Qwen3.5 with plain MLPs."""

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Reads the config with transformers' defaults."""
        return ModelConfig(**parse_gated_delta_decoder(fields, architecture, eos_token_ids))


class Qwen3_5MoeForCausalLM(GatedDeltaModel):  # noqa: N801  # the name in config.json
    """Qwen3.5 with mixtures of experts; the weights of a token's experts are divided by their sum."""

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Reads the config, which has no width of plain MLPs."""
        moe = parse_gated_moe(fields, num_experts=256, top_k=8, normalizes_top_k=True)
        fields = Fields(fields.path, {"intermediate_size": moe.intermediate_size, **fields.values})
        common = parse_gated_delta_decoder(fields, architecture, eos_token_ids)
        return SparseConfig(**common, moe=moe, sparse_layers=frozenset(range(common["num_layers"])))
