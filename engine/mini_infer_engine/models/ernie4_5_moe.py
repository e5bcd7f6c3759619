"""Defines ERNIE 4.5 with mixtures of experts, which softmax scores and a correction chooses."""

from typing import ClassVar

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.layers.moe import MoESpec
from mini_infer_engine.models.decoder import DecoderLayer
from mini_infer_engine.models.deepseek_v2 import layer_number
from mini_infer_engine.models.ernie4_5 import parse_ernie
from mini_infer_engine.models.sparse_decoder import SparseConfig, SparseLayer, SparseModel


class Ernie4_5_MoeForCausalLM(SparseModel):  # noqa: N801  # the name in config.json
    """ERNIE 4.5 21B-A3B and 300B-A47B (ERNIE Team 2025, ERNIE 4.5 Technical Report), without multi-token prediction."""

    layer_class: ClassVar[type[DecoderLayer]] = SparseLayer
    checkpoint_names: ClassVar[dict[str, str]] = {
        ".gate.e_score_correction_bias.": ".moe_statics.e_score_correction_bias."
    }

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Reads the config with transformers' defaults."""
        num_layers, num_experts = fields.size("num_hidden_layers"), fields.size("moe_num_experts", 64)
        top_k = fields.size("moe_k", 6)
        if top_k > num_experts:
            raise fields.refuse("moe_k", f"must be at most moe_num_experts = {num_experts}.")
        if fields.boolean("use_bias", False):
            raise fields.refuse("use_bias", "biases of experts are not supported for this architecture.")
        shared = fields.optional_integer("moe_num_shared_experts")
        moe = MoESpec(
            hidden_size=fields.size("hidden_size"),
            intermediate_size=fields.size("moe_intermediate_size", 1536),
            num_experts=num_experts,
            top_k=top_k,
            normalizes_top_k=True,
            num_shared=2 if shared is None else layer_number(fields, "moe_num_shared_experts"),
            has_correction=True,
        )
        last, step = fields.optional_integer("moe_layer_end_index"), fields.size("moe_layer_interval", 1)
        first = fields.optional_integer("moe_layer_start_index")
        end = num_layers if last in (None, -1) else last + 1
        layers = range(1 if first is None else first, min(end, num_layers))
        sparse = frozenset(layer for layer in layers if (layer + 1) % step == 0)
        return SparseConfig(**parse_ernie(fields, architecture, eos_token_ids), moe=moe, sparse_layers=sparse)

    def is_unused(self, checkpoint_name: str) -> bool:
        """True also for tensors of the layers that predict further tokens."""
        return checkpoint_name.startswith("model.mtp_") or super().is_unused(checkpoint_name)
