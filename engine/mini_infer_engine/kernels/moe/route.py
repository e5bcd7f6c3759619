"""Fused top-k routing of a mixture of experts: computes all scores, the k largest, and the place of each expert's rows.

Scores are softmax or sigmoid of the router's logits. The k may be limited to the best groups of experts (DeepSeek-V2,
arXiv 2405.04434), chosen with a correction (DeepSeek-V3, arXiv 2412.19437), and followed by experts that all tokens
share. One program per token. For grouped GEMM it also counts each expert's tokens and lists them: the order within an
expert is that of arrival, which changes no row's result.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.sizes import next_power_of_2


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts that compute each token of a pass."""

    weights: torch.Tensor  # [tokens, choices] fp32, rounded as the model's dtype rounds
    experts: torch.Tensor  # [tokens, choices] int32, shared ones last; of local ones their place among these, else -1
    counts: torch.Tensor  # [experts] int32, tokens of each expert, or of each local one
    pairs: torch.Tensor  # [experts, tokens] int32: token * choices + choice, of each expert's tokens in any order
    is_local: bool  # whether some of these have no weights here: what they would make of a token is 0


@triton.jit
def _within_best_groups(
    scores,
    columns,
    NUM_EXPERTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    BY_TWO: tl.constexpr,
):
    """Sets scores outside the best groups to -inf. A group's score is its best expert's, or the sum of its two best."""
    group_of = columns // (NUM_EXPERTS // NUM_GROUPS)
    groups = tl.arange(0, GROUPS_BLOCK)
    best = tl.full((GROUPS_BLOCK,), float("-inf"), dtype=tl.float32)
    for group in tl.static_range(NUM_GROUPS):
        mine = tl.where(group_of == group, scores, float("-inf"))
        score = tl.max(mine, axis=0)
        if BY_TWO:
            first = tl.min(tl.where(mine == score, columns, 1 << 30), axis=0)
            score += tl.max(tl.where(columns == first, float("-inf"), mine), axis=0)
        best = tl.where(groups == group, score, best)
    kept = columns < 0
    for _ in tl.static_range(TOP_GROUPS):
        top = tl.max(best, axis=0)
        group = tl.min(tl.where(best == top, groups, GROUPS_BLOCK), axis=0)
        kept = kept | (group_of == group)
        best = tl.where(groups == group, float("-inf"), best)
    return tl.where(kept, scores, float("-inf"))


