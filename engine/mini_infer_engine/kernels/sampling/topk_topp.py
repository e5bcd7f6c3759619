"""Top-k, top-p (nucleus sampling: Holtzman et al., arXiv:1904.09751) and min-p (arXiv:2407.01082) without a sort:
computes the smallest logit that they keep in each row, applied in the order min-p, top-k, top-p, as the reference does.

The filters nearly always keep at most a few thousand tokens. 1. An evenly spaced sample of a row estimates which logit
about RANK tokens reach. 2. One pass over the row gathers the logits that reach it, and sums the row's softmax weights.
3. The threshold is found among the gathered logits by bisection. If the probability mass of top-p reaches deeper, the
sample provides bounds on the threshold, and 2. and 3. are repeated once for the logits between them. If that fails too,
the row itself is searched, slowly.

Equal logits give bitwise equal thresholds: parts of a row have one size, and gathered logits come in any order but are
summed in integers.
"""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.sampling.sampling_state import SUPPRESSED_WIDTH, SamplingState
from mini_infer_engine.kernels.sizes import LOG2_E, cdiv, next_power_of_2

_CAPACITY_TOKENS = (4096, 16384)
"""Tokens of a row for which the first and the second gathering have room. Smaller vocabularies need no sample."""
_RANK_TOKENS = 2048
"""Tokens to gather first: few, but enough for usual values of top-k and for most nuclei."""
_SAMPLE_TOKENS = 8192
"""Tokens of the sample: its estimate of a rank near _RANK_TOKENS is off by a tenth, at most by a half."""
_PART_TOKENS = 4096
"""Tokens of a row that one program reads."""
_PART_WARPS = 8
_RUN_TOKENS = 8
"""Tokens that a thread reads at once."""

_LOG2_E: tl.constexpr = tl.constexpr(LOG2_E)
_ONE: tl.constexpr = tl.constexpr(float(1 << 44))
"""The weight of the best token, as an integer: sums of 2^18 fit, with a smaller loss than that of fp32 sums."""
_DEVIATIONS: tl.constexpr = tl.constexpr(5.0)
"""Standard deviations of the sample's estimate within which the threshold must be: one row in a million is outside."""
_FINITE: tl.constexpr = tl.constexpr(-3e38)
"""The logit that all tokens reach that may be chosen at all."""
_FLOOR: tl.constexpr = tl.constexpr(-1e30)
"""The value that replaces -inf where a maximum is subtracted."""


@triton.jit
def _ordered(value, SHIFT: tl.constexpr):
    """Returns integers that sort like these fp32 values, without their last SHIFT bits."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> SHIFT


@triton.jit
def _unordered(ordered, SHIFT: tl.constexpr):
    """Returns the fp32 values of these integers, whose last SHIFT bits are 0."""
    bits = ordered << SHIFT
    return tl.where(bits < 0, (bits | ((1 << SHIFT) - 1)) ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _middle(low, high):
    return ((low.to(tl.int64) + high.to(tl.int64) + 1) >> 1).to(tl.int32)


@triton.jit
def _last_to_reach(values, amounts, target, low, high, SHIFT: tl.constexpr):
    """Bisects for the largest ordered value in (low, high] at which the amounts of no smaller values reach `target`.

    Returns `low` if there is none.
    """
    while low < high:
        middle = _middle(low, high)
        if tl.sum(tl.where(values >= _unordered(middle, SHIFT), amounts, 0), axis=0) >= target:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _weights(values, row_max, scale):
    """Returns softmax weights relative to the row's maximum, rounded alike for all values, so that weights compare."""
    return tl.exp2(tl.fma(values, scale, -row_max * scale))


