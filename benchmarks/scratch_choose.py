# ruff: noqa
"""Scratch: the old sampling kernels against the new, choices against the CPU's, and the gap between decode steps.

python benchmarks/scratch_choose.py [--no-engine] [--programs 1056,2112] [--warps ...]   (about 40 s on a GPU)
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parent))
from mini_infer_engine.batch import Row
from mini_infer_engine.kernels import sample as new
from mini_infer_engine.kernels.sample import _mix, _ordered, _unordered
from mini_infer_engine.kernels.sizes import cdiv, next_power_of_2
from mini_infer_engine.kernels.workspace import Workspace
from mini_infer_engine.request import SamplingParams
from mini_infer_engine.sampler import build_sampling
from mini_infer_engine.sampler import sample as cpu_sample
from mini_infer_engine.slots import SlotTable

VOCABULARY = 151_936
WIDTH = 32


@triton.jit
def _allowed(values, columns, suppressed, slot, active, WIDTH: tl.constexpr):
    if active:
        for index in range(WIDTH):
            banned = tl.load(suppressed + slot * WIDTH + index)
            values = tl.where(columns == banned, float("-inf"), values)
    return values


@triton.jit
def _old_threshold(
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
def _old_choose(
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


def old_sample(logits: torch.Tensor, slots: torch.Tensor, state: new.SamplingState) -> torch.Tensor:
    """Choose [rows] int64 from logits [rows, vocabulary] and advance each slot: its last token, length, output index.

    The last slot of `state` is the padded rows': it never advances.
    """
    rows, vocabulary = logits.shape
    chosen = torch.empty(rows, dtype=torch.int64, device=logits.device)
    thresholds = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _old_threshold[(rows,)](
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
        WIDTH=WIDTH,
        num_warps=16,
    )
    block = min(2048, next_power_of_2(vocabulary))
    splits = min(64, next_power_of_2(max(1, min(cdiv(vocabulary, block), 1056 // rows))))
    partial_values = torch.empty((rows, splits), dtype=torch.float32, device=logits.device)
    partial_tokens = torch.empty((rows, splits), dtype=torch.int32, device=logits.device)
    _old_choose[(rows, splits)](
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
        WIDTH=WIDTH,
        SPLITS=splits,
        num_warps=4,
    )
    return chosen


def make(rows, params, seeds=7919):
    table = SlotTable(rows, 4, 0, torch.device("cuda", 0))
    asked = [Row(slot, 10, 1, [0], [0], params, noise_seed=slot * seeds + 5) for slot in range(rows)]
    table.begin(asked)
    return table, asked, torch.arange(rows, dtype=torch.int32, device="cuda")


def graph_us(run, buffers, replays=5):
    """Microseconds of one call, by replays of a graph of calls on one buffer after another."""
    for buffer in buffers:
        run(buffer)
    calls = max(20, len(buffers))
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


def choices():
    print("choices against the CPU's: wrong of all")
    kinds = [
        ("temperature 1", SamplingParams(temperature=1.0)),
        ("temperature 0.6", SamplingParams(temperature=0.6)),
        ("top-p 0.95", SamplingParams(temperature=0.8, top_p=0.95)),
        ("greedy", SamplingParams(temperature=0.0)),
    ]
    for name, params in kinds:
        for spread in (0.5, 4.0):
            rows, wrong, total = 64, 0, 0
            table, _, slots = make(rows, params)
            for step in range(4):
                logits = (torch.randn(rows, VOCABULARY, device="cuda") * spread).bfloat16()
                asked = [Row(slot, 10, 1, [0], [0], params, slot * 7919 + 5, step) for slot in range(rows)]
                host = logits.float().cpu()
                expected = cpu_sample(host, build_sampling(asked, VOCABULARY, torch.device("cpu")))
                new.sample(logits, slots, table.state, filtered=table.has_filters(slots.tolist()))
                torch.cuda.synchronize()
                got = table.state.on_host[:rows, step % new.TOKENS_KEPT]
                wrong += int((got != expected).sum())
                total += rows
            print(f"  {name}, logits' spread {spread}: {wrong} of {total}")


def draws():
    """Frequencies on the device by chi-square: 8 buckets of near equal mass of a large vocabulary."""
    rows, steps, vocabulary = 1024, 20, 20_003
    logits = torch.randn(1, vocabulary, device="cuda") * 2
    shares = logits.double().softmax(-1)[0]
    table, _, slots = make(rows, SamplingParams(temperature=1.0), seeds=1)
    counts = torch.zeros(vocabulary, dtype=torch.float64, device="cuda")
    wide = logits.expand(rows, -1).contiguous()
    for _ in range(steps):
        new.sample(wide, slots, table.state, filtered=False)
        counts += torch.bincount(table.state.last_tokens[:rows], minlength=vocabulary)
    expected = shares * rows * steps
    single = expected >= 5
    observed = torch.cat((counts[single], counts[~single].sum()[None]))
    wanted = torch.cat((expected[single], expected[~single].sum()[None]))
    degrees = len(observed) - 1
    value = float(((observed - wanted) ** 2 / wanted).sum())
    print(f"chi-square of {rows * steps} draws: {(value - degrees) / (2 * degrees) ** 0.5:+.1f} sigma")


def times(programs):
    print(f"us a call by {torch.cuda.get_device_name()}; read: bf16 logits at 4.3 TB/s")
    head = ["rows", "kind", "logits", "read", "old"] + [f"new {count}" for count in programs]
    head += [f"new {count} always filtering" for count in programs[:1]]
    print(" | ".join(head))
    for rows in (1, 8, 32, 256):
        copies = 3 if rows == 256 else 1
        for shape, spread in (("flat", 0.5), ("peaked", 4.0)):
            buffers = [(torch.randn(rows, VOCABULARY, device="cuda") * spread).bfloat16() for _ in range(copies)]
            for name, params in (
                ("greedy", SamplingParams(temperature=0.0)),
                ("0.6", SamplingParams(temperature=0.6)),
                ("0.6 top-p", SamplingParams(temperature=0.6, top_p=0.95)),
            ):
                if shape == "peaked" and name == "greedy":
                    continue
                table, _, slots = make(rows, params)
                filtered = params.top_p < 1
                cells = [f"{rows * VOCABULARY * 2 / 4.3e6:.1f}"]
                cells.append(f"{graph_us(lambda x: old_sample(x, slots, table.state), buffers):.1f}")
                for count in programs:
                    new._PROGRAMS = count
                    us = graph_us(lambda x: new.sample(x, slots, table.state, filtered=filtered), buffers)
                    cells.append(f"{us:.1f}")
                new._PROGRAMS = programs[0]
                cells.append(f"{graph_us(lambda x: new.sample(x, slots, table.state), buffers):.1f}")
                print(" | ".join([str(rows), name, shape, *cells]), flush=True)


def step_gap():
    from common.models import model_folder
    from mini_infer_engine import LLM
    from mini_infer_engine.graph_runner import GraphRunner

    handle_without_copy = GraphRunner._handle

    def handle_with_copy(self, rows):
        """What the runner did: tokens to fresh pinned memory, in the stream of the passes."""
        tokens = self.table.state.last_tokens[: len(rows)]
        on_host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        on_host.copy_(tokens, non_blocking=True)
        self._kept = on_host
        return handle_without_copy(self, rows)

    with tempfile.TemporaryDirectory() as folder:
        model = str(model_folder("qwen3-0.6b", Path(folder)))
        llm = LLM(
            model, load_format="dummy", skip_tokenizer_init=True, max_model_len=4096, max_num_seqs=256,
            kv_cache_memory=1 << 34,
        )  # fmt: skip

    def itl_us(batch, temperature, tokens=300):
        asks = SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=tokens)
        short = SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=1)
        prompts = [{"prompt_token_ids": [index % 1000 + 7] * 16} for index in range(batch)]
        begin = time.perf_counter()
        llm.generate(prompts, short, use_tqdm=False)
        middle = time.perf_counter()
        llm.generate(prompts, asks, use_tqdm=False)
        return (time.perf_counter() - 2 * middle + begin) / (tokens - 1) * 1e6

    print("inter-token us of 0.6B: batch | temperature | with the copy | without | without, filters' kernel kept")
    has_filters = SlotTable.has_filters
    for batch, temperature in ((1, 0.0), (1, 0.6), (32, 0.6), (256, 0.6)):
        found = {}
        for turn in range(4):
            for name, handle, filters in (
                ("copy", handle_with_copy, has_filters),
                ("none", handle_without_copy, has_filters),
                ("kept", handle_without_copy, lambda *_: True),
            ):
                GraphRunner._handle, SlotTable.has_filters = handle, filters
                value = itl_us(batch, temperature, 300 if batch < 256 else 100)
                if turn:
                    found.setdefault(name, []).append(value)
        GraphRunner._handle, SlotTable.has_filters = handle_without_copy, has_filters
        print(" | ".join([str(batch), str(temperature), *(f"{min(found[k]):.1f}" for k in ("copy", "none", "kept"))]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-engine", action="store_true")
    parser.add_argument("--programs", default="1056,528,2112")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(8)
    begin = time.perf_counter()
    choices()
    draws()
    with torch.inference_mode():
        times([int(count) for count in options.programs.split(",")])
    print(f"{time.perf_counter() - begin:.0f} s")
    if not options.no_engine:
        step_gap()
    print(f"{time.perf_counter() - begin:.0f} s")
