"""Muon for the layers' matrices, AdamW for the rest; knows parameters, not what they compute.

Muon: Keller Jordan, https://kellerjordan.github.io/posts/muon/; update scaled to AdamW's size as in "Muon is Scalable
for LLM Training" (arXiv:2502.16982), so that both share one learning rate.
"""

from typing import Any

import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal; matrices of one shape are done in one batched product."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        by_shape: dict[torch.Size, list[nn.Parameter]] = {}
        for parameter in parameters:
            by_shape.setdefault(parameter.shape, []).append(parameter)
        groups: list[dict[str, Any]] = [{"params": group} for group in by_shape.values()]
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates all matrices."""
        for group in self.param_groups:
            parameters: list[nn.Parameter] = group["params"]
            gradient = torch.stack([p.grad for p in parameters if p.grad is not None])
            state = self.state[parameters[0]]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(gradient)
            state["momentum"].lerp_(gradient, 1 - group["momentum"])
            update = orthogonal(gradient.lerp(state["momentum"], group["momentum"]))
            scale = 0.2 * max(gradient.shape[-2:]) ** 0.5
            for parameter, change in zip(parameters, update, strict=True):
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(change, alpha=group["lr"] * scale)


def orthogonal(matrices: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices, about, by five Newton-Schulz steps in bf16; [count, rows, columns]."""
    a, b, c = _COEFFICIENTS
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)


def optimizers(model: nn.Module, lr: float, weight_decay: float, use_muon: bool) -> list[torch.optim.Optimizer]:
    """The optimisers of a model; each group's `initial_lr` is the peak that a schedule scales."""
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    embedding = [p for name, p in model.named_parameters() if "embed" in name]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    fused = embedding[0].is_cuda
    adam_groups: list[dict[str, Any]] = [
        {"params": embedding, "weight_decay": 0.01},
        {"params": vectors, "weight_decay": 0.0},
    ]
    found: list[torch.optim.Optimizer] = []
    if use_muon:
        found.append(Muon(matrices, lr=lr, momentum=0.95, weight_decay=weight_decay))
    else:
        adam_groups.append({"params": matrices, "weight_decay": weight_decay})
    found.append(torch.optim.AdamW(adam_groups, lr=lr, betas=(0.9, 0.95), eps=1e-10, fused=fused))
    for optimizer in found:
        for group in optimizer.param_groups:
            group["initial_lr"] = lr
    return found
