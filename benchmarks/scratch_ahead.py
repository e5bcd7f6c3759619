"""First trial of ahead_linear on a GPU (not for keeping): correctness, search by product, whole decode chain, prefill.

PYTHONPATH=contract:engine python benchmarks/scratch_ahead.py [--parts check,search,chain | --parts prefill]
"""

import argparse
import ctypes
import dataclasses
import functools
import gc
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
from torch.nn import functional

T0 = time.monotonic()
SUMMARY = []


def say(*words, keep=False):
    line = " ".join(str(word) for word in words)
    print(f"[{time.monotonic() - T0:5.1f}] {line}", flush=True)
    if keep:
        SUMMARY.append(line)


@dataclasses.dataclass(frozen=True)
class Shape:
    columns: int
    width: int
    gated: bool = False
    then: bool = False
    bias: bool = False

    @property
    def weight_rows(self):
        return self.columns * (2 if self.gated else 1)

    @property
    def bytes(self):
        return self.weight_rows * self.width * 2


MODELS = {
    "0.6b": ("qwen3-0.6b", {
        "qkv": Shape(4096, 1024), "o": Shape(1024, 2048, then=True), "gate_up": Shape(3072, 1024, gated=True),
        "down": Shape(1024, 3072, then=True)}),
    "1.5b": ("qwen2.5-1.5b", {
        "qkv": Shape(2048, 1536, bias=True), "o": Shape(1536, 1536, then=True),
        "gate_up": Shape(8960, 1536, gated=True), "down": Shape(1536, 8960, then=True)}),
}
SEVEN = {
    "qkv": Shape(4608, 3584, bias=True), "o": Shape(3584, 3584, then=True), "gate_up": Shape(18944, 3584, gated=True),
    "down": Shape(3584, 18944, then=True)}
ODD = {"plain": Shape(1001, 1088, bias=True), "gated": Shape(1001, 1088, gated=True), "then": Shape(199, 64, then=True),
       "wide": Shape(120, 4160, then=True, bias=True)}
HIDDEN = {"0.6b": 1024, "1.5b": 1536}
LAYERS = 28
CHAIN_ROWS = (1, 8, 32)
POSITION = 600


def tile_rows(rows):
    return 8 if rows <= 8 else 16 if rows <= 16 else 32 if rows <= 32 else 64


