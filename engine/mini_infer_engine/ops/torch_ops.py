"""The verbs in plain torch, for any device: what runs on a CPU, and the truth that our kernels are tested against."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from mini_infer_engine.communication.collectives import NO_COLLECTIVES, Collectives
from mini_infer_engine.config.model.model_config import Activation
from mini_infer_engine.layers.embedding import Embedding
from mini_infer_engine.layers.linear import Linear
from mini_infer_engine.layers.moe import MoESpec, SparseMoE, expert_weight
from mini_infer_engine.layers.norm import RMSNorm, rms_norm
from mini_infer_engine.ops.base import ResidualState

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


class TorchOps:
    """See `ops.base.Ops`. The residual stream is added to in place."""

    def __init__(self, collectives: Collectives = NO_COLLECTIVES) -> None:
        self._collectives = collectives

    def embed(self, token_ids: Tensor, embedding: Embedding) -> Tensor:
        """See `Ops.embed`."""
        return self._collectives.begin(embedding(token_ids))

    def sum_embeddings(self, hidden: Tensor) -> Tensor:
        """See `Ops.sum_embeddings`."""
        return self._collectives.begin(hidden)

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
        return self.add_norm(self._summed(x, linear), state, next_norm)

    def linear_norm_add_norm(
        self, x: Tensor, linear: Linear, norm: RMSNorm, state: ResidualState, next_norm: RMSNorm | None
    ) -> ResidualState:
        """See `Ops.linear_norm_add_norm`."""
        return self.add_norm(norm(self._summed(x, linear)), state, next_norm)

    def norm_columns_(self, x: Tensor, columns: slice, norm: RMSNorm) -> None:
        """See `Ops.norm_columns_`."""
        if norm.columns is not None:
            norm_shared_columns_(x[:, columns], norm, self._collectives)
        else:
            rms_norm(x[:, columns], norm.weight, norm.eps, out=x[:, columns])

    def moe_add_norm(self, state: ResidualState, norm: RMSNorm, moe: SparseMoE, next_norm: RMSNorm) -> ResidualState:
        """See `Ops.moe_add_norm`: expert after expert, each over the tokens that chose it."""
        x = self.norm(state, norm)
        weights, experts = route(moe.gate(x), moe.spec, moe.correction)
        mixed = torch.zeros_like(x)
        gate_up, down = moe.weights()
        for expert in sorted(set(experts.flatten().tolist()).intersection(moe.local_experts)):
            tokens, choices = torch.where(experts == expert)
            here = expert - moe.local_experts.start
            gate, up = functional.linear(x[tokens], expert_weight(gate_up, here, x.dtype)).chunk(2, dim=-1)
            made = functional.linear(functional.silu(gate).mul_(up), expert_weight(down, here, x.dtype))
            mixed.index_add_(0, tokens, made * weights[tokens, choices, None])
        if (shared := moe.shared_experts) is not None:
            mixed += shared.down_proj(self.norm_gated_linear(ResidualState(x), None, shared.gate_up_proj, "silu"))
        return self.add_norm(self._collectives.all_reduce(mixed) if moe.is_summed else mixed, state, next_norm)

    def norm(self, state: ResidualState, norm: RMSNorm | None) -> Tensor:
        """See `Ops.norm`."""
        out: Tensor = state.residual if norm is None else norm(state.residual)
        return out

    def logits(self, state: ResidualState, norm: RMSNorm, head: Linear, out: Tensor | None = None) -> Tensor:
        """See `Ops.logits`."""
        made = self.norm_linear(state, norm, head)
        if head.rows is not None:
            return self._collectives.gather_columns(made, head.rows.total, out)
        return made if out is None else out.copy_(made)

    def add_norm(self, x: Tensor, state: ResidualState, next_norm: RMSNorm | None) -> ResidualState:
        """See `Ops.add_norm`."""
        del next_norm  # computed by the verb that reads it
        return ResidualState(state.residual.add_(x))

    def _summed(self, x: Tensor, linear: Linear) -> Tensor:
        """linear(x), over all ranks."""
        made: Tensor = linear(x)
        return self._collectives.all_reduce(made) if linear.is_summed else made


def norm_shared_columns_(x: Tensor, norm: RMSNorm, collectives: Collectives) -> None:
    """RMS norm in place over the columns of all ranks, of which x [tokens, columns] are this one's."""
    assert norm.columns is not None
    wide = x.float()
    squares = collectives.all_reduce(wide.square().sum(dim=-1, keepdim=True))
    scale = (squares / (norm.copies * norm.columns.total) + norm.eps).rsqrt_()
    x.copy_(wide.mul_(scale).mul_(norm.weight))


def route(logits: Tensor, spec: MoESpec, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Weights in the logits' dtype and experts int64 of each token, for the router's logits [tokens, num_experts].

    Both are [tokens, experts_per_token], the shared experts last.
    """
    wide = logits.float()
    scores = wide.sigmoid() if spec.scoring == "sigmoid" else wide.softmax(dim=-1)
    choosing = scores if correction is None else scores + correction
    if spec.num_groups > 1:
        choosing = _within_best_groups(choosing, spec)
    experts = choosing.topk(spec.top_k, dim=-1).indices
    chosen = scores.gather(-1, experts)
    if spec.normalizes_top_k:
        chosen = chosen / chosen.sum(dim=-1, keepdim=True)
    chosen = (chosen * spec.scale).to(logits.dtype)
    if not spec.num_shared:
        return chosen, experts
    shared = torch.arange(spec.num_experts, spec.num_stacked, device=logits.device).expand(len(logits), -1)
    return torch.cat((chosen, chosen.new_ones(shared.shape)), dim=-1), torch.cat((experts, shared), dim=-1)


def _within_best_groups(choosing: Tensor, spec: MoESpec) -> Tensor:
    """The same scores, of experts outside of the best groups minus infinity (DeepSeek-V2's device-limited routing)."""
    groups = choosing.view(len(choosing), spec.num_groups, -1)
    best = groups.topk(2, dim=-1).values.sum(-1) if spec.scoring == "sigmoid" else groups.amax(-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, best.topk(spec.top_groups, dim=-1).indices, value=True)
    return groups.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)
