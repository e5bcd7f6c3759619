"""Gumbel-max sampling without a sort (Gumbel 1954; Maddison et al., arXiv:1411.0030).

It is greedy, or uses noise that depends only on seed and output position. Top-k, top-p and min-p are one threshold per
row (topk_topp.py). The logits that reach it are read once: noise is drawn for groups of tokens, and then for the tokens
of each split's best group. The formulas are those of sampling/reference.py, so that CPU and GPU choose alike.
"""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.sampling.sampling_state import HOST_RING_DEPTH, SamplingState
from mini_infer_engine.kernels.sampling.token_groups import GROUP_TOKENS, RUN_TOKENS, TILE_GROUPS
from mini_infer_engine.kernels.sampling.topk_topp import topk_topp_thresholds
from mini_infer_engine.kernels.sizes import cdiv, next_power_of_2
from mini_infer_engine.kernels.workspace import Workspace


@triton.jit
def _mix(bits):
    """Applies the finaliser of splitmix64 (Steele, Lea and Flood 2014)."""
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    return bits ^ (bits >> 31)


@triton.jit
def _noise(key, counters):
    """Returns Exp(1) noise, equal to the reference's exponential_noise."""
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    bits = _mix(key + counters.to(tl.uint64) * golden)
    uniform = (bits >> 11).to(tl.float32) * 1.1102230246251565e-16 + 5.551115123125783e-17
    uniform = tl.minimum(uniform, 0.99999994)
    series = uniform * (1.0 + uniform * (0.5 + uniform * (0.33333334 + uniform * 0.25)))
    return tl.where(uniform < 0.03, series, -tl.log(1.0 - uniform))  # -log1p(-uniform)


@triton.jit
def _candidates(source, columns, vocabulary, threshold, FILTERED: tl.constexpr):
    """Loads logits in fp32, with -inf for those that may not be chosen."""
    values = tl.load(source + columns, mask=columns < vocabulary, other=float("-inf")).to(tl.float32)
    if FILTERED:
        values = tl.where(values >= threshold, values, float("-inf"))
    return values


