"""Describes blocks with a recurrent state instead of keys and values as data; `RecurrentPass` computes them."""

import torch
from torch import Tensor, nn

from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.layers.linear import Linear


class CausalConvolution(nn.Module):
    """The weights of a depthwise convolution over a token and those before it, under the checkpoint's names."""

    def __init__(self, channels: int, kernel_size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel_size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(channels), requires_grad=False) if bias else None


class RecurrentBlock(nn.Module):
    """The common part of all kinds of recurrent blocks, which models and passes read."""

    in_proj: Linear
    """The product of everything that the block computes from its input."""
    out_proj: Linear
    conv1d: CausalConvolution

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = config.recurrent_layers.index(layer)
        """The layer's index among those with a recurrent state, and so in its slots."""
        self.is_last = layer == config.num_layers - 1


class GatedRMSNorm(nn.Module):
    """Normalises each head of a block's output, and multiplies it with silu(gate)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Maps [tokens, heads, size] to the same shape and dtype."""
        wide = x.float()
        normed = (wide * (wide.square().mean(dim=-1, keepdim=True) + self.eps).rsqrt()).to(x.dtype) * self.weight
        return (normed * nn.functional.silu(gate.float())).to(x.dtype)
