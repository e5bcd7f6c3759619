"""Implements RMS norm, over the hidden width and over single heads."""

from functools import cache, partial

import torch
from torch import Tensor, nn

from mini_infer_engine.config.model.model_config import ModelConfig
from mini_infer_engine.config.parallelism.tensor_parallel import Shard
from mini_infer_engine.layers.head_order import reordered
from mini_infer_engine.layers.placement import Part, Placement


class RMSNorm(nn.Module):
    """Computes x / rms(x) * (offset + weight) over the last dimension (Zhang and Sennrich 2019, arXiv 1910.07467)."""

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        offset: float = 0.0,
        columns: Shard | None = None,
        copies: int = 1,
        order: Tensor | None = None,
    ) -> None:
        """Takes this rank's `columns` of a norm over those of all ranks; None: it has all.

        `copies` is the number of ranks that have the same columns. `order` is that of a head's dimensions
        (`head_order`), of norms over heads.
        """
        super().__init__()
        size = size if columns is None else columns.count
        self.columns, self.copies = columns, copies
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps
        self._offset = offset
        self._order = order

    @classmethod
    def of(cls, config: ModelConfig, size: int | None = None, *, order: Tensor | None = None) -> "RMSNorm":
        """Returns a norm over the hidden width, or over `size`, with the model's epsilon and offset."""
        size = config.hidden_size if size is None else size
        return cls(size, config.rms_norm_eps, offset=config.norm_offset, order=order)

    @classmethod
    def of_heads(cls, config: ModelConfig, num_heads: int, *, order: Tensor | None = None) -> "RMSNorm":
        """Returns a norm over all heads of q or of k together, of which a rank of a tensor-parallel group has some."""
        parallel, size = config.tensor_parallel, num_heads * config.head_dim
        if parallel.size == 1:
            return cls.of(config, size, order=order)
        columns, copies = parallel.heads(num_heads, config.head_dim), parallel.copies(num_heads)
        return cls(size, config.rms_norm_eps, offset=config.norm_offset, columns=columns, copies=copies, order=order)

    def checkpoint_tensors(self, path: str) -> dict[str, Placement]:
        """Maps checkpoint names to the memory that they fill."""
        part = None if self.columns is None else Part(0, self.columns)
        expand = None if self._order is None else partial(reordered, self._order)
        return {f"{path}.weight": Placement(self.weight, expand=expand, part=part)}

    def finish_loading(self) -> None:
        """Adds the offset to the weight, which is fp32 from then on: Gemma's weights are small beside their offset."""
        if self._offset:
            self.weight = nn.Parameter(self.weight.float() + self._offset, requires_grad=False)
            self._offset = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """Returns the normalised x, with the same shape and dtype."""
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """Computes x / rms(x) * weight in fp32; `weight` need only broadcast, and `out` may be `x` itself."""
    if x.dtype != torch.float32:
        normed = rms_norm(x.float(), weight, eps).to(x.dtype)
        return normed if out is None else out.copy_(normed)
    # torch's own is eight operators on a CPU, some of them as large as x: seven times the time at 2,048 tokens.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    mean_square = torch.addcmul(_scalar(eps, x.device), norm, norm, value=1 / x.shape[-1])
    return torch.mul(x, mean_square.rsqrt_(), out=out).mul_(weight)


def unit_rms(x: Tensor, eps: float) -> Tensor:
    """Computes x / rms(x) over the last dimension in fp32: a norm without weights."""
    return rms_norm(x, _scalar(1.0, x.device), eps)


@cache
def _scalar(value: float, device: torch.device) -> Tensor:
    return torch.full((), value, device=device)