@triton.jit(do_not_specialize=["tiles_per_split", "padding_slot"])
def _choose(
    logits,
    slots,
    thresholds,
    last_tokens,
    positions,
    kv_lengths,
    noise_seeds,
    output_indexes,
    samplings,
    inverse_temperatures,
    on_host,
    partial_values,
    partial_tokens,
    counters,
    vocabulary,
    logits_stride,
    tiles_per_split,
    padding_slot,
    GROUP: tl.constexpr,
    RUN: tl.constexpr,
    GROUPS: tl.constexpr,
    FILTERED: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    KEPT: tl.constexpr,
):
    """Gumbel-max: one program per (row, split of the vocabulary).

    The split that arrives last picks the best and advances the slot. A group's logits belong to one thread: threads
    exchange nothing before a split's end.
    """
    row = tl.program_id(0)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    slot = tl.load(slots + row).to(tl.int64)
    inverse_temperature = tl.load(inverse_temperatures + slot)
    output_index = tl.load(output_indexes + slot)
    seed = tl.load(noise_seeds + slot).to(tl.uint64, bitcast=True)
    threshold = float("-inf")
    if FILTERED:
        threshold = tl.load(thresholds + row)
    key = _mix(seed + output_index.to(tl.uint64) + tl.full((), 0x9E3779B97F4A7C15, tl.uint64))
    source = logits + row.to(tl.int64) * logits_stride

    # 1. The best group of each thread.
    threads = tl.arange(0, GROUPS)
    runs = tl.arange(0, GROUP // RUN) * (GROUPS * RUN)
    within = threads[:, None, None] * RUN + runs[None, :, None] + tl.arange(0, RUN)[None, None, :]
    first = split * tiles_per_split
    best = tl.full((GROUPS,), float("-inf"), tl.float32)
    best_tile = tl.zeros((GROUPS,), tl.int32) + first
    for tile in range(first, tl.minimum(first + tiles_per_split, tl.cdiv(vocabulary, GROUP * GROUPS))):
        tokens_of_tile = tile * (GROUP * GROUPS) + within
        values = _candidates(source, tokens_of_tile, vocabulary, threshold, FILTERED)
        score = tl.max(tl.max(values, axis=2), axis=1)
        if inverse_temperature > 0:
            row_max = tl.maximum(score, -1e30)  # finite: -inf - -inf is no number
            weights = tl.exp2((values - row_max[:, None, None]) * (inverse_temperature * 1.4426950408889634))
            weight_sum = tl.sum(tl.sum(weights, axis=2), axis=1)
            noise = _noise(key, GROUP + tile * GROUPS + threads)
            score = row_max * inverse_temperature + tl.log(weight_sum / noise)
        is_better = score > best
        best = tl.where(is_better, score, best)
        best_tile = tl.where(is_better, tile, best_tile)

    # 2. The token. Of equal scores, which are common in bf16, the first token wins.
    row_max = tl.max(best, axis=0)
    none = tl.full((), 0x7FFFFFFF, tl.int32)
    if inverse_temperature > 0:
        group = tl.min(tl.where(best == row_max, best_tile * GROUPS + threads, none), axis=0)
        offs_group = tl.arange(0, GROUP)
        tokens = (group // GROUPS) * (GROUP * GROUPS) + (group % GROUPS) * RUN
        tokens += (offs_group // RUN) * (GROUPS * RUN) + offs_group % RUN
        members = _candidates(source, tokens, vocabulary, threshold, FILTERED)
        noisy = members * inverse_temperature - tl.log(_noise(key, offs_group))
        token = tl.min(tl.where(noisy == tl.max(noisy, axis=0), tokens, none), axis=0)
    else:
        tokens_of_tile = tl.min(tl.where(best == row_max, best_tile, none), axis=0) * (GROUP * GROUPS) + within
        values = _candidates(source, tokens_of_tile, vocabulary, threshold, False)
        found = tl.where(values == row_max, tokens_of_tile, none)
        token = tl.min(tl.min(tl.min(found, axis=2), axis=1), axis=0)
    token = tl.minimum(token, vocabulary - 1)  # nothing equals NaN

    # 3. The best of all splits.
    tl.store(partial_values + row * MAX_SPLITS + split, row_max)
    tl.store(partial_tokens + row * MAX_SPLITS + split, token)
    tl.debug_barrier()
    if tl.atomic_add(counters + row, 1, sem="acq_rel") == splits - 1:
        offs_split = tl.arange(0, MAX_SPLITS)
        values = tl.load(
            partial_values + row * MAX_SPLITS + offs_split,
            mask=offs_split < splits,
            other=float("-inf"),
            cache_modifier=".cg",
        )
        _, winner = tl.max(values, axis=0, return_indices=True)
        chosen = tl.load(partial_tokens + row * MAX_SPLITS + winner, cache_modifier=".cg").to(tl.int64)
        tl.store(counters + row, 0)
        if slot != padding_slot:
            sampling = tl.load(samplings + slot)
            tl.store(on_host + slot * KEPT + sampling % KEPT, chosen)
            tl.store(samplings + slot, sampling + 1)
            tl.store(last_tokens + slot, chosen)
            tl.store(positions + slot, tl.load(positions + slot) + 1)
            tl.store(kv_lengths + slot, tl.load(kv_lengths + slot) + 1)
            tl.store(output_indexes + slot, output_index + 1)


def sample(
    logits: torch.Tensor,
    slots: torch.Tensor,
    state: SamplingState,
    *,
    workspace: Workspace,
    programs: int,
    filtered: bool = True,
) -> None:
    """Chooses a token for each row of logits [rows, vocabulary], stores it in `state` and for the host, and advances
    its slot.

    The last slot of `state` belongs to padded rows: it never advances. `filtered`: some row may have top-k, top-p,
    min-p or suppressed tokens. `programs`: their approximate number for all rows together.
    """
    rows, vocabulary = logits.shape
    unfiltered = torch.empty(0, dtype=torch.float32, device=logits.device)
    thresholds = topk_topp_thresholds(logits, slots, state) if filtered else unfiltered
    tiles = cdiv(vocabulary, GROUP_TOKENS * TILE_GROUPS)
    tiles_per_split = cdiv(tiles, max(1, programs // rows))
    max_splits = next_power_of_2(tiles)
    partial_values = torch.empty((rows, max_splits), dtype=torch.float32, device=logits.device)
    partial_tokens = torch.empty((rows, max_splits), dtype=torch.int32, device=logits.device)
    _choose[(rows, cdiv(tiles, tiles_per_split))](
        logits,
        slots,
        thresholds,
        state.last_tokens,
        state.positions,
        state.kv_lengths,
        state.noise_seeds,
        state.output_indexes,
        state.samplings,
        state.inverse_temperatures,
        state.on_host,
        partial_values,
        partial_tokens,
        workspace.counters,
        vocabulary,
        logits.stride(0),
        tiles_per_split,
        state.last_tokens.shape[0] - 1,
        GROUP=GROUP_TOKENS,
        RUN=RUN_TOKENS,
        GROUPS=TILE_GROUPS,
        FILTERED=filtered,
        MAX_SPLITS=max_splits,
        KEPT=HOST_RING_DEPTH,
        num_warps=4,
    )
