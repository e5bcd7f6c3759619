"""The verbs in plain torch, for any device: what runs on a CPU, and the truth that our kernels are tested against."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from mini_infer_engine.config.model_config import Activation
from mini_infer_engine.layers.linear import Linear
from mini_infer_engine.layers.norm import RMSNorm
from mini_infer_engine.ops.base import ResidualState

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


class TorchOps:
    """See `ops.base.Ops`. The residual stream is added to in place."""

    def norm_linear(self, state: ResidualState, norm: RMSNorm, linear: Linear) -> Tensor:
        """See `Ops.norm_linear`."""
        out: Tensor = linear(norm(state.residual))
        return out

    def norm_gated_linear(self, state: ResidualState, norm: RMSNorm, linear: Linear, activation: Activation) -> Tensor:
        """See `Ops.norm_gated_linear`."""
        gate, up = linear(norm(state.residual)).chunk(2, dim=-1)
        return ACTIVATIONS[activation](gate).mul_(up)

    def linear_add_norm(self, x: Tensor, linear: Linear, state: ResidualState, next_norm: RMSNorm) -> ResidualState:
        """See `Ops.linear_add_norm`."""
        return self.add_norm(linear(x), state, next_norm)

    def linear_norm_add_norm(
        self, x: Tensor, linear: Linear, norm: RMSNorm, state: ResidualState, next_norm: RMSNorm
    ) -> ResidualState:
        """See `Ops.linear_norm_add_norm`."""
        return self.add_norm(norm(linear(x)), state, next_norm)

    def norm(self, state: ResidualState, norm: RMSNorm) -> Tensor:
        """See `Ops.norm`."""
        out: Tensor = norm(state.residual)
        return out

    def logits(self, state: ResidualState, norm: RMSNorm, head: Linear, out: Tensor | None = None) -> Tensor:
        """See `Ops.logits`."""
        made = self.norm_linear(state, norm, head)
        return made if out is None else out.copy_(made)

    def add_norm(self, x: Tensor, state: ResidualState, next_norm: RMSNorm) -> ResidualState:
        """See `Ops.add_norm`."""
        del next_norm  # computed by the verb that reads it
        return ResidualState(state.residual.add_(x))
