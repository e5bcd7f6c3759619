"""Defines MiniMax M2: norms over all heads of q and of k, heads rotated in part, and experts scored by sigmoid."""

from typing import Any, ClassVar

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import ModelConfig, parse_activation, parse_decoder
from mini_infer_engine.config.model.rope import parse_partial_rope
from mini_infer_engine.layers.moe import MoESpec
from mini_infer_engine.models.decoder import DecoderLayer
from mini_infer_engine.models.mixtral import MixtralForCausalLM
from mini_infer_engine.models.olmo2 import AllHeadsNormLayer
from mini_infer_engine.models.sparse_decoder import (
    SparseConfig,
    SparseLayer,
    SparseModel,
    experts_per_token,
    predicts_further,
)

_DEFAULT_HEAD_DIM = 128
_DEFAULT_THETA = 5_000_000.0
_ONLY: dict[str, Any] = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0,
}
"""Fields of published configs that transformers does not read, with the one value that it computes."""


class MiniMaxM2Layer(AllHeadsNormLayer, SparseLayer):
    """Llama's layer with norms over all heads of q and of k, and a mixture."""


class MiniMaxM2ForCausalLM(SparseModel):
    """MiniMax-M2 and M2.x (MiniMax 2025), without multi-token prediction."""

    layer_class: ClassVar[type[DecoderLayer]] = MiniMaxM2Layer
    checkpoint_names: ClassVar[dict[str, str]] = {
        ".q_norm.": ".self_attn.q_norm.",
        ".k_norm.": ".self_attn.k_norm.",
        ".mlp.gate.e_score_correction_bias.": ".mlp.e_score_correction_bias.",
        **MixtralForCausalLM.checkpoint_names,
    }

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Reads the config. `rotary_dim` of published files is the number of dimensions that are rotated."""
        for key, only in _ONLY.items():
            if fields.values.get(key) not in (None, only):
                raise fields.refuse(key, f"only {only!r} is supported for this architecture.")
        if set(fields.values.get("attn_type_list") or [1]) != {1}:
            raise fields.refuse("attn_type_list", "only 1 (softmax attention) is supported for this architecture.")
        num_layers, num_experts = fields.size("num_hidden_layers"), fields.size("num_local_experts", 256)
        head_dim = fields.size("head_dim", _DEFAULT_HEAD_DIM)
        moe = MoESpec(
            hidden_size=fields.size("hidden_size"),
            intermediate_size=fields.size("intermediate_size"),
            num_experts=num_experts,
            top_k=experts_per_token(fields, 8, num_experts, "num_local_experts"),
            normalizes_top_k=True,
            scoring="sigmoid",
            has_correction=True,
        )
        rope = parse_partial_rope(fields, fields.size("rotary_dim", head_dim) / head_dim, _DEFAULT_THETA)
        different = {
            "activation": parse_activation(fields),
            "ropes": (rope,) * num_layers,
            "default_head_dim": _DEFAULT_HEAD_DIM,
        }
        common = parse_decoder(fields, architecture, eos_token_ids, **different)
        return SparseConfig(**common, moe=moe, sparse_layers=frozenset(range(num_layers)))

    def is_elsewhere(self, checkpoint_name: str) -> bool:
        """True also for tensors of the layers that predict further tokens."""
        return predicts_further(self.config, checkpoint_name) or super().is_elsewhere(checkpoint_name)
