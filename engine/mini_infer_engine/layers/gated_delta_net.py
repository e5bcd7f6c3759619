"""Describes a gated delta net (Yang et al. 2024, arXiv 2412.06464) as data."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.config.model.recurrence import GatedDeltaSpec
from mini_infer_engine.layers.linear import Linear, PackedLinear
from mini_infer_engine.layers.placement import Placement
from mini_infer_engine.layers.recurrent import CausalConvolution, GatedRMSNorm, RecurrentBlock


class GatedDeltaProjection(PackedLinear):
    """The product of queries, keys, values, output gates, strengths and decays, side by side in this order.

    Checkpoints have them in tensors of their own, or in two in which each key head's rows lie together: those are put
    into the same order when they are loaded.
    """

    def __init__(self, hidden_size: int, spec: GatedDeltaSpec, *, by_key_head: bool) -> None:
        keys, values, heads = spec.key_width, spec.value_width, spec.num_value_heads
        parts = {"in_proj_qkv": 2 * keys + values, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
        if by_key_head:
            parts = {"in_proj_qkvz": 2 * keys + 2 * values, "in_proj_ba": 2 * heads}
        super().__init__(hidden_size, parts)
        self.widths = [spec.convolution_channels, values, heads, heads]
        """The widths of the convolution's input, of gates, strengths and decays."""
        shared = spec.num_value_heads // spec.num_key_heads
        self._orders: Mapping[str, Callable[[Tensor], Tensor]] = {}
        if by_key_head:
            wide = [spec.key_dim, spec.key_dim, shared * spec.value_dim, shared * spec.value_dim]
            self._orders = {
                "in_proj_qkvz": lambda weight: _by_kind(weight, spec.num_key_heads, wide),
                "in_proj_ba": lambda weight: _by_kind(weight, spec.num_key_heads, [shared, shared]),
            }

    def checkpoint_tensors(self, path: str) -> dict[str, Placement]:
        """Maps checkpoint names to memory, and reorders tensors that have the rows of each key head together."""
        tensors = super().checkpoint_tensors(path)
        for name, placement in tensors.items():
            if (order := self._orders.get(name.split(".")[-2])) is not None:
                tensors[name] = replace(placement, expand=order)
        return tensors


def _by_kind(weight: Tensor, num_heads: int, widths: list[int]) -> Tensor:
    """Returns rows that are grouped by head, and within a head by kind, in the order of kinds, and then of heads."""
    heads = weight.view(num_heads, sum(widths), weight.shape[1])
    return torch.cat([part.flatten(0, 1) for part in torch.split(heads, widths, dim=1)])


class GatedDeltaNet(RecurrentBlock):
    """The weights of one block."""

    def __init__(self, config: ModelConfig, layer: int, spec: GatedDeltaSpec, *, by_key_head: bool) -> None:
        super().__init__(config, layer)
        self.spec = spec
        self.in_proj: Linear = GatedDeltaProjection(config.hidden_size, spec, by_key_head=by_key_head)
        self.conv1d = CausalConvolution(spec.convolution_channels, spec.kernel_size)
        self.A_log = nn.Parameter(torch.empty(spec.num_value_heads, dtype=torch.float32), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.empty(spec.num_value_heads, dtype=torch.float32), requires_grad=False)
        self.norm = GatedRMSNorm(spec.value_dim, config.rms_norm_eps)
        self.out_proj = Linear(spec.value_width, config.hidden_size)
