"""Linear layers whose weight is several of the checkpoint's tensors in one, so that one product does their work."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Linear(nn.Module):
    """x @ weight.T + bias, with uninitialised weights: a loader fills them."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, in_features] to [tokens, out_features]."""
        return functional.linear(x, self.weight, self.bias)

    def checkpoint_tensors(self, path: str) -> dict[str, Tensor]:
        """Checkpoint names to the memory they fill; `path` is this layer's own name."""
        return {f"{path}.{name}": parameter for name, parameter in self.named_parameters()}


class PackedLinear(Linear):
    """Several linear layers of one input; their outputs stand side by side, in the order of `parts`."""

    def __init__(self, in_features: int, parts: dict[str, int], *, bias: bool = False) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias)
        self.parts = parts

    def checkpoint_tensors(self, path: str) -> dict[str, Tensor]:
        """Each part's own name, as a sibling of this layer, to its rows of the packed weight."""
        parent = path.rpartition(".")[0]
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.named_parameters():
            for part, rows in zip(self.parts, torch.split(parameter, list(self.parts.values())), strict=True):
                tensors[f"{parent}.{part}.{name}"] = rows
        return tensors
