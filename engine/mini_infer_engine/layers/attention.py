"""The attention block of a decoder: projections, optional q and k norms, rotation; the rest is the backend's."""

import torch
from torch import Tensor, nn

from mini_infer_engine.attention.base import AttentionPass
from mini_infer_engine.config.model_config import ModelConfig
from mini_infer_engine.layers.linear import Linear, PackedLinear
from mini_infer_engine.layers.norm import RMSNorm, rms_norm
from mini_infer_engine.layers.rotary import rotate_


class Attention(nn.Module):
    """Grouped-query self-attention over the page pool."""

    def __init__(self, config: ModelConfig, layer: int, *, has_qk_norm: bool) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        sizes = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads, "v_proj": config.num_kv_heads}
        parts = {name: heads * config.head_dim for name, heads in sizes.items()}
        self.qkv_proj = PackedLinear(config.hidden_size, parts, bias=config.qkv_bias)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size, bias=config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if has_qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if has_qk_norm else None
        self.qk_norm_weight: Tensor | None = None  # [heads + kv_heads, head_dim]

    def finish_loading(self) -> None:
        """Lay the two norms' weights out by head, so that one product scales q and k."""
        if self.q_norm is not None and self.k_norm is not None:
            q_weight, k_weight = self.q_norm.weight, self.k_norm.weight
            rows = (q_weight.expand(self.num_heads, -1), k_weight.expand(self.num_kv_heads, -1))
            self.qk_norm_weight = torch.cat(rows)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, attention: AttentionPass, wanted: Tensor | None = None
    ) -> Tensor:
        """[tokens, hidden] to [tokens or wanted, hidden]; the new keys and values of all are in the pool afterwards."""
        heads = self.qkv_proj(x).view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        qk = heads[:, : self.num_heads + self.num_kv_heads]
        if self.qk_norm_weight is not None and self.q_norm is not None:
            rms_norm(qk, self.qk_norm_weight, self.q_norm.eps, out=qk)
        rotate_(qk, cos, sin)
        q, kv = heads[:, : self.num_heads], heads[:, self.num_heads :].unflatten(1, (2, self.num_kv_heads))
        mixed = attention.attend(q, kv, self.layer)
        out: Tensor = self.o_proj(mixed if wanted is None else mixed.index_select(0, wanted))
        return out
