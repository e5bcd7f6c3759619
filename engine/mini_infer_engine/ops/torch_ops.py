"""The verbs in plain torch, for any device: what runs on a CPU, and the truth that our kernels are tested against."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from mini_infer_engine.config.model_config import Activation
from mini_infer_engine.layers.linear import Linear
from mini_infer_engine.layers.moe import MoESpec, SparseMoE
from mini_infer_engine.layers.norm import RMSNorm, rms_norm
from mini_infer_engine.ops.base import ResidualState

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


class TorchOps:
    """See `ops.base.Ops`. The residual stream is added to in place."""

    def norm_linear(self, state: ResidualState, norm: RMSNorm | None, linear: Linear) -> Tensor:
        """See `Ops.norm_linear`."""
        out: Tensor = linear(self.norm(state, norm))
        return out

    def norm_gated_linear(
        self, state: ResidualState, norm: RMSNorm | None, linear: Linear, activation: Activation
    ) -> Tensor:
        """See `Ops.norm_gated_linear`."""
        gate, up = linear(self.norm(state, norm)).chunk(2, dim=-1)
        return ACTIVATIONS[activation](gate).mul_(up)

    def linear_add_norm(self, x: Tensor, linear: Linear, state: ResidualState, next_norm: RMSNorm) -> ResidualState:
        """See `Ops.linear_add_norm`."""
        return self.add_norm(linear(x), state, next_norm)

    def linear_norm_add_norm(
        self, x: Tensor, linear: Linear, norm: RMSNorm, state: ResidualState, next_norm: RMSNorm | None
    ) -> ResidualState:
        """See `Ops.linear_norm_add_norm`."""
        return self.add_norm(norm(linear(x)), state, next_norm)

    def norm_columns_(self, x: Tensor, columns: slice, norm: RMSNorm) -> None:
        """See `Ops.norm_columns_`."""
        rms_norm(x[:, columns], norm.weight, norm.eps, out=x[:, columns])

    def moe_add_norm(self, state: ResidualState, norm: RMSNorm, moe: SparseMoE, next_norm: RMSNorm) -> ResidualState:
        """See `Ops.moe_add_norm`: expert after expert, each over the tokens that chose it."""
        x = self.norm(state, norm)
        weights, experts = route(moe.gate(x), moe.spec)
        mixed = torch.zeros_like(x)
        for expert in sorted(set(experts.flatten().tolist())):
            tokens, choices = torch.where(experts == expert)
            gate, up = functional.linear(x[tokens], moe.gate_up_proj[expert]).chunk(2, dim=-1)
            made = functional.linear(functional.silu(gate).mul_(up), moe.down_proj[expert])
            mixed.index_add_(0, tokens, made * weights[tokens, choices, None])
        return self.add_norm(mixed, state, next_norm)

    def norm(self, state: ResidualState, norm: RMSNorm | None) -> Tensor:
        """See `Ops.norm`."""
        out: Tensor = state.residual if norm is None else norm(state.residual)
        return out

    def logits(self, state: ResidualState, norm: RMSNorm, head: Linear, out: Tensor | None = None) -> Tensor:
        """See `Ops.logits`."""
        made = self.norm_linear(state, norm, head)
        return made if out is None else out.copy_(made)

    def add_norm(self, x: Tensor, state: ResidualState, next_norm: RMSNorm | None) -> ResidualState:
        """See `Ops.add_norm`."""
        del next_norm  # computed by the verb that reads it
        return ResidualState(state.residual.add_(x))


def route(logits: Tensor, spec: MoESpec) -> tuple[Tensor, Tensor]:
    """Weights [tokens, top_k] in the logits' dtype and experts [tokens, top_k] int64, for logits [tokens, experts]."""
    chosen, experts = logits.softmax(dim=-1, dtype=torch.float32).topk(spec.top_k, dim=-1)
    if spec.normalizes_top_k:
        chosen = chosen / chosen.sum(dim=-1, keepdim=True)
    return chosen.to(logits.dtype), experts