@triton.jit(do_not_specialize=["tokens"])
def _route(
    logits,
    correction,
    weights,
    experts,
    counts,
    pairs,
    tokens,
    logits_stride,
    scale,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    CHOICES_BLOCK: tl.constexpr,
    SIGMOID: tl.constexpr,
    CORRECTED: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    NORMALIZES: tl.constexpr,
    LISTS: tl.constexpr,
    FIRST_LOCAL: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
):
    token = tl.program_id(0)
    columns = tl.arange(0, EXPERTS_BLOCK)
    inside = columns < NUM_EXPERTS
    scores = tl.load(logits + token.to(tl.int64) * logits_stride + columns, mask=inside, other=float("-inf"))
    scores = scores.to(tl.float32)
    if SIGMOID:
        every_weight = 1.0 / (1.0 + tl.exp(-scores))
    else:
        unnormalised = tl.exp(scores - tl.max(scores, axis=0))
        every_weight = unnormalised / tl.sum(unnormalised, axis=0)
    left = every_weight
    if CORRECTED:
        left += tl.load(correction + columns, mask=inside, other=0.0)
    # Padding rows may be NaN, which no maximum finds: finite scores choose each of their experts once all the same, or
    # an expert would have more pairs than its list has room for.
    left = tl.where(left == left, left, -1e30)
    left = tl.where(inside, left, float("-inf"))
    if NUM_GROUPS > 1:
        left = _within_best_groups(left, columns, NUM_EXPERTS, NUM_GROUPS, TOP_GROUPS, GROUPS_BLOCK, SIGMOID)
    choices = tl.arange(0, CHOICES_BLOCK)
    chosen_weights = tl.zeros((CHOICES_BLOCK,), dtype=tl.float32)
    chosen_experts = tl.zeros((CHOICES_BLOCK,), dtype=tl.int32)
    for choice in tl.static_range(TOP_K):
        best = tl.max(left, axis=0)
        expert = tl.min(tl.where((left == best) & inside, columns, EXPERTS_BLOCK), axis=0)
        weight = tl.sum(tl.where(columns == expert, every_weight, 0.0), axis=0)
        chosen_weights = tl.where(choices == choice, weight, chosen_weights)
        chosen_experts = tl.where(choices == choice, expert, chosen_experts)
        left = tl.where(columns == expert, float("-inf"), left)
    if NORMALIZES:
        chosen_weights /= tl.sum(chosen_weights, axis=0)
    is_shared = choices >= TOP_K
    chosen_weights = tl.where(is_shared, 1.0, chosen_weights * scale)
    chosen_experts = tl.where(is_shared, NUM_EXPERTS + choices - TOP_K, chosen_experts)
    rounded = chosen_weights.to(logits.dtype.element_ty).to(tl.float32)
    num_choices: tl.constexpr = TOP_K + NUM_SHARED
    is_choice = choices < num_choices
    is_listed = is_choice
    if NUM_LOCAL:
        chosen_experts -= FIRST_LOCAL
        is_listed = is_choice & (chosen_experts >= 0) & (chosen_experts < NUM_LOCAL)
        chosen_experts = tl.where(is_listed, chosen_experts, -1)
    tl.store(weights + token * num_choices + choices, rounded, mask=is_choice)
    tl.store(experts + token * num_choices + choices, chosen_experts, mask=is_choice)
    if LISTS:
        place = tl.atomic_add(counts + chosen_experts, 1, mask=is_listed, sem="relaxed")
        tl.store(pairs + chosen_experts.to(tl.int64) * tokens + place, token * num_choices + choices, mask=is_listed)


def route(
    logits: torch.Tensor,
    top_k: int,
    *,
    normalizes_top_k: bool,
    groups: bool,
    num_shared: int = 0,
    sigmoid: bool = False,
    scale: float = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
    correction: torch.Tensor | None = None,
    local: range | None = None,
) -> Routing:
    """Routes tokens by the router's logits [tokens, experts]. `groups`: list each expert's tokens, for grouped GEMM.

    `correction` is [experts] fp32. `local`: the experts whose weights are here; None: all, shared ones too. The other
    arguments are those of `MoESpec`.
    """
    tokens, num_experts = logits.shape
    device, choices = logits.device, top_k + num_shared
    stacked = 0 if not groups else num_experts + num_shared if local is None else len(local)
    weights = torch.empty((tokens, choices), dtype=torch.float32, device=device)
    experts = torch.empty((tokens, choices), dtype=torch.int32, device=device)
    counts = torch.zeros(stacked, dtype=torch.int32, device=device)
    pairs = torch.empty((stacked, tokens), dtype=torch.int32, device=device)
    _route[(tokens,)](
        logits,
        correction,
        weights,
        experts,
        counts,
        pairs,
        tokens,
        logits.stride(0),
        scale,
        NUM_EXPERTS=num_experts,
        EXPERTS_BLOCK=next_power_of_2(num_experts),
        TOP_K=top_k,
        NUM_SHARED=num_shared,
        CHOICES_BLOCK=next_power_of_2(choices),
        SIGMOID=sigmoid,
        CORRECTED=correction is not None,
        NUM_GROUPS=num_groups,
        TOP_GROUPS=top_groups,
        GROUPS_BLOCK=next_power_of_2(num_groups),
        NORMALIZES=normalizes_top_k,
        LISTS=groups,
        FIRST_LOCAL=0 if local is None else local.start,
        NUM_LOCAL=0 if local is None else len(local),
        num_warps=1 if num_experts <= 128 else 4,
    )
    return Routing(weights, experts, counts, pairs, local is not None)
