"""Choosing the next token of each row without a sort: greedy, or by Gumbel noise that only seed and position decide.

Top-k, top-p and min-p are one threshold a row, found by bisection over its ordered bits; the choice is then the
largest noisy logit above the threshold. The formulas are those of sampler.py, so that CPU and GPU choose alike.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.sizes import cdiv, next_power_of_2
from mini_infer_engine.kernels.workspace import Workspace

SUPPRESSED_WIDTH = 32
"""Token ids that one slot can suppress on the device (EOS and stop tokens before min_tokens)."""


@dataclass(slots=True)
class SamplingState:
    """What sampling needs of every slot, on the device; the extra last slot is that of padded rows."""

    last_tokens: torch.Tensor  # [slots] int64
    lengths: torch.Tensor  # [slots] int32, tokens in the KV cache
    noise_seeds: torch.Tensor  # [slots] int64, sampler.noise_base of the request's seed
    output_indexes: torch.Tensor  # [slots] int32
    inverse_temperatures: torch.Tensor  # [slots] fp32, 0: greedy
    top_ks: torch.Tensor  # [slots] int32, 0: off
    top_ps: torch.Tensor  # [slots] fp32, 1: off
    min_ps: torch.Tensor  # [slots] fp32, 0: off
    suppress_until: torch.Tensor  # [slots] int32, output index from which all tokens are allowed
    suppressed: torch.Tensor  # [slots, SUPPRESSED_WIDTH] int32, -1: none

    @classmethod
    def zeros(cls, slots: int, device: torch.device) -> "SamplingState":
        """Greedy rows of length 0."""

        def make(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros((slots, *shape), dtype=dtype, device=device)

        return cls(
            last_tokens=make(torch.int64),
            lengths=make(torch.int32),
            noise_seeds=make(torch.int64),
            output_indexes=make(torch.int32),
            inverse_temperatures=make(torch.float32),
            top_ks=make(torch.int32),
            top_ps=make(torch.float32) + 1,
            min_ps=make(torch.float32),
            suppress_until=make(torch.int32),
            suppressed=make(torch.int32, SUPPRESSED_WIDTH) - 1,
        )


@triton.jit
def _ordered(values):
    """Integers that sort as these fp32 values do."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _unordered(ordered):
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit
def _allowed(values, columns, suppressed, slot, active, WIDTH: tl.constexpr):
    if active:
        for index in range(WIDTH):
            banned = tl.load(suppressed + slot * WIDTH + index)
            values = tl.where(columns == banned, float("-inf"), values)
    return values


