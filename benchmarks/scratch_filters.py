# ruff: noqa
"""Scratch: thresholds by filters.py against a sort, then us a call beside the kernel before.

PYTHONPATH=contract:engine:. python benchmarks/scratch_filters.py [--quick] [--cuts 4096x8,4096x4,8192x8]
"""

import argparse
import sys
import time
from pathlib import Path

import torch
import triton
import triton.language as tl

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "engine")]
from mini_infer_engine.kernels import filters
from mini_infer_engine.kernels import sample as sampling
from mini_infer_engine.kernels.sizes import next_power_of_2
from tests.gpu import test_filters as checks
from tests.gpu.test_filters import Ask

VOCABULARY = 151_936


@triton.jit
def _ordered(values):
    """Integers that sort as these fp32 values do."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _unordered(ordered):
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


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
    """Program (row): suppressed logits to -inf, in place; the smallest to choose from, -inf where no filter is on."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    source = logits + row.to(tl.int64) * logits_stride
    if tl.load(output_indexes + slot) < tl.load(suppress_until + slot):
        tokens = tl.load(suppressed + slot * WIDTH + tl.arange(0, WIDTH))
        gone = tl.full((WIDTH,), float("-inf"), logits.dtype.element_ty)
        tl.store(source + tokens, gone, mask=(tokens >= 0) & (tokens < vocabulary))
        tl.debug_barrier()  # other threads read them
    inverse_temperature = tl.load(inverse_temperatures + slot)
    top_k = tl.load(top_ks + slot)
    top_p = tl.load(top_ps + slot)
    min_p = tl.load(min_ps + slot)
    threshold = float("-inf")
    if (inverse_temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0)):
        top = float("-inf")
        for start in range(0, vocabulary, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            values = tl.load(source + columns, mask=columns < vocabulary, other=float("-inf")).to(tl.float32)
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
                    kept = tl.where(values >= value, tl.exp((values - top) * inverse_temperature), 0.0)
                    found += tl.sum(kept, axis=0)
                if found >= wanted:
                    low = middle.to(tl.int32)
                else:
                    high = (middle - 1).to(tl.int32)
            threshold = tl.maximum(threshold, _unordered(low))
    tl.store(thresholds + row, threshold)


def old_thresholds(logits, slots, state):
    rows, vocabulary = logits.shape
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
        WIDTH=32,
        num_warps=16,
    )
    return thresholds


