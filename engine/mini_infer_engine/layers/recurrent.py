"""Describes blocks with a recurrent state instead of keys and values as data; `RecurrentPass` computes them."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.config.parallelism.tensor_parallel import Shard
from mini_infer_engine.layers.linear import Linear
from mini_infer_engine.layers.placement import Part, Placement


class CausalConvolution(nn.Module):
    """The weights of a depthwise convolution over a token and those before it, under the checkpoint's names."""

    def __init__(self, channels: Shard, kernel_size: int, *, bias: bool = False) -> None:
        """Takes this rank's share of the channels."""
        super().__init__()
        self._channels = channels
        self.weight = nn.Parameter(torch.empty(channels.count, 1, kernel_size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(channels.count), requires_grad=False) if bias else None

    def checkpoint_tensors(self, path: str) -> dict[str, Placement]:
        """Maps checkpoint names to the memory that they fill."""
        return shared_out(self, path, self._channels)


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
        self._heads: Shard | None = None

    def add_head_parameters(self, heads: Shard, count: int) -> Iterator[nn.Parameter]:
        """Yields parameters that have a number in fp32 for each head of this rank."""
        self._heads = heads
        for _ in range(count):
            yield nn.Parameter(torch.empty(heads.count, dtype=torch.float32), requires_grad=False)

    def checkpoint_tensors(self, path: str) -> dict[str, Placement]:
        """Maps the checkpoint's parameters of all heads to those of this rank's."""
        return {} if self._heads is None else shared_out(self, path, self._heads)


def shared_out(module: nn.Module, path: str, shard: Shard) -> dict[str, Placement]:
    """Returns the placements of a module's own parameters, of whose first dimension a rank has a share."""
    part = None if shard.count == shard.total else Part(0, shard)
    return {f"{path}.{name}": Placement(each, part=part) for name, each in module.named_parameters(recurse=False)}


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