@triton.jit
def _sampled(source, vocabulary, SAMPLE: tl.constexpr):
    """Loads runs of 8 logits, evenly spaced: a thread reads a run at once."""
    places = tl.arange(0, SAMPLE)
    columns = (places // 8) * (vocabulary // 8) // (SAMPLE // 8) * 8 + places % 8
    return tl.load(source + columns, mask=columns < vocabulary, other=float("-inf")).to(tl.float32)


@triton.jit
def _parameters_of(slots, inverse_temperatures, top_ks, top_ps, min_ps, row):
    """Loads a row's slot, inverse temperature, top-k, top-p and min-p."""
    slot = tl.load(slots + row).to(tl.int64)
    return (
        slot,
        tl.load(inverse_temperatures + slot),
        tl.load(top_ks + slot),
        tl.load(top_ps + slot),
        tl.load(min_ps + slot),
    )


@triton.jit
def _min_p_threshold(row_max, min_p, inverse_temperature):
    """Returns min-p's threshold, or -inf without min-p."""
    floor = float("-inf")
    if min_p > 0:
        floor = row_max + tl.log(min_p) / inverse_temperature
    return floor


@triton.jit
def _begin(
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
    counts,
    brackets,
    vocabulary,
    logits_stride,
    WIDTH: tl.constexpr,
    SAMPLE: tl.constexpr,
    RANK: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Begins with one program per row: suppresses logits in place, and estimates the smallest logit to gather.

    `counts`, [rows] int32: tokens gathered, -1 if the threshold is known, as without any filter. `brackets`, [rows, 3]
    fp32: the smallest logit to gather, the smallest above those, and min-p's threshold.
    """
    row = tl.program_id(0)
    slot, inverse_temperature, top_k, top_p, min_p = _parameters_of(
        slots, inverse_temperatures, top_ks, top_ps, min_ps, row
    )
    source = logits + row.to(tl.int64) * logits_stride
    ranked = ((top_k > 0) & (top_k < vocabulary)) | (top_p < 1)
    filtered = (inverse_temperature > 0) & (ranked | (min_p > 0))
    if tl.load(output_indexes + slot) < tl.load(suppress_until + slot):
        tokens = tl.load(suppressed + slot * WIDTH + tl.arange(0, WIDTH))
        suppressed_logits = tl.full((WIDTH,), float("-inf"), logits.dtype.element_ty)
        tl.store(source + tokens, suppressed_logits, mask=(tokens >= 0) & (tokens < vocabulary))
        tl.debug_barrier()  # other threads read them
    if filtered:
        low = float("inf")  # min-p needs the best logit only
        if ranked:
            low = float("-inf")
            if vocabulary > CAPACITY:
                values = _sampled(source, vocabulary, SAMPLE)
                max_above = (SAMPLE * RANK) // vocabulary
                lowest = _ordered(tl.full((), float("-inf"), tl.float32), 16)
                highest = _ordered(tl.max(values, axis=0), 16)
                ones = tl.full((SAMPLE,), 1, tl.int32)
                low = _unordered(_last_to_reach(values, ones, max_above + 1, lowest, highest, 16) + 1, 16)
        tl.store(brackets + row * 3, low)
        tl.store(counts + row, 0)
    else:
        tl.store(counts + row, -1)
        tl.store(thresholds + row, float("-inf"))


@triton.jit
def _sum_all(values):
    return tl.sum(tl.sum(tl.sum(values, axis=2), axis=1), axis=0)


@triton.jit
def _max_all(values):
    return tl.max(tl.max(tl.max(values, axis=2), axis=1), axis=0)


@triton.jit
def _gather(
    logits,
    slots,
    inverse_temperatures,
    counts,
    brackets,
    partials,
    gathered,
    vocabulary,
    logits_stride,
    PART: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    CAPACITY: tl.constexpr,
    WIDTH: tl.constexpr,
    AGAIN: tl.constexpr,
    RUN: tl.constexpr,
    RUNS: tl.constexpr,
):
    """Gathers logits inside the bracket, in any order, and sums weights into `partials`: one program per (row, part).

    `partials`, [rows, 3, parts] fp32: the part's best logit, the weights relative to it that reach min-p's threshold,
    and those above the bracket. The first time, no logit is below the one or above the other.
    """
    row = tl.program_id(0)
    part = tl.program_id(1)
    if tl.load(counts + row) < 0:
        return
    scale = tl.load(inverse_temperatures + tl.load(slots + row).to(tl.int64)) * _LOG2_E
    threads = tl.arange(0, PART // (RUN * RUNS))
    within = threads[:, None, None] * RUN + tl.arange(0, RUN)[None, None, :]
    within += tl.arange(0, RUNS)[None, :, None] * (PART // RUNS)
    tokens = part * PART + within
    source = logits + row.to(tl.int64) * logits_stride
    loaded = tl.load(source + tokens, mask=tokens < vocabulary, other=float("-inf"))
    values = loaded.to(tl.float32)
    row_max = tl.maximum(_max_all(values), _FLOOR)
    weights = _weights(values, row_max, scale)
    results = partials + row.to(tl.int64) * 3 * MAX_PARTS + part
    in_bracket = values >= tl.load(brackets + row * 3)
    if AGAIN:
        high = tl.load(brackets + row * 3 + 1)
        in_bracket = in_bracket & (values < high)
        tl.store(results + 2 * MAX_PARTS, _sum_all(tl.where(values >= high, weights, 0.0)))
        weights = tl.where(values >= tl.load(brackets + row * 3 + 2), weights, 0.0)
    tl.store(results, row_max)
    tl.store(results + MAX_PARTS, _sum_all(weights))
    ranks = tl.cumsum(in_bracket.to(tl.int32), axis=2)
    in_runs = tl.sum(in_bracket.to(tl.int32), axis=2)
    in_threads = tl.sum(in_runs, axis=1)
    count = tl.sum(in_threads, axis=0)
    if count > 0:
        start = tl.atomic_add(counts + row, count, sem="relaxed")
        if start + count <= CAPACITY:
            firsts = start + tl.cumsum(in_threads, axis=0) - in_threads - 1
            places = (firsts[:, None] + tl.cumsum(in_runs, axis=1) - in_runs)[:, :, None] + ranks
            tl.store(gathered + row.to(tl.int64) * WIDTH + places, loaded, mask=in_bracket)


@triton.jit
def _search(
    logits,
    slots,
    inverse_temperatures,
    top_ks,
    top_ps,
    min_ps,
    thresholds,
    counts,
    vocabulary,
    logits_stride,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Finds remaining thresholds by bisection over the row itself, which each step reads once: one program per row."""
    row = tl.program_id(0)
    if tl.load(counts + row) < 0:
        return
    _slot, inverse_temperature, top_k, top_p, min_p = _parameters_of(
        slots, inverse_temperatures, top_ks, top_ps, min_ps, row
    )
    scale = inverse_temperature * _LOG2_E
    source = logits + row.to(tl.int64) * logits_stride
    row_max = float("-inf")
    for start in range(0, vocabulary, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        values = tl.load(source + offsets, mask=offsets < vocabulary, other=float("-inf")).to(tl.float32)
        row_max = tl.maximum(row_max, tl.max(values, axis=0))
    threshold = _min_p_threshold(row_max, min_p, inverse_temperature)
    lowest = _ordered(tl.full((), float("-inf"), tl.float32), SHIFT)
    if (top_k > 0) & (top_k < vocabulary):
        low = lowest
        high = _ordered(row_max, SHIFT)
        while low < high:
            middle = _middle(low, high)
            value = _unordered(middle, SHIFT)
            count = tl.zeros((), tl.int32)
            for start in range(0, vocabulary, BLOCK):
                offsets = start + tl.arange(0, BLOCK)
                values = tl.load(source + offsets, mask=offsets < vocabulary, other=float("-inf")).to(tl.float32)
                count += tl.sum((values >= value).to(tl.int32), axis=0)
            if count >= top_k:
                low = middle
            else:
                high = middle - 1
        threshold = tl.maximum(threshold, _unordered(low, SHIFT))
    if top_p < 1:
        mass = _mass(source, vocabulary, threshold, row_max, scale, BLOCK)
        low = lowest
        high = _ordered(row_max, SHIFT)
        while low < high:
            middle = _middle(low, high)
            value = tl.maximum(_unordered(middle, SHIFT), threshold)
            if _mass(source, vocabulary, value, row_max, scale, BLOCK) >= mass * top_p:
                low = middle
            else:
                high = middle - 1
        threshold = tl.maximum(threshold, _unordered(low, SHIFT))
    tl.store(thresholds + row, threshold)


@triton.jit
def _mass(source, vocabulary, value, row_max, scale, BLOCK: tl.constexpr):
    """Sums a row's softmax weights whose logits reach `value`."""
    mass = tl.zeros((), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(source + columns, mask=columns < vocabulary, other=float("-inf")).to(tl.float32)
        mass += tl.sum(tl.where(values >= value, _weights(values, row_max, scale), 0.0), axis=0)
    return mass


@triton.jit
def _error(sample, weights, value, weight):
    """Returns the error of the estimated mass at `value`: of a ratio of sums, and of a few single tokens."""
    reaching = tl.where(sample >= value, weights, 0.0)
    below = weights - reaching
    fraction = tl.sum(reaching, axis=0) / tl.maximum(tl.sum(weights, axis=0), 1e-30)
    above = (1 - fraction) * (1 - fraction) * tl.sum(reaching * reaching, axis=0)
    return _DEVIATIONS * (tl.sqrt(above + fraction * fraction * tl.sum(below * below, axis=0)) + weight)


@triton.jit
def _resolve(
    logits,
    slots,
    inverse_temperatures,
    top_ks,
    top_ps,
    min_ps,
    thresholds,
    counts,
    brackets,
    partials,
    gathered,
    vocabulary,
    logits_stride,
    PARTS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    CAPACITY: tl.constexpr,
    WIDTH: tl.constexpr,
    SAMPLE: tl.constexpr,
    SHIFT: tl.constexpr,
    AGAIN: tl.constexpr,
):
    """Computes the threshold from the gathered logits; if that fails the first time, the bracket of the second.

    There is one program per row.
    """
    row = tl.program_id(0)
    count = tl.load(counts + row)
    if count < 0:
        return
    _slot, inverse_temperature, top_k, top_p, min_p = _parameters_of(
        slots, inverse_temperatures, top_ks, top_ps, min_ps, row
    )
    scale = inverse_temperature * _LOG2_E
    source = logits + row.to(tl.int64) * logits_stride

    # 1. Reduce the parts' maxima and sums.
    parts = tl.arange(0, MAX_PARTS)
    results = partials + row.to(tl.int64) * 3 * MAX_PARTS + parts
    part_maxima = tl.load(results, mask=parts < PARTS, other=_FLOOR)
    row_max = tl.max(part_maxima, axis=0)
    exponents = tl.where(
        parts < PARTS, part_maxima * scale, _FLOOR
    )  # rounded before they are subtracted, as in _weights
    scales = tl.exp2(exponents - tl.max(exponents, axis=0))
    mass = tl.sum(scales * tl.load(results + MAX_PARTS, mask=parts < PARTS, other=0.0), axis=0)
    floor = _min_p_threshold(row_max, min_p, inverse_temperature)
    low = tl.load(brackets + row * 3)
    highest = _ordered(row_max, SHIFT)
    above = tl.zeros((), tl.int64)
    if AGAIN:
        highest = tl.minimum(highest, _ordered(tl.load(brackets + row * 3 + 1), SHIFT))
        part_masses = tl.load(results + 2 * MAX_PARTS, mask=parts < PARTS, other=0.0)
        above += (tl.sum(scales * part_masses, axis=0) * _ONE).to(tl.int64)
    offs_gathered = tl.arange(0, CAPACITY)
    values = tl.load(gathered + row.to(tl.int64) * WIDTH + offs_gathered).to(tl.float32)
    values = tl.where(offs_gathered < count, values, float("-inf"))

    # 2. The threshold.
    has_top_k = (top_k > 0) & (top_k < vocabulary)
    known = count <= CAPACITY
    threshold = floor
    gathered_mass = tl.zeros((), tl.int64)
    if has_top_k:
        known = known & ((count >= top_k) | (low < _FINITE))
        ones = tl.full((CAPACITY,), 1, tl.int32)
        lowest = _ordered(low, SHIFT)
        found = _last_to_reach(values, ones, top_k, lowest, highest, SHIFT)
        threshold = tl.maximum(threshold, _unordered(found, SHIFT))
    if top_p < 1:
        weights = tl.where(values >= threshold, _weights(values, row_max, scale), 0.0)
        amounts = (weights * _ONE + 0.5).to(tl.int64)
        gathered_mass += tl.sum(amounts, axis=0)
        all_gathered = (threshold >= low) | (low < _FINITE)
        if AGAIN:
            known = known & (has_top_k == 0)
        else:
            all_gathered = all_gathered | has_top_k
            known = known & (all_gathered | (min_p <= 0))  # else what min-p leaves is not known
            mass = tl.where(all_gathered, gathered_mass.to(tl.float32) * (1.0 / _ONE), mass)
        target = tl.maximum((mass * top_p * _ONE).to(tl.int64), 1) - above
        known = known & (target > 0) & (all_gathered | (gathered_mass >= target))
        if known:
            lowest = _ordered(low, SHIFT)
            found = _last_to_reach(values, amounts, target, lowest, highest, SHIFT)
            threshold = tl.maximum(threshold, _unordered(found, SHIFT))

    # 3. Where it is not known, the bracket of the second gathering; after that, `_search` finds it.
    if not AGAIN:  # noqa: SIM102  # decided when it is compiled, the inner one for each row
        if known == 0:
            next_low = float("inf")
            next_high = float("inf")
            if (has_top_k == 0) & (count <= CAPACITY):
                sample = _sampled(source, vocabulary, SAMPLE)
                weights = tl.where(sample < low, _weights(sample, row_max, scale), 0.0)
                mass_gathered = gathered_mass.to(tl.float32) * (1.0 / _ONE)
                ratio = (mass - mass_gathered) / tl.maximum(tl.sum(weights, axis=0), 1e-30)  # of the row to the sample
                weights = tl.where(sample >= floor, weights, 0.0)
                target_left = top_p * tl.sum(weights, axis=0) - (1 - top_p) * mass_gathered / ratio
                lowest = _ordered(tl.full((), float("-inf"), tl.float32), 16)
                highest = _ordered(low, 16)
                near = _unordered(_last_to_reach(sample, weights, target_left, lowest, highest, 16), 16)
                error = _error(sample, weights, near, _weights(tl.maximum(near, _FLOOR), row_max, scale))
                found = _last_to_reach(sample, weights, target_left + error, lowest, highest, 16)
                next_low = tl.maximum(_unordered(found, 16), floor)
                if target_left > error:
                    found = _last_to_reach(sample, weights, target_left - error, lowest, highest, 16)
                    next_high = _unordered(found + 1, 16)
            tl.store(brackets + row * 3, next_low)
            tl.store(brackets + row * 3 + 1, next_high)
            tl.store(brackets + row * 3 + 2, floor)
    tl.store(counts + row, tl.where(known, -1, 0))
    tl.store(thresholds + row, threshold)


def topk_topp_thresholds(logits: torch.Tensor, slots: torch.Tensor, state: SamplingState) -> torch.Tensor:
    """Returns thresholds [rows] fp32 of logits [rows, vocabulary], -inf without filters; suppresses tokens in place."""
    rows, vocabulary = logits.shape
    parts = cdiv(vocabulary, _PART_TOKENS)
    max_parts = next_power_of_2(parts)
    width = _CAPACITY_TOKENS[-1]
    thresholds = torch.empty(rows, dtype=torch.float32, device=logits.device)
    counts = torch.empty(rows, dtype=torch.int32, device=logits.device)
    brackets = torch.empty((rows, 3), dtype=torch.float32, device=logits.device)
    partials = torch.empty((rows, 3, max_parts), dtype=torch.float32, device=logits.device)
    gathered = torch.empty((rows, width), dtype=logits.dtype, device=logits.device)
    parameters = (logits, slots, state.inverse_temperatures, state.top_ks, state.top_ps, state.min_ps)
    shift = 16 if logits.dtype == torch.bfloat16 else 0  # bits of an ordered value that are always 0
    _begin[(rows,)](
        *parameters,
        state.output_indexes,
        state.suppress_until,
        state.suppressed,
        thresholds,
        counts,
        brackets,
        vocabulary,
        logits.stride(0),
        WIDTH=SUPPRESSED_WIDTH,
        SAMPLE=_SAMPLE_TOKENS,
        RANK=_RANK_TOKENS,
        CAPACITY=_CAPACITY_TOKENS[0],
        num_warps=16,
    )
    for again, capacity in enumerate(_CAPACITY_TOKENS):
        _gather[(rows, parts)](
            logits,
            slots,
            state.inverse_temperatures,
            counts,
            brackets,
            partials,
            gathered,
            vocabulary,
            logits.stride(0),
            PART=_PART_TOKENS,
            MAX_PARTS=max_parts,
            CAPACITY=capacity,
            WIDTH=width,
            AGAIN=again == 1,
            RUN=_RUN_TOKENS,
            RUNS=_PART_TOKENS // (_PART_WARPS * 32 * _RUN_TOKENS),
            num_warps=_PART_WARPS,
        )
        _resolve[(rows,)](
            *parameters,
            thresholds,
            counts,
            brackets,
            partials,
            gathered,
            vocabulary,
            logits.stride(0),
            PARTS=parts,
            MAX_PARTS=max_parts,
            CAPACITY=capacity,
            WIDTH=width,
            SAMPLE=_SAMPLE_TOKENS,
            SHIFT=shift,
            AGAIN=again == 1,
            num_warps=32 if again else 16,
            maxnreg=64,  # without spills; two rows an SM the first time
        )
    _search[(rows,)](
        *parameters,
        thresholds,
        counts,
        vocabulary,
        logits.stride(0),
        BLOCK=8192,
        SHIFT=shift,
        num_warps=16,
    )
    return thresholds
