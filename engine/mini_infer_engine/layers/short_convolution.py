"""Describes the gated short convolution of LFM2 (Liquid AI 2025, arXiv 2511.23404) as data."""

from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.config.model.recurrence import ShortConvolutionSpec
from mini_infer_engine.config.parallelism.tensor_parallel import side_by_side
from mini_infer_engine.layers.linear import Linear, row_parallel
from mini_infer_engine.layers.recurrent import CausalConvolution, RecurrentBlock


class ShortConvolution(RecurrentBlock):
    """The weights of one block. Its `in_proj` has the gates before and after the convolution, and the input."""

    def __init__(self, config: ModelConfig, layer: int, spec: ShortConvolutionSpec) -> None:
        super().__init__(config, layer)
        parallel, width = config.tensor_parallel, spec.convolution_channels
        channels = parallel.even(width)
        rows = side_by_side([channels] * 3)
        self.in_proj = Linear(config.hidden_size, rows.count, bias=spec.bias, rows=rows if parallel.size > 1 else None)
        self.conv1d = CausalConvolution(channels, spec.kernel_size, bias=spec.bias)
        self.out_proj = row_parallel(width, config.hidden_size, parallel, bias=spec.bias)
