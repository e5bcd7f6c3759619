"""Computes experts without gates, down(relu(up(x))^2), on GPUs: torch's grouped product over tokens sorted by expert.

Nothing is read on the host, so that passes can be recorded as CUDA graphs.
"""

import torch
from torch import Tensor
from torch.nn import functional

from mini_infer_engine.kernels.moe.route import Routing


def ungated_experts(x: Tensor, routing: Routing, up: Tensor, down: Tensor) -> Tensor:
    """Returns the weighted sum [tokens, hidden] of each token's experts, of which others' results count as zeros.

    `up` is [experts, width, hidden], `down` [experts, hidden, width], in the dtype of x [tokens, hidden].
    """
    choices = routing.experts.shape[1]
    experts = routing.experts.flatten()
    experts = torch.where(experts < 0, len(up), experts)  # experts of other ranks come last, and are in no group
    by_expert, order = experts.sort(stable=True)
    ends = torch.searchsorted(by_expert, torch.arange(len(up), device=x.device), right=True).int()
    rows = x.index_select(0, order // choices)
    hidden = functional.relu(functional.grouped_mm(rows, up.mT, offs=ends)).square()
    made = functional.grouped_mm(hidden, down.mT, offs=ends).float()
    weighed = made * routing.weights.flatten().index_select(0, order).unsqueeze(1)
    weighed = torch.where((by_expert < len(up)).unsqueeze(1), weighed, 0.0)
    return torch.empty_like(weighed).index_copy_(0, order, weighed).view(len(x), choices, -1).sum(1).to(x.dtype)
