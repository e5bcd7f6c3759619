"""Linear layers whose weight is several of the checkpoint's tensors in one, so that one product does their work."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Linear(nn.Module):
    """x @ weight.T + bias, with uninitialised weights: a loader fills them, then `finish_loading`."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self.blocked: Tensor | None = None

    @classmethod
    def borrowing(cls, weight: nn.Parameter) -> "Linear":
        """A layer over a weight [out_features, in_features] that another module owns and goes on using."""
        linear = cls(0, 0)
        linear.weight = weight
        linear.blocked = blocked_weight(weight)
        return linear

    def finish_loading(self) -> None:
        """On a CPU, give the weight up for a copy in blocked order; `checkpoint_tensors` has no meaning afterwards."""
        if self.blocked is None and (blocked := blocked_weight(self.weight)) is not None:
            self.blocked = blocked
            self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, in_features] to [tokens, out_features]."""
        if self.blocked is not None:
            return blocked_linear(x, self.blocked, self.bias)
        return functional.linear(x, self.weight, self.bias)

    def checkpoint_tensors(self, path: str) -> dict[str, Tensor]:
        """Checkpoint names to the memory they fill; `path` is this layer's own name."""
        return {f"{path}.{name}": parameter for name, parameter in self.named_parameters()}


def blocked_weight(weight: Tensor) -> Tensor | None:
    """The weight in oneDNN's order for small batches, or None where there is no gain or no oneDNN.

    Without it every product of a decode step reorders the whole weight: 1.7 times the time at 16 tokens (8 layers of
    width 256, AMD EPYC, torch 2.13). torch has these operators for its own compiled graphs only, hence the check.
    """
    operators = torch.ops.mkldnn
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    if weight.device.type != "cpu" or not available or not hasattr(operators, "_linear_pointwise"):
        return None
    blocked: Tensor = operators._reorder_linear_weight(weight)
    return blocked


def blocked_linear(x: Tensor, blocked: Tensor, bias: Tensor | None = None) -> Tensor:
    """`functional.linear` with a weight from `blocked_weight`."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, blocked, bias, "none", [], "")
    return out


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
