"""Describes the gated short convolution of LFM2 (Liquid AI 2025, arXiv 2511.23404) as data."""

from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.config.model.recurrence import ShortConvolutionSpec
from mini_infer_engine.layers.linear import Linear
from mini_infer_engine.layers.recurrent import CausalConvolution, RecurrentBlock


class ShortConvolution(RecurrentBlock):
    """The weights of one block. Its `in_proj` has the gates before and after the convolution, and the input."""

    def __init__(self, config: ModelConfig, layer: int, spec: ShortConvolutionSpec) -> None:
        super().__init__(config, layer)
        width = spec.convolution_channels
        self.in_proj = Linear(config.hidden_size, 3 * width, bias=spec.bias)
        self.conv1d = CausalConvolution(width, spec.kernel_size, bias=spec.bias)
        self.out_proj = Linear(width, config.hidden_size, bias=spec.bias)
