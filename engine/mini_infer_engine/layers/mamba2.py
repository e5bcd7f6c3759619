"""Describes a Mamba-2 block (Dao and Gu 2024, arXiv 2405.21060) as data."""

import torch
from torch import Tensor, nn

from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.config.model.recurrence import Mamba2Spec
from mini_infer_engine.layers.linear import Linear
from mini_infer_engine.layers.recurrent import CausalConvolution, RecurrentBlock


class GroupedRMSNorm(nn.Module):
    """Multiplies a block's output with silu(gate), and normalises equal parts of it."""

    def __init__(self, size: int, num_groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.num_groups, self.eps = num_groups, eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Maps [tokens, size] in fp32, and gates in the model's dtype, to the latter."""
        groups = (x * nn.functional.silu(gate.float())).reshape(len(x), self.num_groups, -1)
        normed = groups * (groups.square().mean(dim=-1, keepdim=True) + self.eps).rsqrt()
        scaled: Tensor = normed.flatten(-2).to(gate.dtype) * self.weight
        return scaled


class Mamba2(RecurrentBlock):
    """The weights of one block. Its `in_proj` has gates, the convolution's input and time steps side by side."""

    def __init__(self, config: ModelConfig, layer: int, spec: Mamba2Spec) -> None:
        super().__init__(config, layer)
        self.spec = spec
        self.widths = [spec.width, spec.convolution_channels, spec.num_heads]
        """The widths of the three parts of `in_proj`."""
        self.in_proj = Linear(config.hidden_size, sum(self.widths), bias=spec.projection_bias)
        self.conv1d = CausalConvolution(spec.convolution_channels, spec.kernel_size, bias=spec.convolution_bias)
        self.A_log, self.D, self.dt_bias = (
            nn.Parameter(torch.empty(spec.num_heads, dtype=torch.float32), requires_grad=False) for _ in range(3)
        )
        self.norm = GroupedRMSNorm(spec.width, spec.norm_groups, spec.norm_eps)
        self.out_proj = Linear(spec.width, config.hidden_size, bias=spec.projection_bias)
