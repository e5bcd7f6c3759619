"""Stacks of weights: each stays the weight that it was, also where only some have zero points or exact scales."""

import torch

from mini_infer_engine.kernels.gemm.grouped_weight import GroupedWeight, dequantized_groups, rows_joined, stacked


def test_regrouped_weights_keep_their_values() -> None:
    values = torch.arange(-64, 64, dtype=torch.int8).view(4, 32)
    scales = torch.tensor([[0.5, 0.25]] * 4)
    zeros = torch.full((4, 2), 3, dtype=torch.int8)
    weights = [
        GroupedWeight("int8", values, scales.half(), 32, 16),
        GroupedWeight("int8", values, scales / 3, 32, 16, zeros),
    ]
    each = [dequantized_groups(weight) for weight in weights]
    for order in (1, -1):
        assert torch.equal(dequantized_groups(stacked(weights[::order])), torch.stack(each[::order]))
        assert torch.equal(dequantized_groups(rows_joined(weights[::order])), torch.cat(each[::order]))
