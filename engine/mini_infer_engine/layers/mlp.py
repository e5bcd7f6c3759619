"""The feed-forward block of a decoder."""

from torch import Tensor, nn
from torch.nn import functional

from mini_infer_engine.config.model_config import ModelConfig
from mini_infer_engine.layers.linear import Linear, PackedLinear


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one product (SwiGLU, arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        parts = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        self.gate_up_proj = PackedLinear(config.hidden_size, parts, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] to [tokens, hidden]."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        out: Tensor = self.down_proj(functional.silu(gate).mul_(up))
        return out