def random(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def product(shape, rows, parts=0, fill=random):
    """A call (weight, config) as the chain makes it; parts: of the sums of squares of a half-normed input."""
    from mini_infer_engine.kernels.skinny_cut import HalfNormed
    from mini_infer_engine.kernels.skinny_linear import skinny_linear, skinny_linear_then_norm

    x = fill(rows, shape.width)
    bias = fill(shape.columns) if shape.bias else None
    if shape.then:
        residual, norm = fill(rows, shape.columns), fill(shape.columns)
        call = lambda weight, config: skinny_linear_then_norm(  # noqa: E731
            x, weight, config, bias=bias, residual=residual, norm_weight=norm, eps=1e-6)
        call.inputs = (x, bias, residual, norm)
        return call
    values = x
    if parts:
        stride = max(16, 1 << (rows - 1).bit_length())
        values = HalfNormed(x, torch.rand(parts, stride, device="cuda") * shape.width / parts, 1e-6)
    call = lambda weight, config: skinny_linear(values, weight, config, bias=bias, gated=shape.gated)  # noqa: E731
    call.inputs = (values, bias, None, None)
    return call


def empty(*shape):
    return torch.empty(shape, device="cuda", dtype=torch.bfloat16)


def attend_once(model, rows, ahead):
    from mini_infer_engine.kernels.decode_attention import decode_attention
    from mini_infer_engine.kernels.decode_plan import plan_decode
    from mini_infer_engine.kernels.gather import gather_decode_inputs
    from mini_infer_engine.kernels.rms_norm import rms_norm
    from mini_infer_engine.kernels.rope_kv import Rotation

    heads, kv_heads, norm = {"0.6b": (16, 8, True), "1.5b": (12, 2, False)}[model]
    slots = torch.arange(rows, dtype=torch.int32, device="cuda")
    state = torch.zeros(rows + 1, dtype=torch.int64, device="cuda")
    lengths = torch.full((rows + 1,), POSITION, dtype=torch.int32, device="cuda")
    hidden, positions = gather_decode_inputs(slots, state, lengths, random(64, HIDDEN[model]))
    rms_norm(hidden, random(HIDDEN[model]), 1e-6)
    tables = torch.zeros(rows, 32, dtype=torch.int32, device="cuda")
    plan = plan_decode(slots, positions, kv_heads, 32 * 128)
    pages = random(rows * 5 + 1, 2, 2, 128, kv_heads, 128)[:, 0]
    weights = (random(128), random(128)) if norm else (None, None)
    rotation = Rotation(random(4096, 128), *weights)
    decode_attention(random(rows, (heads + 2 * kv_heads) * 128), rotation, pages, tables, plan, scale=0.1, ahead=ahead)


def compile_tasks(tasks):
    torch.set_num_threads(1)
    failed = []
    for kind, *arguments in tasks:
        try:
            if kind == "attention":
                attend_once(*arguments)
            else:
                shape, rows, parts, config = arguments
                product(shape, rows, parts, empty)(empty(shape.weight_rows, shape.width), config)
            torch.cuda.synchronize()
        except Exception as error:
            failed.append(f"{kind} {arguments}: {error!r}"[:300])
    return failed


def candidates(shape, tile):
    from mini_infer_engine.kernels.skinny_cut import AheadConfig

    found = {}
    pieces = 2 if shape.gated else 1
    for block_w in (64, 128):
        for block_k in (128, 256):
            if (block_w == 128 and block_k == 256) or shape.width % 64:
                continue
            blocks, steps = math.ceil(shape.columns / (block_w // pieces)), math.ceil(shape.width / block_k)
            for splits in (1, 2, 3, 4, 6, 8):
                per = math.ceil(steps / splits)
                if math.ceil(steps / per) != splits or not 44 <= blocks * splits <= 300:
                    continue
                for ring_kb in (70, 104, 200):
                    stages = min(ring_kb * 1024 // ((block_w + tile) * block_k * 2), per)
                    if stages < 2 and per > 1:
                        continue
                    found[AheadConfig(block_w, tile, block_k, splits, max(2, stages))] = None
    return list(found)


def ring_kb(config):
    return (config.block_w + config.block_t) * config.block_k * 2 * config.stages / 1024


def check_cases():
    from mini_infer_engine.kernels.skinny_cut import AheadConfig

    cases, number = [], 0
    for name, shapes in ({name: shapes for name, (_, shapes) in MODELS.items()} | {"7b": SEVEN, "odd": ODD}).items():
        for product_name, shape in shapes.items():
            for rows in (1, 3, 8, 16, 17, 32, 64):
                number += 1
                tile = tile_rows(rows)
                block_w = 64 if number % 3 else 128
                splits = (1, 3, 2, 5)[number % 4]
                block_k = 64 if block_w == 128 and tile == 64 else 128
                steps = math.ceil(shape.width / block_k)
                config = AheadConfig(block_w, tile, block_k, min(splits, steps), 3 + number % 2)
                parts = 0 if shape.then or number % 5 == 0 else 24
                cases.append((f"{name} {product_name}", shape, rows, parts, config))
    return cases


def exact_of(shape, call, weight):
    values, bias, residual, norm = call.inputs
    scale = 1.0
    if hasattr(values, "square_sums"):
        rows = values.values.shape[0]
        scale = torch.rsqrt(values.square_sums[:, :rows].sum(0) / shape.width + values.eps)[:, None]
        values = values.values
    exact = (values.float() @ weight.float().t()) * scale
    if bias is not None:
        exact = exact + (torch.cat((bias, bias)) if shape.gated else bias).float()
    if shape.gated:
        gate, up = exact.chunk(2, dim=-1)
        exact = functional.silu(gate) * up
    if residual is not None:
        exact = exact + residual.float()
    return exact, norm


def check():
    worst, wrong, unequal, count = 0.0, [], [], 0
    for name, shape, rows, parts, config in check_cases():
        try:
            weight = random(shape.weight_rows, shape.width) * shape.width**-0.5
            call = product(shape, rows, parts)
            exact, norm = exact_of(shape, call, weight)
            result = call(weight, config)
            first = result[0] if shape.then else result
            error = float((first.float() - exact).norm() / exact.norm())
            if shape.then:
                half = result[1]
                scaled_error = float((half.values.float() - first.float() * norm.float()).norm() / first.float().norm())
                sums = half.square_sums[:, :rows].sum(0)
                sums_error = float((sums / first.float().square().sum(1) - 1).abs().max())
                error = max(error, scaled_error, sums_error)
            differs = torch.zeros((), device="cuda")
            for _ in range(50):
                again = call(weight, config)
                if shape.then:
                    differs += (again[1].values != result[1].values).any()
                    differs += (again[1].square_sums[:, :rows] != result[1].square_sums[:, :rows]).any()
                    again = again[0]
                differs += (again != first).any()
            count += 1
            worst = max(worst, error)
            if not error < 6e-3:
                wrong.append((name, rows, dataclasses.astuple(config), error))
            if float(differs):
                unequal.append((name, rows, dataclasses.astuple(config), float(differs)))
        except Exception as error:
            wrong.append((name, rows, dataclasses.astuple(config), repr(error)[:200]))
            if "CUDA error" in repr(error):
                say("CHECK died", wrong[-1], keep=True)
                raise
    say(f"CHECK {count} cases, worst error {worst:.1e}, wrong {len(wrong)}, unequal {len(unequal)}", keep=True)
    for line in (wrong + unequal)[:12]:
        say("   ", line, keep=True)


def captured(calls):
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def graph_of(calls, replays):
    return timed(captured(calls), replays) * 1e3 / len(calls)


def timed(graph, replays):
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    graph.replay()
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in zip(events[:-1], events[1:], strict=True))


def search(until):
    """Per product: microseconds of old and new over all layers' weights back to back; the best cuts by tile."""
    from mini_infer_engine.kernels.tuned import skinny_config

    found = {}
    for rows in (1, 32):
        tile = tile_rows(rows)
        for model, (_, shapes) in MODELS.items():
            for name, shape in shapes.items():
                if time.monotonic() - T0 > until:
                    say("search: out of time", keep=True)
                    return found
                copies = min(LAYERS, max(3, math.ceil(300e6 / shape.bytes)))
                weights = [random(shape.weight_rows, shape.width) for _ in range(copies)]
                parts = HIDDEN[model] // 64
                call = product(shape, rows, parts)

                def measure(config, replays=6, call=call, weights=weights):
                    return graph_of([functools.partial(call, weight, config) for weight in weights], replays)

                old = skinny_config(rows, shape.columns, shape.width, torch.bfloat16, gated=shape.gated)
                old_us = measure(old) if old is not None else float("nan")
                results = []
                for config in candidates(shape, tile):
                    try:
                        graph = captured([functools.partial(call, weight, config) for weight in weights])
                        results.append((timed(graph, 5), config, graph))
                    except Exception as error:
                        say("  failed", model, name, dataclasses.astuple(config), repr(error)[:150])
                        if "CUDA error" in repr(error):
                            raise
                results.sort(key=lambda entry: entry[0])
                results = [(timed(graph, 12) * 1e3 / copies, config) for _, config, graph in results[:9]]
                results.sort(key=lambda pair: pair[0])
                best_us, best = results[0]
                plain_us = measure(dataclasses.replace(best, ahead=False), 12)
                small = next(((us, c) for us, c in results if ring_kb(c) <= 106), results[0])
                found[model, name, tile] = [config for _, config in results]
                say(f"PRODUCT {model} {name:7} rows {rows:2}: old {old_us:6.2f} new {best_us:6.2f} (no pdl {plain_us:6.2f})"
                    f" bytes need {shape.bytes / 4.3e6:5.2f}; {dataclasses.astuple(best)[:5]}"
                    f" small {small[0]:6.2f} {dataclasses.astuple(small[1])[:5]}"
                    f" 4th {results[min(3, len(results) - 1)][0]:6.2f}", keep=True)
                del weights
    return found


class Chain:
    """All of a decode step but sampling, for one model."""

    def __init__(self, model, folder):
        from common.models import model_folder
        from mini_infer_engine import fused
        from mini_infer_engine.kv_pool import KVPool, KVShape
        from mini_infer_engine.loader import fill_randomly
        from mini_infer_engine.models.config import ModelConfig
        from mini_infer_engine.models.registry import MODELS as CLASSES

        self.name, self.fused_module = model, fused
        self.config = ModelConfig.from_directory(Path(model_folder(MODELS[model][0], folder)))
        with torch.device("meta"):
            net = CLASSES[self.config.architecture](self.config)
        with torch.inference_mode():
            self.net = net.to(torch.bfloat16).to_empty(device="cuda").eval()
            fill_randomly(self.net, 0)
            self.net.finish_loading(4096)
        device = torch.device("cuda")
        self.pages_a_row = 6
        self.pool = KVPool(KVShape.of(self.config, 128, torch.bfloat16), 32 * self.pages_a_row, device)
        self.pool.pages.normal_()
        self.decoder = fused.FusedDecoder(self.net, self.pool)
        order = torch.randperm(32 * self.pages_a_row).int()
        self.tables = torch.zeros(33, 32, dtype=torch.int32)
        self.tables[:32, : self.pages_a_row] = order.view(32, self.pages_a_row)
        self.tables = self.tables.cuda()
        self.last_tokens = torch.randint(0, 150_000, (33,), device="cuda")
        self.lengths = torch.full((33,), POSITION, dtype=torch.int32, device="cuda")
        self.table, self.attention_ahead = {}, 0
        self.mixed = random(32, self.config.num_heads * 128)
        self.original_skinny = fused._skinny
        fused._skinny = self.choose

    def close(self):
        self.fused_module._skinny = self.original_skinny

    def choose(self, x, weight, *, gated=False):
        key = (weight.shape[0] // (2 if gated else 1), weight.shape[1], gated)
        if key in self.table:
            return self.table[key]
        return self.original_skinny(x, weight, gated=gated)

    def step(self, rows):
        from mini_infer_engine.kernels.decode_attention import decode_attention
        from mini_infer_engine.kernels.decode_plan import plan_decode
        from mini_infer_engine.kernels.gather import gather_decode_inputs

        slots = self.slots[:rows]
        embedding = self.net.model.embed_tokens.weight
        hidden, positions = gather_decode_inputs(slots, self.last_tokens, self.lengths, embedding)
        plan = plan_decode(slots, positions, self.config.num_kv_heads, 32 * 128)

        def attend(qkv, layer, out=None):
            if self.attention_ahead is None:
                return self.mixed[:rows]
            return decode_attention(qkv, layer.rotation, layer.pages, self.tables, plan, scale=128**-0.5, out=out,
                                    ahead=self.attention_ahead)

        return self.decoder.logits(self.decoder.forward(hidden, attend))

    def measure(self, rows, configs, attention=0, head=None, replays=20):
        """Milliseconds a step, and its logits."""
        shapes = MODELS[self.name][1]
        self.table = {}
        for name, config in configs.items():
            shape = shapes[name]
            self.table[shape.columns, shape.width, shape.gated] = config
        if head is not None:
            self.table[self.config.vocab_size, self.config.hidden_size, False] = head
        self.attention_ahead = attention
        self.slots = torch.arange(32, dtype=torch.int32, device="cuda")
        with torch.inference_mode():
            self.step(rows)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                logits = self.step(rows)
            ms = timed(graph, replays)
            first = logits.clone()
            differs = torch.zeros((), device="cuda")
            if replays > 15:
                for _ in range(30):
                    graph.replay()
                    differs += (logits != first).any()
        return ms, first, float(differs)


def carve_out(percent):
    """Shared memory that the driver prefers for decode attention: what co-resident programs of products need."""
    from mini_infer_engine.kernels import decode_attention as module

    driver = ctypes.CDLL("libcuda.so.1")
    codes = []
    for caches in module._decode_attention.device_caches.values():
        for kernel in caches[0].values():
            codes.append(driver.cuFuncSetAttribute(ctypes.c_void_p(kernel.function), 9, percent))
    return codes


def chain(found, until):
    from mini_infer_engine.kernels.skinny_cut import AheadConfig

    folder = Path(tempfile.mkdtemp())
    for model in MODELS:
        runner = Chain(model, folder)
        names = list(MODELS[model][1])
        for rows in CHAIN_ROWS:
            tile = tile_rows(rows)
            if time.monotonic() - T0 > until or any((model, name, tile) not in found for name in names):
                say(f"chain {model} {rows}: skipped", keep=True)
                continue
            try:
                old_ms, old_logits, _ = runner.measure(rows, {})
                top = {name: found[model, name, tile] for name in names}
                best = {name: configs[0] for name, configs in top.items()}
                small = {name: next((c for c in configs if ring_kb(c) <= 106), configs[0])
                         for name, configs in top.items()}
                line = [f"old {old_ms:.3f}"]
                carve_out(-1)
                reference = None

                def show(title, configs, attention, head=None, same=True):
                    nonlocal reference
                    try:
                        ms, logits, differs = runner.measure(rows, configs, attention, head)
                        error = float((logits.float() - old_logits.float()).norm() / old_logits.float().norm())
                        marks = ""
                        if not error < 0.05:
                            marks += f" ERROR {error:.1e}"
                        if differs:
                            marks += f" UNSTABLE {differs:.0f}"
                        if same:
                            if reference is None:
                                reference = logits
                            elif not torch.equal(reference, logits):
                                marks += " OTHER"
                        line.append(f"{title} {ms:.3f}{marks}")
                        return ms
                    except Exception as error:
                        line.append(f"{title} failed {error!r}"[:160])
                        if "CUDA error" in repr(error):
                            say(f"CHAIN {model} rows {rows}:", "; ".join(line), keep=True)
                            raise
                        return float("inf")

                def changed(configs, **fields):
                    return {name: dataclasses.replace(config, **fields) for name, config in configs.items()}

                show("old+att1", {}, 1, same=False)
                show("new", changed(small, ahead=False), 0)
                show("pdl", small, 0)
                show("pdl+att1", small, 1)
                small_ms = show("pdl+att2", small, 2)
                show("pdl+att3", small, 3)
                show("late", changed(small, at_once=False), 2)
                show("cold", changed(small, warm=0), 2)
                best_ms = show("best", best, 2, same=False)
                codes = carve_out(100)
                if any(codes):
                    say("   carve-out", codes)
                small_ms = min(small_ms, show("carve", small, 2))
                show("carve+att3", small, 3)
                best_ms = min(best_ms, show("carve best", best, 2, same=False))
                current, current_ms = (small, small_ms) if small_ms < best_ms else (best, best_ms)
                for name in sorted(names, key=lambda name: -MODELS[model][1][name].bytes):
                    for config in top[name][:7]:
                        if config == current[name] or time.monotonic() - T0 > until:
                            continue
                        ms, _, _ = runner.measure(rows, current | {name: config}, 2, replays=8)
                        if ms < current_ms - 0.001:
                            current, current_ms = current | {name: config}, ms
                show("searched", current, 2, same=False)
                for head in (AheadConfig(128, tile, 64, 1, 6), AheadConfig(128, tile, 128, 1, 3),
                             AheadConfig(64, tile, 128, 1, 5)):
                    show(f"head{dataclasses.astuple(head)[:5]}", current, 2, head, same=False)
                old_none, new_none = runner.measure(rows, {}, None)[0], runner.measure(rows, current, None)[0]
                line.append(f"without attention: old {old_none:.3f} searched {new_none:.3f}")
                again, _, _ = runner.measure(rows, {})
                line.append(f"old again {again:.3f}")
                say(f"CHAIN {model} rows {rows}:", "; ".join(line), keep=True)
                say("      ", {name: dataclasses.astuple(config)[:5] for name, config in current.items()}, keep=True)
            except Exception as error:
                say(f"CHAIN {model} rows {rows} failed", repr(error)[:300], keep=True)
                traceback.print_exc()
                if "CUDA error" in repr(error):
                    raise
        runner.close()
        del runner
        torch.cuda.empty_cache()


def prefill_candidates(shape, rows):
    from mini_infer_engine.kernels.skinny_cut import AheadConfig

    found = []
    pieces = 2 if shape.gated else 1
    for block_w, tile, block_k, warps, stages in (
        (128, 128, 64, 8, 4), (128, 128, 64, 8, 3), (128, 64, 128, 4, 4), (128, 256, 64, 8, 4), (64, 128, 64, 4, 4)):
        if tile > max(128, rows) or (tile == 256 and shape.then):
            continue
        tiles = math.ceil(shape.columns / (block_w // pieces)) * math.ceil(rows / tile)
        for splits in (1, 2, 4):
            if splits > 1 and (tiles * splits > 280 or tile == 256):
                continue
            found.append(AheadConfig(block_w, tile, block_k, splits, stages, warps, warm=0))
    return found


def prefill(until):
    from mini_infer_engine.kernels.rms_norm import rms_norm
    from mini_infer_engine.kernels.silu_mul import silu_mul

    for rows in (128, 256, 512):
        for model, (_, shapes) in MODELS.items():
            for name, shape in shapes.items():
                if time.monotonic() - T0 > until:
                    say("prefill: out of time", keep=True)
                    return
                copies = min(LAYERS, max(3, math.ceil(200e6 / shape.bytes)))
                weights = [random(shape.weight_rows, shape.width) * shape.width**-0.5 for _ in range(copies)]
                x, residual = random(rows, shape.width), random(rows, shape.columns)
                norm_in, norm_out = random(shape.width), random(shape.columns)

                def library(weight, shape=shape, x=x, residual=residual, norm_in=norm_in, norm_out=norm_out):
                    if shape.then:
                        return rms_norm(residual.addmm_(x, weight.t()), norm_out, 1e-6)
                    out = functional.linear(x, weight)
                    return silu_mul(out) if shape.gated else out

                library_us = graph_of([functools.partial(library, weight) for weight in weights], 6)
                call = product(shape, rows, HIDDEN[model] // 64)
                results = []
                for config in prefill_candidates(shape, rows):
                    try:
                        results.append((graph_of([functools.partial(call, w, config) for w in weights], 6), config))
                    except Exception as error:
                        say("  failed", model, name, dataclasses.astuple(config), repr(error)[:150])
                        if "CUDA error" in repr(error):
                            raise
                results.sort(key=lambda pair: pair[0])
                best_us, best = results[0]
                exact, _ = exact_of(shape, call, weights[0])
                result = call(weights[0], best)
                first = result[0] if shape.then else result
                error = float((first.float() - exact).norm() / exact.norm())
                say(f"PREFILL {rows} {model} {name:7}: cuBLAS+ {library_us:6.2f} new {best_us:6.2f} error {error:.0e}"
                    f" {dataclasses.astuple(best)[:6]}; {results[-1][0]:.1f} {dataclasses.astuple(results[-1][1])[:6]}",
                    keep=True)


def all_tasks(parts):
    from mini_infer_engine.kernels.tuned import skinny_config

    tasks = {}
    if "chain" in parts or "search" in parts:
        for model, (_, shapes) in MODELS.items():
            for rows in CHAIN_ROWS:
                for ahead in (0, 1, 2, 3):
                    tasks["attention", model, rows, ahead] = None
                old = {name: skinny_config(rows, s.columns, s.width, torch.bfloat16, gated=s.gated)
                       for name, s in shapes.items()}
                sums = {name: math.ceil(HIDDEN[model] / old[name].block_n) for name in ("o", "down")}
                tasks["old", shapes["qkv"], rows, 0, old["qkv"]] = None
                tasks["old", shapes["qkv"], rows, sums["down"], old["qkv"]] = None
                tasks["old", shapes["gate_up"], rows, sums["o"], old["gate_up"]] = None
                tasks["old", shapes["gate_up"], rows, HIDDEN[model] // 64, old["gate_up"]] = None
                tasks["old", shapes["o"], rows, 0, old["o"]] = None
                tasks["old", shapes["down"], rows, 0, old["down"]] = None
                head = Shape(151936, HIDDEN[model])
                cut = skinny_config(rows, head.columns, head.width, torch.bfloat16, gated=False)
                for count in (sums["down"], HIDDEN[model] // 64, HIDDEN[model] // 128):
                    tasks["old", head, rows, count, cut] = None
        for model, (_, shapes) in MODELS.items():
            for rows in (1, 32):
                for shape in shapes.values():
                    for config in candidates(shape, tile_rows(rows)):
                        tasks["new", shape, rows, 0 if shape.then else HIDDEN[model] // 64, config] = None
                        tasks["new", shape, rows, 0, config] = None
    if "check" in parts:
        for _, shape, rows, count, config in check_cases():
            tasks["new", shape, rows, count, config] = None
    if "prefill" in parts:
        for model, (_, shapes) in MODELS.items():
            for shape in shapes.values():
                for rows in (512,):
                    for config in prefill_candidates(shape, rows):
                        tasks["new", shape, rows, 0 if shape.then else HIDDEN[model] // 64, config] = None
    return list(tasks)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", default="check,search,chain")
    parser.add_argument("--compilers", type=int, default=15)
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    try:
        tasks = all_tasks(parts)
        count = arguments.compilers
        if count:
            with multiprocessing.get_context("spawn").Pool(count) as pool:
                failed = sum(pool.map(compile_tasks, [tasks[part::count] for part in range(count)], chunksize=1), [])
            say(f"compiled {len(tasks)} kernels, {len(failed)} failed")
            for line in failed[:8]:
                say("   ", line, keep=True)
        gc.freeze()
        if "check" in parts:
            check()
        found = search(time.monotonic() - T0 + 18) if "search" in parts or "chain" in parts else {}
        if "chain" in parts:
            chain(found, time.monotonic() - T0 + 26)
        if "prefill" in parts:
            prefill(time.monotonic() - T0 + 30)
    except Exception:
        traceback.print_exc(file=sys.stdout)
    print("==== summary", torch.cuda.get_device_name(), f"{time.monotonic() - T0:.0f} s")
    print("\n".join(SUMMARY), flush=True)


if __name__ == "__main__":
    main()
