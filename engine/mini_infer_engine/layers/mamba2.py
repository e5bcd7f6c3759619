"""Describes a Mamba-2 block (Dao and Gu 2024, arXiv 2405.21060) as data."""

from torch import Tensor, nn

from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.config.model.recurrence import Mamba2Spec
from mini_infer_engine.config.parallelism.tensor_parallel import TensorParallel, side_by_side
from mini_infer_engine.layers.linear import Linear, row_parallel
from mini_infer_engine.layers.norm import RMSNorm
from mini_infer_engine.layers.recurrent import CausalConvolution, RecurrentBlock


class GroupedRMSNorm(RMSNorm):
    """Normalises a block's output, once it is multiplied with silu(gate), in equal parts.

    Where ranks share a part, the block leaves the norm to `Ops.norm_columns_`.
    """

    def __init__(self, spec: Mamba2Spec, parallel: TensorParallel) -> None:
        columns = parallel.even(spec.width) if parallel.size > 1 else None
        super().__init__(spec.width, spec.norm_eps, columns=columns)
        self.is_shared = spec.norm_groups % parallel.size > 0
        self.num_groups = max(1, spec.norm_groups // parallel.size)

    def gated(self, x: Tensor, gate: Tensor) -> Tensor:
        """Maps [tokens, size] in fp32, and gates in the model's dtype, to the latter."""
        product = x * nn.functional.silu(gate.float())
        if self.is_shared:
            return product.to(gate.dtype)
        groups = product.reshape(len(x), self.num_groups, -1)
        normed = groups * (groups.square().mean(dim=-1, keepdim=True) + self.eps).rsqrt()
        scaled: Tensor = normed.flatten(-2).to(gate.dtype) * self.weight
        return scaled


class Mamba2(RecurrentBlock):
    """The weights of one block, or of a rank's heads of it.

    Its `in_proj` has gates, the convolution's input and time steps side by side.
    """

    def __init__(self, config: ModelConfig, layer: int, spec: Mamba2Spec) -> None:
        super().__init__(config, layer)
        parallel = config.tensor_parallel
        self.local = local = spec.on_rank(parallel)
        self.widths = [local.width, local.convolution_channels, local.num_heads]
        """The widths of the three parts of `in_proj`."""
        width, heads = parallel.even(spec.width), parallel.even(spec.num_heads)
        groups = parallel.heads(spec.num_groups, spec.state_size)
        channels = side_by_side([width, groups, groups])
        rows = side_by_side([width, channels, heads]) if parallel.size > 1 else None
        self.in_proj = Linear(config.hidden_size, sum(self.widths), bias=spec.projection_bias, rows=rows)
        self.conv1d = CausalConvolution(channels, spec.kernel_size, bias=spec.convolution_bias)
        self.A_log, self.D, self.dt_bias = self.add_head_parameters(heads, 3)
        self.norm = GroupedRMSNorm(spec, parallel)
        self.out_proj = row_parallel(spec.width, config.hidden_size, parallel, bias=spec.projection_bias)