def graph_us(run, buffers, calls=20, replays=5):
    """Microseconds of one call, by replays of a graph of calls on one buffer after another."""
    for buffer in buffers:
        run(buffer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(calls):
            run(buffers[call % len(buffers)])
    times = []
    for _ in range(replays + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / calls * 1e3)
    return sorted(times[1:])[len(times[1:]) // 2]


def kernels_us(run, buffer):
    """Microseconds of each launch of one call, in order."""
    run(buffer)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(5):
            run(buffer)
        torch.cuda.synchronize()
    events = [e for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA and e.name.startswith("_")]
    events.sort(key=lambda e: e.time_range.start)
    calls = len(events) // 5
    return [
        (events[-calls + i].name[:9], min(events[c * calls + i].device_time for c in range(5))) for i in range(calls)
    ]


def check():
    asks = checks.ASKS
    state, slots = checks.state_of(asks), checks.slots_of(asks)
    wrong, differ, total, changed = [], 0, 0, 0
    for dtype in (torch.bfloat16, torch.float32):
        for shape in checks.SHAPES:
            logits = checks.make(shape, len(asks), VOCABULARY).to(dtype)
            new = filters.thresholds_of(logits, slots, state)
            again = filters.thresholds_of(logits.flip(0), slots.flip(0), state).flip(0)
            changed += int((new != again).sum())
            wrong += [f"{shape} {dtype} {line}" for line in checks.complaints(logits, asks, state, new)]
            old = old_thresholds(logits, slots, state)
            finite = logits > -torch.inf
            kept = [((logits.float() >= value[:, None]) & finite).sum(1) for value in (new, old)]
            differ += int((kept[0] != kept[1]).sum())
            total += len(asks)
    print(f"rows {total}: wrong {len(wrong)}, other tokens kept than before {differ}, changed by the batch {changed}")
    print("\n".join(wrong[:10]))


KINDS = [
    ("none", Ask()),
    ("min-p 0.05", Ask(min_p=0.05)),
    ("top-k 20", Ask(top_k=20)),
    ("top-p 0.8", Ask(top_p=0.8)),
    ("top-p 0.95", Ask(top_p=0.95)),
    ("k 20 p 0.8", Ask(top_k=20, top_p=0.8, temperature=0.7)),
]


def spread(rows, factor, dtype=torch.bfloat16):
    return [(torch.randn(rows, VOCABULARY, device="cuda") * factor).to(dtype) for _ in range(3 if rows == 256 else 1)]


def set_cut(cut):
    filters._PART, filters._PART_WARPS = map(int, cut.split("x"))


def times(cuts, quick):
    print(
        "us a call, thresholds alone; then all of sampling (first cut); peaked: nuclei are gathered first; flat: second"
    )
    print(" | ".join(["rows", "logits", "kind", "before", *cuts, "sample()"]))
    for rows in (1, 256) if quick else (1, 8, 32, 256):
        for name, factor in (("peaked", 4.0), ("flat", 0.5)):
            buffers = spread(rows, factor)
            for kind, ask in KINDS:
                asks = [ask] * rows
                state, slots = checks.state_of(asks), checks.slots_of(asks)
                cells = ["-"]
                if rows in (1, 256) and kind in ("top-k 20", "top-p 0.8", "k 20 p 0.8"):
                    cells = [f"{graph_us(lambda x: old_thresholds(x, slots, state), buffers, 6, 3):.0f}"]
                for cut in cuts:
                    set_cut(cut)
                    cells.append(f"{graph_us(lambda x: filters.thresholds_of(x, slots, state), buffers):.1f}")
                set_cut(cuts[0])
                cells.append(f"{graph_us(lambda x: sampling.sample(x, slots, state), buffers):.1f}")
                print(" | ".join([str(rows), name, kind, *cells]), flush=True)
    print("fp32 logits, first cut; vocabulary of 300 bf16")
    for rows in (1, 256):
        for kind, ask in KINDS[2:]:
            asks = [ask] * rows
            state, slots = checks.state_of(asks), checks.slots_of(asks)
            cells = []
            for factor in (4.0, 0.5):
                buffers = spread(rows, factor, torch.float32)
                cells.append(f"{graph_us(lambda x: filters.thresholds_of(x, slots, state), buffers):.1f}")
            small = [torch.randn(rows, 300, device="cuda").bfloat16()]
            cells.append(f"{graph_us(lambda x: filters.thresholds_of(x, slots, state), small):.1f}")
            print(" | ".join([str(rows), kind, "fp32 peaked, flat, small:", *cells]), flush=True)


def shares(cuts):
    set_cut(cuts[0])
    print("us of each launch")
    for rows in (1, 256):
        for name, factor, kind in (("peaked", 4.0, 5), ("flat", 0.5, 3), ("none", 0.5, 0)):
            asks = [KINDS[kind][1]] * rows
            state, slots = checks.state_of(asks), checks.slots_of(asks)
            found = kernels_us(lambda x: filters.thresholds_of(x, slots, state), spread(rows, factor)[0])
            print(rows, name, KINDS[kind][0], ", ".join(f"{kernel} {us:.1f}" for kernel, us in found), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--cuts", default="4096x8,4096x4,8192x8")
    options = parser.parse_args()
    cuts = options.cuts.split(",")
    torch.manual_seed(0)
    begin = time.perf_counter()
    check()
    print(f"{time.perf_counter() - begin:.0f} s", flush=True)
    with torch.inference_mode():
        times(cuts, options.quick)
        print(f"{time.perf_counter() - begin:.0f} s", flush=True)
        shares(cuts)
    print(f"{time.perf_counter() - begin:.0f} s")
