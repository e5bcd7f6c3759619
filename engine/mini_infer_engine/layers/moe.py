"""A mixture of experts as data: the router's weight, and all experts' weights stacked; `ops` compute it."""

from dataclasses import dataclass

import torch
from torch import nn

from mini_infer_engine.layers.linear import Linear
from mini_infer_engine.layers.placement import Placement


@dataclass(frozen=True, slots=True)
class MoESpec:
    """The shape of one mixture (Shazeer et al. 2017, arXiv 1701.06538)."""

    hidden_size: int
    intermediate_size: int
    """Of one expert."""
    num_experts: int
    top_k: int
    """Experts that compute each token."""
    normalizes_top_k: bool
    """Whether the weights of a token's experts are divided by their sum."""


class SparseMoE(nn.Module):
    """sum over a token's top-k experts of weight * down(silu(gate(x)) * up(x)); weights are softmax(router(x))."""

    def __init__(self, spec: MoESpec) -> None:
        super().__init__()
        self.spec = spec
        experts, hidden, width = spec.num_experts, spec.hidden_size, spec.intermediate_size
        self.gate = Linear(hidden, experts)
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * width, hidden), requires_grad=False)
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, width), requires_grad=False)

    def checkpoint_tensors(self, path: str) -> dict[str, Placement]:
        """Each expert's own three names, as Qwen's and Mixtral's successors have them, to its part of the stacks."""
        width = self.spec.intermediate_size
        tensors: dict[str, Placement] = {}
        for expert in range(self.spec.num_experts):
            name = f"{path}.experts.{expert}"
            tensors[f"{name}.gate_proj.weight"] = Placement(self.gate_up_proj[expert, :width])
            tensors[f"{name}.up_proj.weight"] = Placement(self.gate_up_proj[expert, width:])
            tensors[f"{name}.down_proj.weight"] = Placement(self.down_proj[expert])
        return tensors
