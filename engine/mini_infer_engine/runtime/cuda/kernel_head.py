"""Computes the steps of a speculative head by the verbs of `ops`, which fuse norms, gate and sums with the products.

It computes what `speculation.head` specifies, from the same weights. In plain torch each norm of a few rows is seven
kernels.
"""

import torch
from torch import Tensor, nn

from mini_infer_engine.layers.linear import Linear
from mini_infer_engine.layers.norm import RMSNorm
from mini_infer_engine.ops.base import Ops, ResidualState
from mini_infer_engine.speculation.head import EPS, SpeculativeHead


class KernelHead:
    """The speculative head of one executor. Rows are sequences."""

    def __init__(self, head: SpeculativeHead, ops: Ops) -> None:
        self._ops, self._shape = ops, head.shape
        products = (head.fuse, head.embedded, head.gate_up, head.down, head.out)
        self._fuse, self._embedded, self._gate_up, self._down, self._out = (
            Linear.borrowing(nn.Parameter(product.weight, requires_grad=False)) for product in products
        )
        self._hidden_norm = _norm(head.shape.hidden_size, head.fuse.weight)
        self._norm = _norm(head.shape.width, head.fuse.weight)

    def begin(self, features: Tensor) -> ResidualState:
        """Returns the first state, from hidden states [rows, layers * hidden_size]."""
        layers = features.view(-1, self._shape.hidden_size)
        normed = self._ops.norm(ResidualState(layers), self._hidden_norm).view(features.shape)
        return ResidualState(self._ops.norm_linear(ResidualState(normed), None, self._fuse))

    def step(self, state: ResidualState, embedding: Tensor) -> tuple[ResidualState, Tensor]:
        """Returns the next state, and the input of the model's last norm and output matrix, [rows, hidden_size].

        `embedding` [rows, hidden_size] is that of the newest token.
        """
        ops = self._ops
        x = ResidualState(ops.norm(state, self._norm))
        x = ops.linear_add_norm(ops.norm(ResidualState(embedding), self._hidden_norm), self._embedded, x, self._norm)
        gated = ops.norm_gated_linear(x, self._norm, self._gate_up, "silu")
        x = ops.linear_add_norm(gated, self._down, x, self._norm)
        return x, ops.norm_linear(x, self._norm, self._out)


def _norm(width: int, like: Tensor) -> RMSNorm:
    """Returns a norm whose weight is one, as the head's norms have none."""
    norm = RMSNorm(width, EPS)
    norm.weight = nn.Parameter(torch.ones(width, dtype=like.dtype, device=like.device), requires_grad=False)
    return norm
