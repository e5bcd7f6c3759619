"""Implements the operations in plain torch, for any device. CPUs run it, and our kernels are tested against it."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from mini_infer_engine.communication.collectives import NO_COLLECTIVES, Collectives
from mini_infer_engine.config.model.model_config import Activation
from mini_infer_engine.layers.embedding import Embedding
from mini_infer_engine.layers.linear import Linear
from mini_infer_engine.layers.moe import MoESpec, SparseMoE, expert_weight, swiglu_oai
from mini_infer_engine.layers.norm import RMSNorm, rms_norm
from mini_infer_engine.ops.base import ResidualState

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


class TorchOps:
    """Implements `ops.base.Ops` in plain torch. Adds to the residual stream in place."""

    def __init__(self, collectives: Collectives = NO_COLLECTIVES) -> None:
        self._collectives = collectives

    def embed(self, token_ids: Tensor, embedding: Embedding) -> Tensor:
        """Looks up the embeddings, and sums them over ranks."""
        return self._collectives.begin(embedding(token_ids))

    def sum_embeddings(self, hidden: Tensor) -> Tensor:
        """Sums the embeddings over ranks."""
        return self._collectives.begin(hidden)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sums x over ranks."""
        return self._collectives.all_reduce(x)

    def gather_columns(self, x: Tensor, width: int) -> Tensor:
        """Gathers the columns of all ranks."""
        return self._collectives.gather_columns(x, width)

    def norm_linear(self, state: ResidualState, norm: RMSNorm | None, linear: Linear) -> Tensor:
        """Computes the norm, then the product."""
        out: Tensor = linear(self.norm(state, norm))
        return out

    def norm_gated_linear(
        self, state: ResidualState, norm: RMSNorm | None, linear: Linear, activation: Activation
    ) -> Tensor:
        """Computes the norm, one product for gate and up, and the activation."""
        gate, up = linear(self.norm(state, norm)).chunk(2, dim=-1)
        return ACTIVATIONS[activation](gate).mul_(up)

    def linear_add_norm(self, x: Tensor, linear: Linear, state: ResidualState, next_norm: RMSNorm) -> ResidualState:
        """Computes the product, sums it over ranks, and adds it to the residual stream."""
        return self.add_norm(self._summed(x, linear), state, next_norm)

    def linear_norm_add_norm(
        self, x: Tensor, linear: Linear, norm: RMSNorm, state: ResidualState, next_norm: RMSNorm | None
    ) -> ResidualState:
        """Computes the product, sums it over ranks, and adds its norm to the residual stream."""
        return self.add_norm(norm(self._summed(x, linear)), state, next_norm)

    def norm_columns_(self, x: Tensor, columns: slice, norm: RMSNorm) -> None:
        """Normalises the columns, with an all-reduce if a norm spans the columns of several ranks."""
        if norm.columns is not None:
            norm_shared_columns_(x[:, columns], norm, self._collectives)
        else:
            rms_norm(x[:, columns], norm.weight, norm.eps, out=x[:, columns])

    def moe_add_norm(self, state: ResidualState, norm: RMSNorm, moe: SparseMoE, next_norm: RMSNorm) -> ResidualState:
        """Computes the experts of the normed residual stream, and adds their sum."""
        x = self.norm(state, norm)
        return self.add_norm(self.experts(x, x, moe), state, next_norm)

    def experts(self, x: Tensor, routed_by: Tensor, moe: SparseMoE) -> Tensor:
        """Computes expert after expert, each over the tokens that are routed to it."""
        weights, experts = route(moe.gate(routed_by), moe.spec, moe.correction)
        if moe.expert_scale is not None:
            weights = weights * moe.expert_scale[experts]
        inputs = x if moe.latent_in_proj is None else moe.latent_in_proj(x)
        mixed = torch.zeros_like(inputs)
        gate_up, down = moe.weights()
        for expert in sorted(set(experts.flatten().tolist()).intersection(moe.local_experts)):
            tokens, choices = torch.where(experts == expert)
            here = expert - moe.local_experts.start
            gate_up_bias = None if moe.gate_up_bias is None else moe.gate_up_bias[here]
            down_bias = None if moe.down_bias is None else moe.down_bias[here]
            made = functional.linear(inputs[tokens], expert_weight(gate_up, here, x.dtype), gate_up_bias)
            made = functional.linear(_activated(made, moe.spec), expert_weight(down, here, x.dtype), down_bias)
            mixed.index_add_(0, tokens, made * weights[tokens, choices, None])
        if moe.latent_out_proj is not None:
            mixed = moe.latent_out_proj(mixed)
        if (shared := moe.shared_experts) is not None:
            made = shared.down_proj(self.norm_gated_linear(ResidualState(x), None, shared.gate_up_proj, "silu"))
            mixed += made if moe.shared_gate is None else made * moe.shared_gate(x).sigmoid()
        return self._collectives.all_reduce(mixed) if moe.is_summed else mixed

    def norm(self, state: ResidualState, norm: RMSNorm | None) -> Tensor:
        """Computes the norm of the residual stream."""
        out: Tensor = state.residual if norm is None else norm(state.residual)
        return out

    def logits(self, state: ResidualState, norm: RMSNorm, head: Linear, out: Tensor | None = None) -> Tensor:
        """Computes norm and product, and gathers the ranks' columns if they share out the vocabulary."""
        made = self.norm_linear(state, norm, head)
        if head.rows is not None:
            return self._collectives.gather_columns(made, head.rows.total, out)
        return made if out is None else out.copy_(made)

    def add_norm(self, x: Tensor, state: ResidualState, next_norm: RMSNorm | None) -> ResidualState:
        """Adds x in place, and leaves the norm to the operation that reads it."""
        del next_norm  # computed by the verb that reads it
        return ResidualState(state.residual.add_(x))

    def _summed(self, x: Tensor, linear: Linear) -> Tensor:
        """Returns linear(x), summed over all ranks."""
        made: Tensor = linear(x)
        return self._collectives.all_reduce(made) if linear.is_summed else made


def norm_shared_columns_(x: Tensor, norm: RMSNorm, collectives: Collectives) -> None:
    """Applies RMS norm in place over the columns of all ranks, of which x [tokens, columns] are this rank's."""
    assert norm.columns is not None
    wide = x.float()
    squares = collectives.all_reduce(wide.square().sum(dim=-1, keepdim=True))
    scale = (squares / (norm.copies * norm.columns.total) + norm.eps).rsqrt_()
    x.copy_(wide.mul_(scale).mul_(norm.weight))


def _activated(made: Tensor, spec: MoESpec) -> Tensor:
    """Returns the input of an expert's last product, given the output of its first."""
    if not spec.is_gated:
        return functional.relu(made).square()
    gate, up = made.chunk(2, dim=-1)
    if spec.swiglu_limit is not None:
        return swiglu_oai(gate, up, spec.swiglu_limit)
    return ACTIVATIONS[spec.activation](gate).mul_(up)


def route(logits: Tensor, spec: MoESpec, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns each token's weights in the logits' dtype and experts int64, for the router's logits [tokens,
    num_experts].

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
    """Sets the scores of experts outside the best groups to minus infinity (DeepSeek-V2's device-limited routing)."""
    groups = choosing.view(len(choosing), spec.num_groups, -1)
    best = groups.topk(2, dim=-1).values.sum(-1) if spec.scoring == "sigmoid" else groups.amax(-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, best.topk(spec.top_groups, dim=-1).indices, value=True)
    return groups.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)
