"""Describes a gated delta net (Yang et al. 2024, arXiv 2412.06464) as data."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.config.model.recurrence import GatedDeltaSpec
from mini_infer_engine.config.parallelism.tensor_parallel import Shard, side_by_side
from mini_infer_engine.layers.linear import Linear, PackedLinear, row_parallel
from mini_infer_engine.layers.recurrent import CausalConvolution, GatedRMSNorm, RecurrentBlock


class GatedDeltaProjection(PackedLinear):
    """Several of a block's products, which are put into the order of kinds if a checkpoint has the rows of each key
    head together.
    """

    def __init__(
        self, hidden_size: int, parts: Mapping[str, Shard], key_heads: int, widths: Mapping[str, list[int]]
    ) -> None:
        """Takes a rank's share of the rows of each part, and the widths of the kinds in one key head, for the parts
        whose rows are by key head.
        """
        super().__init__(hidden_size, parts)
        self._key_heads = key_heads
        starts, begin = {}, 0
        for name, count in self.parts.items():
            starts[begin] = widths.get(name)
            begin += count
        self._widths = starts

    def row_order(self, rows: slice) -> Callable[[Tensor], Tensor] | None:
        """Returns the function that reorders rows of a part from heads to kinds."""
        widths = self._widths.get(rows.start)
        return None if widths is None else lambda weight: _by_kind(weight, self._key_heads, widths)


def _by_kind(weight: Tensor, num_heads: int, widths: list[int]) -> Tensor:
    """Returns rows that are grouped by head, and within a head by kind, in the order of kinds, and then of heads."""
    heads = weight.reshape(num_heads, sum(widths), *weight.shape[1:])
    return torch.cat([part.flatten(0, 1) for part in torch.split(heads, widths, dim=1)])


class GatedDeltaNet(RecurrentBlock):
    """The weights of one block, or of a rank's heads of it."""

    def __init__(self, config: ModelConfig, layer: int, spec: GatedDeltaSpec, *, by_key_head: bool) -> None:
        super().__init__(config, layer)
        parallel, hidden = config.tensor_parallel, config.hidden_size
        self.local = local = spec.on_rank(parallel)
        keys, values, heads = map(parallel.even, (spec.key_width, spec.value_width, spec.num_value_heads))
        channels = side_by_side([keys, keys, values])
        self._wide = [local.convolution_channels, local.value_width]
        self._narrow = [local.num_value_heads, local.num_value_heads]
        shared = spec.num_value_heads // spec.num_key_heads
        if by_key_head:
            wide = {"in_proj_qkvz": parallel.even(channels.total + spec.value_width)}
            narrow = {"in_proj_ba": parallel.even(2 * spec.num_value_heads)}
            values_of_head = shared * spec.value_dim
            widths = {
                "in_proj_qkvz": [spec.key_dim, spec.key_dim, values_of_head, values_of_head],
                "in_proj_ba": [shared, shared],
            }
        else:
            wide, narrow, widths = (
                {"in_proj_qkv": channels, "in_proj_z": values},
                {"in_proj_b": heads, "in_proj_a": heads},
                {},
            )
        # Quantised checkpoints leave strengths and decays in the model's dtype.
        is_apart = config.quantization is not None
        parts = wide if is_apart else wide | narrow
        self.in_proj: Linear = GatedDeltaProjection(hidden, parts, local.num_key_heads, widths)
        """The product of queries, keys, values and output gates, and of strengths and decays unless `in_proj_ba` has
        them.
        """
        self.in_proj_ba: Linear | None = None
        if is_apart:
            self.in_proj_ba = GatedDeltaProjection(hidden, narrow, local.num_key_heads, widths)
        self.conv1d = CausalConvolution(channels, spec.kernel_size)
        self.A_log, self.dt_bias = self.add_head_parameters(heads, 2)
        self.norm = GatedRMSNorm(spec.value_dim, config.rms_norm_eps)
        self.out_proj = row_parallel(spec.value_width, hidden, parallel)

    def divide(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the output of `in_proj` as if `in_proj_ba` had computed its part."""
        wide, narrow = torch.split(projected, [sum(self._wide), sum(self._narrow)], dim=1)
        return wide, narrow

    def split(self, projected: tuple[Tensor, Tensor]) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Returns the convolution's input and gates, and strengths and decays, from the outputs of both products."""
        mixed, gates = torch.split(projected[0], self._wide, dim=1)
        strengths, decays = torch.split(projected[1], self._narrow, dim=1)
        return (mixed, gates), (strengths, decays)
