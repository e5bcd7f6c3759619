"""Linear layers: several of the checkpoint's tensors in one weight, stored and computed as their method says.

The names of a method's parts are vLLM's (`create_weights`, `process_weights_after_loading`, `apply`).
"""

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from mini_infer_engine.layers.placement import Placement


class LinearMethod(Protocol):
    """How a layer's weight is stored and multiplied with."""

    def create_weights(self, layer: "Linear") -> None:
        """Register the layer's parameters for its `out_features` and `in_features`, uninitialised."""

    def placements(self, layer: "Linear", path: str, rows: slice) -> dict[str, Placement]:
        """Checkpoint names to the memory of some of the layer's rows; `path` is what the checkpoint calls those."""

    def process_weights_after_loading(self, layer: "Linear") -> None:
        """Bring what was loaded into the form that is computed with; may be called twice."""

    def apply(self, layer: "Linear", x: Tensor) -> Tensor:
        """X @ weight.T + bias by plain torch, [tokens, in_features] to [tokens, out_features]."""


class UnquantizedMethod:
    """Weights in the model's dtype; on a CPU in oneDNN's blocked order, where there is one."""

    def create_weights(self, layer: "Linear") -> None:
        """See `LinearMethod`."""
        layer.weight = nn.Parameter(torch.empty(layer.out_features, layer.in_features), requires_grad=False)

    def placements(self, layer: "Linear", path: str, rows: slice) -> dict[str, Placement]:
        """See `LinearMethod`."""
        return {f"{path}.weight": Placement(layer.weight[rows])}

    def process_weights_after_loading(self, layer: "Linear") -> None:
        """On a CPU, give the weight up for a copy in blocked order; placements have no meaning afterwards."""
        if layer.blocked is None and (blocked := blocked_weight(layer.weight)) is not None:
            layer.blocked = blocked
            layer.weight = nn.Parameter(layer.weight.new_empty(0), requires_grad=False)

    def apply(self, layer: "Linear", x: Tensor) -> Tensor:
        """See `LinearMethod`."""
        if layer.blocked is not None:
            return blocked_linear(x, layer.blocked, layer.bias)
        return functional.linear(x, layer.weight, layer.bias)


UNQUANTIZED = UnquantizedMethod()


class Linear(nn.Module):
    """x @ weight.T + bias, with uninitialised weights: a loader fills them, then `finish_loading`."""

    weight: nn.Parameter  # [out_features, in_features]
    weight_scale: nn.Parameter  # of methods that scale weights
    weight_minimum: nn.Parameter  # of asymmetric ones
    integers: nn.Parameter  # of methods that round weights when they are loaded

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self.blocked: Tensor | None = None
        self.use(UNQUANTIZED)

    @classmethod
    def borrowing(cls, weight: nn.Parameter) -> "Linear":
        """A layer over a weight [out_features, in_features] that another module owns and goes on using."""
        linear = cls(0, 0)
        linear.out_features, linear.in_features = weight.shape
        linear.weight = weight
        linear.blocked = blocked_weight(weight)
        return linear

    def use(self, method: LinearMethod) -> None:
        """Store and compute by this method from now on; before anything is loaded."""
        self.method: LinearMethod = method
        method.create_weights(self)

    def finish_loading(self) -> None:
        """See `LinearMethod.process_weights_after_loading`."""
        self.method.process_weights_after_loading(self)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, in_features] to [tokens, out_features]."""
        return self.method.apply(self, x)

    def checkpoint_parts(self, path: str) -> dict[str, slice]:
        """The checkpoint's layers that this one is made of, by name, with their rows; `path` is this layer's name."""
        return {path: slice(0, self.out_features)}

    def checkpoint_tensors(self, path: str) -> dict[str, Placement]:
        """Checkpoint names to the memory they fill."""
        placements: dict[str, Placement] = {}
        for name, rows in self.checkpoint_parts(path).items():
            placements |= self.method.placements(self, name, rows)
            if self.bias is not None:
                placements[f"{name}.bias"] = Placement(self.bias[rows])
        return placements


class PackedLinear(Linear):
    """Several linear layers of one input; their outputs stand side by side, in the order of `parts`."""

    def __init__(self, in_features: int, parts: dict[str, int], *, bias: bool = False) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias)
        self.parts = parts

    def checkpoint_parts(self, path: str) -> dict[str, slice]:
        """Each part's own name, as a sibling of this layer, to its rows of the packed weight."""
        parent = path.rpartition(".")[0]
        found, begin = {}, 0
        for part, rows in self.parts.items():
            found[f"{parent}.{part}"] = slice(begin, begin + rows)
            begin += rows
        return found


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