@triton.jit
def _threshold(
    logits,
    slots,
    inverse_temperatures,
    top_ks,
    top_ps,
    min_ps,
    output_indexes,
    suppress_until,
    suppressed,
    thresholds,
    vocabulary,
    logits_stride,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Program (row): the smallest logit that may be chosen, -inf where no filter is on."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    inverse_temperature = tl.load(inverse_temperatures + slot)
    top_k = tl.load(top_ks + slot)
    top_p = tl.load(top_ps + slot)
    min_p = tl.load(min_ps + slot)
    threshold = float("-inf")
    if (inverse_temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0)):
        suppress = tl.load(output_indexes + slot) < tl.load(suppress_until + slot)
        source = logits + row.to(tl.int64) * logits_stride
        top = float("-inf")
        for start in range(0, vocabulary, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            values = tl.load(source + columns, mask=columns < vocabulary, other=float("-inf")).to(tl.float32)
            values = _allowed(values, columns, suppressed, slot, suppress, WIDTH)
            top = tl.maximum(top, tl.max(values, axis=0))
        if min_p > 0:
            threshold = top + tl.log(min_p) / inverse_temperature
        highest = _ordered(top)
        if (top_k > 0) & (top_k < vocabulary):
            low = tl.full((), -2139095041, tl.int32)  # the ordered bits of -inf
            high = highest
            while low < high:  # the largest value that at least top_k logits reach
                middle = (low.to(tl.int64) + high.to(tl.int64) + 1) >> 1
                value = _unordered(middle.to(tl.int32))
                count = tl.zeros((), dtype=tl.int32)
                for start in range(0, vocabulary, BLOCK):
                    columns = start + tl.arange(0, BLOCK)
                    values = tl.load(source + columns, mask=columns < vocabulary, other=float("-inf")).to(tl.float32)
                    values = _allowed(values, columns, suppressed, slot, suppress, WIDTH)
                    count += tl.sum(((values >= value) & (columns < vocabulary)).to(tl.int32), axis=0)
                if count >= top_k:
                    low = middle.to(tl.int32)
                else:
                    high = (middle - 1).to(tl.int32)
            threshold = tl.maximum(threshold, _unordered(low))
        if top_p < 1:
            mass = tl.zeros((), dtype=tl.float32)
            for start in range(0, vocabulary, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                values = tl.load(source + columns, mask=columns < vocabulary, other=float("-inf")).to(tl.float32)
                values = _allowed(values, columns, suppressed, slot, suppress, WIDTH)
                kept = tl.where(values >= threshold, tl.exp((values - top) * inverse_temperature), 0.0)
                mass += tl.sum(kept, axis=0)
            wanted = mass * top_p
            low = tl.full((), -2139095041, tl.int32)
            high = highest
            while low < high:  # the largest value above which the wanted mass lies
                middle = (low.to(tl.int64) + high.to(tl.int64) + 1) >> 1
                value = tl.maximum(_unordered(middle.to(tl.int32)), threshold)
                found = tl.zeros((), dtype=tl.float32)
                for start in range(0, vocabulary, BLOCK):
                    columns = start + tl.arange(0, BLOCK)
                    values = tl.load(source + columns, mask=columns < vocabulary, other=float("-inf")).to(tl.float32)
                    values = _allowed(values, columns, suppressed, slot, suppress, WIDTH)
                    kept = tl.where(values >= value, tl.exp((values - top) * inverse_temperature), 0.0)
                    found += tl.sum(kept, axis=0)
                if found >= wanted:
                    low = middle.to(tl.int32)
                else:
                    high = (middle - 1).to(tl.int32)
            threshold = tl.maximum(threshold, _unordered(low))
    tl.store(thresholds + row, threshold)


@triton.jit
def _mix(bits):
    """The finaliser of splitmix64."""
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    return bits ^ (bits >> 31)


@triton.jit
def _choose(
    logits,
    slots,
    thresholds,
    last_tokens,
    lengths,
    noise_seeds,
    output_indexes,
    inverse_temperatures,
    suppress_until,
    suppressed,
    chosen,
    partial_values,
    partial_tokens,
    counters,
    vocabulary,
    logits_stride,
    spare_slot,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Program (row, part of the vocabulary). The part that arrives last picks the best and advances the slot."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    inverse_temperature = tl.load(inverse_temperatures + slot)
    output_index = tl.load(output_indexes + slot)
    suppress = output_index < tl.load(suppress_until + slot)
    threshold = tl.load(thresholds + row)
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    seed = tl.load(noise_seeds + slot).to(tl.uint64, bitcast=True)
    key = _mix(seed + output_index.to(tl.uint64) + golden)
    source = logits + row.to(tl.int64) * logits_stride
    best = tl.full((), float("-inf"), tl.float32)
    best_token = tl.full((), 0, tl.int32)
    size = tl.cdiv(tl.cdiv(vocabulary, BLOCK), SPLITS) * BLOCK
    for start in range(part * size, tl.minimum((part + 1) * size, vocabulary), BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(source + columns, mask=columns < vocabulary, other=float("-inf")).to(tl.float32)
        values = _allowed(values, columns, suppressed, slot, suppress, WIDTH)
        if inverse_temperature > 0:
            bits = _mix(key + columns.to(tl.uint64) * golden)
            uniform = (bits >> 11).to(tl.float32) * 1.1102230246251565e-16 + 5.551115123125783e-17
            series = uniform * (1.0 + uniform * (0.5 + uniform * (0.33333334 + uniform * 0.25)))
            noise = tl.where(uniform < 0.03, series, -tl.log(1.0 - uniform))  # -log1p(-uniform)
            noisy = values * inverse_temperature - tl.log(noise)
            values = tl.where(values >= threshold, noisy, float("-inf"))
        top, index = tl.max(values, axis=0, return_indices=True)
        if top > best:
            best = top
            best_token = start + index
    last = True
    if SPLITS > 1:
        tl.store(partial_values + row * SPLITS + part, best)
        tl.store(partial_tokens + row * SPLITS + part, best_token)
        tl.debug_barrier()
        last = tl.atomic_add(counters + row, 1, sem="acq_rel") == SPLITS - 1
        if last:
            parts = tl.arange(0, SPLITS)
            values = tl.load(partial_values + row * SPLITS + parts, cache_modifier=".cg")
            top, index = tl.max(values, axis=0, return_indices=True)
            best_token = tl.load(partial_tokens + row * SPLITS + index, cache_modifier=".cg")
            tl.store(counters + row, 0)
    if last:
        tl.store(chosen + row, best_token.to(tl.int64))
        if slot != spare_slot:
            tl.store(last_tokens + slot, best_token.to(tl.int64))
            tl.store(lengths + slot, tl.load(lengths + slot) + 1)
            tl.store(output_indexes + slot, output_index + 1)


def sample(logits: torch.Tensor, slots: torch.Tensor, state: SamplingState) -> torch.Tensor:
    """Choose [rows] int64 from logits [rows, vocabulary] and advance each slot: its last token, length, output index.

    The last slot of `state` is the padded rows': it never advances.
    """
    rows, vocabulary = logits.shape
    chosen = torch.empty(rows, dtype=torch.int64, device=logits.device)
    thresholds = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _threshold[(rows,)](
        logits,
        slots,
        state.inverse_temperatures,
        state.top_ks,
        state.top_ps,
        state.min_ps,
        state.output_indexes,
        state.suppress_until,
        state.suppressed,
        thresholds,
        vocabulary,
        logits.stride(0),
        BLOCK=min(8192, next_power_of_2(vocabulary)),
        WIDTH=SUPPRESSED_WIDTH,
        num_warps=16,
    )
    block = min(2048, next_power_of_2(vocabulary))
    splits = min(64, next_power_of_2(max(1, min(cdiv(vocabulary, block), 1056 // rows))))
    partial_values = torch.empty((rows, splits), dtype=torch.float32, device=logits.device)
    partial_tokens = torch.empty((rows, splits), dtype=torch.int32, device=logits.device)
    _choose[(rows, splits)](
        logits,
        slots,
        thresholds,
        state.last_tokens,
        state.lengths,
        state.noise_seeds,
        state.output_indexes,
        state.inverse_temperatures,
        state.suppress_until,
        state.suppressed,
        chosen,
        partial_values,
        partial_tokens,
        Workspace.of(logits.device, partials=0).counters,
        vocabulary,
        logits.stride(0),
        state.last_tokens.shape[0] - 1,
        BLOCK=block,
        WIDTH=SUPPRESSED_WIDTH,
        SPLITS=splits,
        num_warps=4,
    )
    return chosen
