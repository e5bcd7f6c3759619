"""Defines Mixtral: Mistral's decoder with mixtures of experts as feed-forward blocks."""

from typing import ClassVar

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import ModelConfig, parse_activation, parse_decoder, sliding_window
from mini_infer_engine.config.model.rope import parse_rope
from mini_infer_engine.layers.moe import MoESpec
from mini_infer_engine.models.decoder import DecoderLayer
from mini_infer_engine.models.sparse_decoder import SparseConfig, SparseLayer, SparseModel, experts_per_token

_DEFAULT_THETA = 1_000_000.0


class MixtralForCausalLM(SparseModel):
    """Mistral's decoder with eight experts a layer, two of them a token (Jiang et al. 2024, arXiv 2401.04088)."""

    layer_class: ClassVar[type[DecoderLayer]] = SparseLayer
    checkpoint_names: ClassVar[dict[str, str]] = {
        ".mlp.": ".block_sparse_moe.",
        ".gate_proj.": ".w1.",
        ".down_proj.": ".w2.",
        ".up_proj.": ".w3.",
    }

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Reads the config. Every layer is a mixture, and the chosen experts' weights are divided by their sum.

        There is no window unless the file has one.
        """
        num_layers, num_experts = fields.size("num_hidden_layers"), fields.size("num_local_experts", 8)
        top_k = experts_per_token(fields, 2, num_experts, "num_local_experts")
        moe = MoESpec(
            hidden_size=fields.size("hidden_size"),
            intermediate_size=fields.size("intermediate_size"),
            num_experts=num_experts,
            top_k=top_k,
            normalizes_top_k=True,
        )
        rope = parse_rope(fields, fields.size("max_position_embeddings"), _DEFAULT_THETA)
        different = {
            "activation": parse_activation(fields),
            "sliding_windows": (sliding_window(fields),) * num_layers,
            "ropes": (rope,) * num_layers,
            "default_eps": 1e-5,
        }
        common = parse_decoder(fields, architecture, eos_token_ids, **different)
        return SparseConfig(**common, moe=moe, sparse_layers=frozenset(range(num_layers)))
