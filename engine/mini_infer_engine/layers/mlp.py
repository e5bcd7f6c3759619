"""Describes the feed-forward block of a decoder as data; `ops` compute it."""

from torch import nn

from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.layers.linear import Linear, PackedLinear, row_parallel


class GatedMLP(nn.Module):
    """Computes down(activation(gate(x)) * up(x)), gate and up in one product (GLU variants, arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        parallel = config.tensor_parallel
        share = parallel.even(config.intermediate_size)
        self.activation = config.activation
        self.gate_up_proj: Linear = PackedLinear(
            config.hidden_size, {"gate_proj": share, "up_proj": share}, bias=config.mlp_bias
        )
        self.down_proj = row_parallel(config.intermediate_size, config.hidden_size, parallel, bias=config.mlp_bias)
