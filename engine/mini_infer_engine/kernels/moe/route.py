"""Fused top-k routing of a mixture of experts: softmax over all, the k largest, and where each expert's rows are.

One program a token. For grouped GEMM it also counts each expert's tokens and lists them: the order within an expert is
that of arrival, which changes no row's result.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.sizes import next_power_of_2


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts compute each token of a pass."""

    weights: torch.Tensor  # [tokens, top_k] fp32, rounded as the model's dtype rounds
    experts: torch.Tensor  # [tokens, top_k] int32
    counts: torch.Tensor  # [experts] int32, tokens of each expert
    pairs: torch.Tensor  # [experts, tokens] int32: token * top_k + choice, of each expert's tokens in any order


@triton.jit(do_not_specialize=["tokens"])
def _route(
    logits,
    weights,
    experts,
    counts,
    pairs,
    tokens,
    logits_stride,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr,
    NORMALIZES: tl.constexpr,
    GROUPS: tl.constexpr,
):
    token = tl.program_id(0)
    columns = tl.arange(0, EXPERTS_BLOCK)
    inside = columns < NUM_EXPERTS
    scores = tl.load(logits + token.to(tl.int64) * logits_stride + columns, mask=inside, other=float("-inf"))
    scores = scores.to(tl.float32)
    unnormalised = tl.exp(scores - tl.max(scores, axis=0))
    left = unnormalised / tl.sum(unnormalised, axis=0)
    choices = tl.arange(0, TOP_K_BLOCK)
    chosen_weights = tl.zeros((TOP_K_BLOCK,), dtype=tl.float32)
    chosen_experts = tl.zeros((TOP_K_BLOCK,), dtype=tl.int32)
    for choice in tl.static_range(TOP_K):
        weight = tl.max(left, axis=0)
        expert = tl.min(tl.where((left == weight) & inside, columns, EXPERTS_BLOCK), axis=0)
        # Padding may be no numbers, of which none is the largest: its experts are the first ones, each once.
        expert = tl.where(expert < NUM_EXPERTS, expert, choice)
        chosen_weights = tl.where(choices == choice, weight, chosen_weights)
        chosen_experts = tl.where(choices == choice, expert, chosen_experts)
        left = tl.where(columns == expert, -1.0, left)
    if NORMALIZES:
        chosen_weights /= tl.sum(chosen_weights, axis=0)
    rounded = chosen_weights.to(logits.dtype.element_ty).to(tl.float32)
    is_choice = choices < TOP_K
    tl.store(weights + token * TOP_K + choices, rounded, mask=is_choice)
    tl.store(experts + token * TOP_K + choices, chosen_experts, mask=is_choice)
    if GROUPS:
        place = tl.atomic_add(counts + chosen_experts, 1, mask=is_choice, sem="relaxed")
        tl.store(pairs + chosen_experts.to(tl.int64) * tokens + place, token * TOP_K + choices, mask=is_choice)


def route(logits: torch.Tensor, top_k: int, *, normalizes_top_k: bool, groups: bool) -> Routing:
    """For logits [tokens, experts] of the router. `groups`: also list each expert's tokens, for grouped GEMM."""
    tokens, num_experts = logits.shape
    device = logits.device
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=device)
    experts = torch.empty((tokens, top_k), dtype=torch.int32, device=device)
    counts = torch.zeros(num_experts if groups else 0, dtype=torch.int32, device=device)
    pairs = torch.empty((num_experts if groups else 0, tokens), dtype=torch.int32, device=device)
    _route[(tokens,)](
        logits,
        weights,
        experts,
        counts,
        pairs,
        tokens,
        logits.stride(0),
        NUM_EXPERTS=num_experts,
        EXPERTS_BLOCK=next_power_of_2(num_experts),
        TOP_K=top_k,
        TOP_K_BLOCK=next_power_of_2(top_k),
        NORMALIZES=normalizes_top_k,
        GROUPS=groups,
        num_warps=1 if num_experts <= 128 else 4,
    )
    return Routing(weights, experts, counts, pairs)
