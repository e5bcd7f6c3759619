"""Describes the feed-forward blocks of decoders as data; `ops` compute them."""

from torch import nn

from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.config.parallelism.tensor_parallel import side_by_side
from mini_infer_engine.layers.linear import Linear, PackedLinear, column_parallel, row_parallel


class SquaredMLP(nn.Module):
    """Computes down(relu(up(x))^2) (Primer, So et al. 2021, arXiv 2109.08668)."""

    def __init__(self, config: ModelConfig, intermediate_size: int) -> None:
        super().__init__()
        parallel, hidden, bias = config.tensor_parallel, config.hidden_size, config.mlp_bias
        self.up_proj = column_parallel(hidden, parallel.even(intermediate_size), bias=bias)
        self.down_proj = row_parallel(intermediate_size, hidden, parallel, bias=bias)


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


class FusedGatedMLP(GatedMLP):
    """A `GatedMLP` whose checkpoints have gate and up in one tensor, `gate_up_proj`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        share = config.tensor_parallel.even(config.intermediate_size)
        self.gate_up_proj = column_parallel(config.hidden_size, side_by_side([share, share]))
