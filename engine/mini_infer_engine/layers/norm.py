"""RMS norm, over the hidden width and over single heads."""

from functools import cache

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype as `x`."""
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """As `RMSNorm`, in fp32; `weight` need only broadcast, and `out` may be `x` itself."""
    if x.dtype != torch.float32:
        normed = rms_norm(x.float(), weight, eps).to(x.dtype)
        return normed if out is None else out.copy_(normed)
    # torch's own is eight operators on a CPU, some of them as large as x: seven times the time at 2,048 tokens.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    mean_square = torch.addcmul(_scalar(eps, x.device), norm, norm, value=1 / x.shape[-1])
    return torch.mul(x, mean_square.rsqrt_(), out=out).mul_(weight)


@cache
def _scalar(value: float, device: torch.device) -> Tensor:
    return torch.full((), value, device=device)
