"""Scratch: variants of causal paged prefill attention on one H200, each in a process of its own.

    PYTHONPATH=contract:engine:benchmarks python benchmarks/hopper_variants.py [--only NAME ...] [--quick]

Prints each variant's errors against fp32 (in units of the dtype's epsilon; 3 is allowed), then TFLOP/s a case.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import traceback

CONFIGS = {  # of the Gluon kernel
    "g128": {},
    "g128-noturn": {"turns": False},
    "g128-grid": {"persistent": False},
    "g64": {"block": 64, "stages": 4},
    "g64-3wg": {"block": 64, "stages": 3, "consumers": 3, "consumer_registers": 160, "producer_registers": 32},
}
NAMES = ["old", "tma", *CONFIGS]
LAYOUTS = {"28/4": (28, 4), "12/2": (12, 2), "16/8": (16, 8)}
CASES = {  # chunks as (tokens before, new tokens)
    "1k": [(0, 1024)],
    "2k": [(0, 2048)],
    "4k": [(0, 4096)],
    "8k": [(0, 8192)],
    "16k": [(0, 16384)],
    "8x1k": [(0, 1024)] * 8,
    "2k@6k": [(6144, 2048)],
    "512@15k": [(15000, 512)],
    "4k+300s": [(0, 4096), (0, 300), (700, 200), (0, 900)],
}


def call_of(name):
    import torch
    from mini_infer_engine.kernels.prefill_attention import prefill_attention

    if name == "old":
        return lambda q, pool, rows, out: prefill_attention(q, pool, rows, scale=q.shape[2] ** -0.5, out=out)
    if name == "tma":
        return tma_variant()
    from mini_infer_engine.kernels.hopper_prefill_attention import hopper_prefill_attention

    config = CONFIGS[name]

    def call(q, pool, rows, out):
        block = min(config.get("block", 128), pool.shape[2])
        hopper_prefill_attention(
            q, pool, rows, scale=q.shape[2] ** -0.5, out=out, **{**config, "block": block}
        )

    assert torch.cuda.get_device_capability()[0] == 9
    return call


def tma_variant():
    """Plain Triton, K and V by host descriptors, no specialisation."""
    import triton
    from tma_plain import kernel
    from triton.tools.tensor_descriptor import TensorDescriptor

    def call(q, pool, rows, out):
        tokens, heads, head_dim = q.shape
        pitch = pool.stride(2)
        rows_of_page = pool.stride(0) // pitch
        count = (pool.shape[0] - 1) * rows_of_page + 2 * pool.shape[2]
        flat = pool.as_strided((2, pitch), (pitch, 1))
        block = min(128, pool.shape[2])
        described = TensorDescriptor(flat, [count, pitch], [pitch, 1], [block, head_dim])
        tiles = triton.cdiv(rows.longest_query, 128)
        sequences = rows.ends.shape[0]
        kernel[(heads, sequences, tiles)](
            q, described, rows.page_tables, rows.query_starts, rows.ends, out, q.stride(0), rows_of_page,
            rows.page_tables.stride(0), out.stride(0), head_dim**-0.5 * 1.4426950408889634, heads // pool.shape[3],
            HEAD_DIM=head_dim, PAGE_SIZE=pool.shape[2], ROWS=128, BLOCK=block, num_warps=8, num_stages=2,
        )  # fmt: skip

    return call


def problem(chunks, heads, kv_heads, head_dim, page_size, dtype, layers, poison):
    import torch
    from mini_infer_engine.attention.prefill_rows import PrefillRows

    ends = [before + new for before, new in chunks]
    width = -(-max(ends) // page_size) + 1
    pages = len(chunks) * width + 3
    shape = (pages, layers, 2, page_size, kv_heads, head_dim)
    pool = torch.full(shape, float("nan"), dtype=dtype, device="cuda") if poison else torch.randn(
        shape, dtype=dtype, device="cuda")
    tables = torch.randperm(pages, device="cuda")[: len(chunks) * width].view(len(chunks), width)
    if poison:
        for index, end in enumerate(ends):
            tokens = torch.arange(end, device="cuda")
            at = tables[index][tokens // page_size]
            for layer in range(layers):
                for half in (0, 1):
                    pool[at, layer, half, tokens % page_size] = torch.randn(
                        end, kv_heads, head_dim, device="cuda").to(dtype)
    counts = [new for _, new in chunks]
    starts = torch.tensor([0, *counts], device="cuda").cumsum(0).int()
    last = torch.tensor(ends, device="cuda", dtype=torch.int32)
    keys = torch.nn.functional.pad(last.cumsum(0), (1, 0)).int()
    packed = torch.randn(sum(counts), (heads + 2 * kv_heads) * head_dim, device="cuda").to(dtype)
    q = packed[:, : heads * head_dim].unflatten(1, (heads, head_dim))
    rows = PrefillRows(tables.int(), starts, keys, last, max(counts), max(ends))
    return q, pool, rows, tables, counts


def exact(q, layer, table, before, page_size):
    """fp32 attention of one sequence, [new, heads * head_dim]."""
    import torch

    new, heads, _ = q.shape
    end = before + new
    found = layer[table[: -(-end // page_size)]]
    keys, values = (found[:, half].flatten(0, 1)[:end].float() for half in (0, 1))
    group = heads // keys.shape[1]
    outs = []
    for begin in range(0, new, 512):
        part = q[begin : begin + 512].float()
        scores = torch.einsum("qhd,thd->hqt", part, keys.repeat_interleave(group, 1)) * q.shape[2] ** -0.5
        seen = torch.arange(end, device="cuda") <= torch.arange(begin, begin + part.shape[0], device="cuda")[:, None] + before
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        outs.append(torch.einsum("hqt,thd->qhd", weights, values.repeat_interleave(group, 1)).flatten(1))
    return torch.cat(outs) if outs else q.float().flatten(1)


MIXED = [(0, 1), (0, 37), (4000, 128), (131, 77), (0, 1025), (513, 1), (5, 0), (70, 64), (0, 0), (300, 700)]


def check(name):
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    call = call_of(name)
    bf16 = torch.bfloat16
    cases = [("mixed 28/4/128 p128", MIXED, 28, 4, 128, 128, bf16), ("3000 16/8/128 p128", [(0, 3000)], 16, 8, 128, 128, bf16)]
    if name in ("g128", "tma"):
        cases += [
            ("mixed 12/2/128 p256", MIXED, 12, 2, 128, 256, bf16),
            ("mixed 14/2/64 p64", MIXED, 14, 2, 64, 64, bf16),
            ("mixed 16/8/64 p128", MIXED, 16, 8, 64, 128, bf16),
            ("mixed 16/8/128 p128 fp16", MIXED, 16, 8, 128, 128, torch.float16),
        ]
    for label, chunks, heads, kv_heads, dim, page, dtype in cases:
        for padding in (1, 2):
            try:
                q, pool, rows, tables, counts = problem(chunks, heads, kv_heads, dim, page, dtype, 2, True)
                rows = type(rows)(*(getattr(rows, field) for field in rows.__slots__[:4]),
                                  rows.longest_query * padding, rows.longest_key)
                out = torch.full((q.shape[0], heads * dim), float("nan"), dtype=dtype, device="cuda")
                again = torch.full_like(out, float("nan"))
                began = time.perf_counter()
                call(q, pool[:, 1], rows, out)
                torch.cuda.synchronize()
                took = time.perf_counter() - began
                call(q, pool[:, 1], rows, again)
                worst = 0.0
                for index, part in enumerate(out.split(counts)):
                    if counts[index]:
                        begin = sum(counts[:index])
                        wanted = exact(q[begin : begin + counts[index]], pool[:, 1], tables[index].long(), chunks[index][0], page)
                        off = (part.float() - wanted).abs().max() / wanted.abs().max() / torch.finfo(dtype).eps
                        off = float(off) if part.isfinite().all() else float("inf")
                        if off > 3:
                            print(f"  {name} {label} chunk {chunks[index]} off {off}", flush=True)
                        worst = max(worst, off)
                same = torch.equal(out, again)
                print(f"check {name} | {label} x{padding} | error {worst:.2f} eps | repeatable {same} | first {took:.1f} s", flush=True)
            except Exception as error:
                text = "".join(traceback.format_exception(error))
                print(f"check {name} | {label} | FAILED {text[:600]} ... {text[-1500:]}", flush=True)


def rate(name, quick):
    from common.timing import graph_microseconds
    import torch

    call = call_of(name)
    found = {}
    for layout, (heads, kv_heads) in LAYOUTS.items():
        for case, chunks in CASES.items():
            if quick and case not in ("4k", "8k"):
                continue
            try:
                q, pool, rows, _, _ = problem(chunks, heads, kv_heads, 128, 128, torch.bfloat16, 4, False)
                out = torch.empty((q.shape[0], heads * 128), dtype=torch.bfloat16, device="cuda")
                calls = [lambda layer=layer: call(q, pool[:, layer], rows, out) for layer in range(4)]
                took = graph_microseconds(calls, 10)
                flop = 4 * heads * 128 * sum(new * before + new * new / 2 for before, new in chunks)
                found[f"{layout} {case}"] = (took, flop / took / 1e6)
            except Exception as error:
                found[f"{layout} {case}"] = (float("nan"), float("nan"))
                print(f"rate {name} {layout} {case}: {error!r}"[:800], flush=True)
    if name != "old":
        began = time.perf_counter()
        for _ in range(100):
            calls[0]()
        host = (time.perf_counter() - began) * 1e4
        torch.cuda.synchronize()
        print(f"rate {name}: host {host:.1f} us a launch (queue may have filled)", flush=True)
    print("RESULT " + json.dumps(found), flush=True)


def start(name, mode, quick):
    command = [sys.executable, __file__, "--worker", name, "--mode", mode] + (["--quick"] if quick else [])
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process, limit):
    try:
        text, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        text, _ = process.communicate()
        text += f"\nKILLED after {limit} s: hangs?"
    if process.returncode:
        text += f"\nexit status {process.returncode}"
    return text


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", default=NAMES)
    parser.add_argument("--quick", action="store_true", help="4k and 8k only")
    parser.add_argument("--worker")
    parser.add_argument("--mode")
    options = parser.parse_args()
    if options.worker:
        os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
        return check(options.worker) if options.mode == "check" else rate(options.worker, options.quick)
    # Checks side by side: they compile most of the time. Each may take this long.
    running = {name: start(name, "check", False) for name in options.only}
    good = []
    for name, process in running.items():
        text = finish(process, 90)
        print(text.strip()[-3500:], flush=True)
        if "error" in text and "KILLED" not in text:
            good.append(name)
    table = {}
    for name in good:
        text = finish(start(name, "rate", options.quick), 40)
        results = [line for line in text.splitlines() if line.startswith("RESULT ")]
        others = [line for line in text.splitlines() if not line.startswith("RESULT ")]
        if others:
            print("\n".join(others)[-1500:], flush=True)
        if results:
            table[name] = json.loads(results[-1][7:])
    cases = list(dict.fromkeys(case for found in table.values() for case in found))
    print("\n".ljust(17) + "".join(f"{name:>20}" for name in table) + "   (us, TFLOP/s)")
    for case in cases:
        cells = [table[name].get(case, (float("nan"),) * 2) for name in table]
        print(f"{case:16}" + "".join(f"{took:11.1f} {flops:8.1f}" for took, flops in cells))


if __name__ == "__main__":
    main()
