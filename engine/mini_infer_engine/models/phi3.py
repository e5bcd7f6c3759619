"""Defines Phi-3 and Phi-4: Llama's decoder; checkpoints have q, k and v, and gate and up, in one tensor each."""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from mini_infer_engine.config.json_fields import Fields
from mini_infer_engine.config.model.model_config import ModelConfig, parse_activation, parse_decoder, sliding_window
from mini_infer_engine.config.model.rope import parse_rope, rope_object
from mini_infer_engine.config.parallelism.tensor_parallel import side_by_side
from mini_infer_engine.layers.head_order import reordered
from mini_infer_engine.layers.linear import Linear
from mini_infer_engine.layers.mlp import FusedGatedMLP
from mini_infer_engine.layers.rotary import rotary_order
from mini_infer_engine.models.decoder import DecoderLayer, DecoderModel

_ORIGINAL_POSITIONS = 4096


class Phi3QKV(Linear):
    """The product of q, k and v from one tensor, with the dimensions of a head in the order of `Rotary`.

    They differ if only the first dimensions of a head are rotated.
    """

    def __init__(self, config: ModelConfig) -> None:
        parallel, head_dim = config.tensor_parallel, config.head_dim
        sizes = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        rows = side_by_side([parallel.heads(heads, head_dim) for heads in sizes])
        super().__init__(config.hidden_size, rows.count, bias=config.qkv_bias, rows=rows if parallel.size > 1 else None)
        heads, kv_heads = map(parallel.num_heads, (config.num_heads, config.num_kv_heads))
        self.rotated_heads, self.head_dim = heads + kv_heads, head_dim
        self.rotary_dim = config.ropes[0].rotary_dim(config.head_dim)

    def row_order(self, rows: slice) -> Callable[[Tensor], Tensor] | None:
        """Returns the function that reorders heads that are rotated in part."""
        return None if self.rotary_dim == self.head_dim else self._reordered

    def _reordered(self, weight: Tensor) -> Tensor:
        order = rotary_order(self.head_dim, self.rotary_dim)
        rotated = self.rotated_heads * self.head_dim
        return torch.cat((reordered(order, weight[:rotated]), weight[rotated:]))


class Phi3Layer(DecoderLayer):
    """Llama's layer with fused tensors."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.self_attn.qkv_proj = Phi3QKV(config)

    def make_mlp(self, config: ModelConfig, layer: int) -> nn.Module:
        """Returns the feed-forward block, with gate and up in one tensor."""
        del layer  # all are alike
        return FusedGatedMLP(config)


class Phi3ForCausalLM(DecoderModel):
    """Phi-3, Phi-3.5, Phi-4 and Phi-4-mini (Abdin et al. 2024, arXiv 2404.14219)."""

    layer_class: ClassVar[type[DecoderLayer]] = Phi3Layer

    @classmethod
    def parse_config(cls, fields: Fields, architecture: str, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        """Reads the config. Longer contexts use longrope, which older files call "su" or "yarn"."""
        longest = fields.size("max_position_embeddings")
        rope = parse_rope(_renamed_rope(fields), longest, allows_partial=True)
        num_layers = fields.size("num_hidden_layers")
        different = {
            "activation": parse_activation(fields),
            "ropes": (rope,) * num_layers,
            "sliding_windows": (sliding_window(fields),) * num_layers,
            "default_eps": 1e-5,
        }
        return ModelConfig(**parse_decoder(fields, architecture, eos_token_ids, **different))


def _renamed_rope(fields: Fields) -> Fields:
    key, raw = rope_object(fields)
    kind = raw.get("rope_type") or raw.get("type")
    if kind not in ("su", "yarn", "longrope"):
        return fields
    original = {"original_max_position_embeddings": raw.get("original_max_position_embeddings", _ORIGINAL_POSITIONS)}
    return Fields(fields.path, original | dict(fields.values) | {key: raw | {"rope_type": "longrope"}})
