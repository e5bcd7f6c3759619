"""Describes multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) as data: a token's cache entry is one latent.

`kv_b_proj` makes the keys and values of all heads from the latent. A prompt's keys and values are computed from it
(decompressed). For single new tokens the two halves of that product move to the queries and to the output instead
(absorbed), so that attention reads latents alone. Backends compute both. Ranks share out the heads: each computes and
caches all latents.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.config.parallelism.tensor_parallel import Shard
from mini_infer_engine.layers.attention import AttentionBlock
from mini_infer_engine.layers.linear import UNQUANTIZED, Linear, PackedLinear, column_parallel
from mini_infer_engine.layers.norm import RMSNorm

_EPS = 1e-6
"""The epsilon of the block's own norms, whatever the model's other norms have (transformers' modeling_deepseek_v2)."""


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """The widths of one block."""

    q_rank: int | None
    """The width of the latent from which queries are made; None: they are made from the hidden state."""
    kv_rank: int
    """The width of the latent from which keys and values are made."""
    nope_dim: int
    """The dimensions of a head's queries and keys that are not rotated."""
    rope_dim: int
    """The dimensions that are rotated; their keys are equal for all heads, and cached beside the latent."""
    value_dim: int
    """The width of a head's values."""
    interleaved: bool
    """True if a rotated pair is (2i, 2i + 1) instead of (i, i + rope_dim / 2)."""

    @property
    def qk_dim(self) -> int:
        """The width of a head's queries and keys."""
        return self.nope_dim + self.rope_dim

    @property
    def latent_width(self) -> int:
        """The width of a token's cache entry in a layer: the latent after its norm, and the rotated key."""
        return self.kv_rank + self.rope_dim


class LatentAttention(AttentionBlock):
    """Multi-head latent attention.

    For it `AttentionPass.attend` reads [tokens, heads * qk_dim + latent_width]: queries, then latent and key before
    norm and rotation.
    """

    def __init__(self, config: ModelConfig, layer: int, spec: LatentSpec) -> None:
        super().__init__(config, layer, value_dim=spec.value_dim)
        self.spec = spec
        parallel = config.tensor_parallel
        queries = parallel.heads(config.num_heads, spec.qk_dim)
        self.q_width = queries.count
        first: dict[str, int | Shard] = {"q_proj": queries} if spec.q_rank is None else {"q_a_proj": spec.q_rank}
        self.a_proj: Linear = PackedLinear(config.hidden_size, first | {"kv_a_proj_with_mqa": spec.latent_width})
        self.q_a_layernorm = None if spec.q_rank is None else RMSNorm(spec.q_rank, _EPS)
        self.q_b_proj = None if spec.q_rank is None else column_parallel(spec.q_rank, queries)
        self.kv_a_layernorm = RMSNorm(spec.kv_rank, _EPS)
        keys_and_values = parallel.heads(config.num_heads, spec.nope_dim + spec.value_dim)
        self.kv_b_proj = column_parallel(spec.kv_rank, keys_and_values)
        self.kv_up = torch.empty(0)  # [heads * (nope_dim + value_dim), kv_rank], of this rank: see finish_loading
        self.key_up = self.value_up = self.kv_up  # [heads, nope_dim or value_dim, kv_rank]

    def finish_loading(self) -> None:
        """Computes the weight of `kv_b_proj` and its two halves, in the model's dtype whatever form it is stored in."""
        linear, spec = self.kv_b_proj, self.spec
        if linear.method is UNQUANTIZED and linear.weight.numel():
            weight: Tensor = linear.weight.detach()
        else:  # stored in another form or order: what it makes of the unit vectors
            norm = self.kv_a_layernorm.weight
            units = torch.eye(spec.kv_rank, dtype=norm.dtype, device=norm.device)
            weight = linear(units).t().contiguous()
        self.kv_up = weight
        halves = weight.view(self.num_heads, spec.nope_dim + spec.value_dim, spec.kv_rank)
        self.key_up, self.value_up = halves[:, : spec.nope_dim], halves[:, spec.nope_dim :]
