"""Single products whose weights are in groups of any size, of experts too, and W8A8, beside bf16 on one GPU.

    python benchmarks/grouped_products.py --out FILE --time-limit-s 60 --only bf16,W8A8,blocks

Random weights: gate and up of a 7B shape by rows of x, then the experts of Qwen3-30B-A3B by tokens, inside a CUDA graph
over as many copies as do not fit the L2 cache. Microseconds, terabytes a second of weights read where rows are few, and
times bf16 (a product of cuBLAS, or our kernels of experts).
"""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common.gemm_tuner import L2_BYTES, random
from common.gpu import policy, workspace
from common.report import log_line, make_parser, print_table, save, words
from common.timing import graph_microseconds

from mini_infer_engine.config.options.mechanisms import Mechanism
from mini_infer_engine.kernels.context import KernelContext
from mini_infer_engine.kernels.gemm.fp8_block_gemm import fp8_block_linear
from mini_infer_engine.kernels.gemm.gemm_rules import FP8_BLOCK_TILE, INT8_TILES, w8a8_gemm_config
from mini_infer_engine.kernels.gemm.grouped_weight import GroupedWeight
from mini_infer_engine.kernels.gemm.grouped_weight_gemm import grouped_weight_linear
from mini_infer_engine.kernels.gemm.int8_gemm import int8_linear
from mini_infer_engine.kernels.gemm.quantized_gemm import quantized_linear
from mini_infer_engine.kernels.gemm.quantized_weight import QuantizedWeight
from mini_infer_engine.kernels.moe.expert_gemv import expert_gemv
from mini_infer_engine.kernels.moe.grouped_gemm import grouped_experts
from mini_infer_engine.kernels.moe.route import route
from mini_infer_engine.ops.triton_ops import TritonOps

N, K = 2 * 18_944, 3_584
ROWS, W8A8_ROWS = (1, 16, 64, 256), (128, 256, 512, 4096)
EXPERTS, TOP_K, HIDDEN, WIDTH = 128, 8, 2_048, 768
TOKENS = (1, 8, 64, 512)
FORMS = ("nvfp4", "int4-32", "int8-32", "fp8-128")
EXPERT_FORMS = ("nvfp4", "int4-128", "int8-row", "fp8-128")


def random_weight(form: str, *sizes: int) -> GroupedWeight:
    """Of sizes [..., N, K], on the GPU; all bytes but those of e4m3 occur."""
    *rows, k = sizes
    kind, _, last = form.partition("-")
    group = {"nvfp4": 16, "mxfp4": 32}.get(form) or (0 if last == "row" else int(last))
    kind = "fp4" if form.endswith("fp4") else kind
    width = k // 2 if kind in ("int4", "fp4") else k
    values = torch.randint(0, 256, (*rows, width), dtype=torch.uint8, device="cuda")
    if kind == "fp8":
        values = values.remainder_(120).view(torch.float8_e4m3fn)  # no NaN
    if kind == "int8":
        values = values.view(torch.int8)
    groups = (*rows, math.ceil(k / group) if group else 1)
    factors = zeros = None
    if form == "mxfp4":
        scales = torch.full(groups, 121, dtype=torch.uint8, device="cuda")
    elif form == "nvfp4":
        scales = torch.ones(groups, device="cuda").to(torch.float8_e4m3fn)
        factors = torch.full(tuple(rows), k**-0.5, device="cuda")
    else:
        scales = torch.full(groups, k**-0.5 / 64, device="cuda")
    if kind == "int4":
        scales, zeros = scales.half(), torch.full(groups, 8, dtype=torch.uint8, device="cuda")
    return GroupedWeight(kind, values, scales, k, group, zeros, factors)  # type: ignore[arg-type]  # one of its kinds


def copies(byte_count: int) -> int:
    """Of weights, so that no product finds its own in the L2 cache."""
    return max(2, math.ceil(4 * L2_BYTES / byte_count))


def figures(calls: list[Callable[[], object]], byte_count: int, plain_us: float | None) -> dict[str, float]:
    """Of one product, over weights of so many bytes each."""
    took = graph_microseconds(calls)
    found = {"us": took, "TB/s": byte_count / took / 1e6}
    return found if plain_us is None else found | {"times bf16": plain_us / took}


def products() -> dict[str, Callable[[], dict[str, float]]]:
    """What measures each product, by name."""
    plain: dict[int, float] = {}

    def bf16(rows: int) -> dict[str, float]:
        x, count = random(rows, K), copies(2 * N * K)
        weights = [random(N, K) for _ in range(count)]
        found = figures([partial(torch.mm, x, weight.t()) for weight in weights], 2 * N * K, None)
        plain[rows] = found["us"]
        return found

    def grouped(form: str, rows: int) -> dict[str, float]:
        x, first = random(rows, K), random_weight(form, N, K)
        size = first.values.nbytes + first.scales.nbytes
        weights = [first, *(random_weight(form, N, K) for _ in range(copies(size) - 1))]
        return figures([partial(grouped_weight_linear, x, weight) for weight in weights], size, plain.get(rows))

    def w8a8(tile: tuple[int, int, int] | None, rows: int) -> dict[str, float]:
        x = random(rows, K)
        weights = [
            QuantizedWeight(random_weight("int8-row", N, K).values, torch.full((N,), 1e-3, device="cuda"), K, True)
            for _ in range(copies(N * K))
        ]
        linear: Callable[..., torch.Tensor] = quantized_linear
        if tile is not None:
            linear = partial(int8_linear, config=w8a8_gemm_config(tile, profile=policy().profile))
        return figures([partial(linear, x, weight) for weight in weights], N * K, plain.get(rows))

    def fp8_blocks(kind: str, rows: int) -> dict[str, float]:
        x = random(rows, K)
        scales = torch.full((K // 128, N), 1e-3, device="cuda")
        weights = [QuantizedWeight(random_weight("fp8-128", N, K).values, scales, K) for _ in range(copies(N * K))]
        if kind == "W8A16":
            ops = TritonOps(KernelContext(policy().without(Mechanism.FP8_BLOCK_GEMM), workspace()))
            return figures([partial(ops.quantized, x, weight) for weight in weights], N * K, plain.get(rows))
        config = w8a8_gemm_config(FP8_BLOCK_TILE, profile=policy().profile)
        calls = [partial(fp8_block_linear, x, weight, config) for weight in weights]
        return figures(calls, N * K, plain.get(rows))

    w8a8_kinds = {"torch._int_mm": None} | {f"int8_gemm {tile[0]}x{tile[1]}": tile for tile in INT8_TILES}
    found = {f"bf16, {rows} rows": partial(bf16, rows) for rows in sorted({*ROWS, *W8A8_ROWS})}
    found |= {f"{form}, {rows} rows": partial(grouped, form, rows) for form in FORMS for rows in ROWS}
    return (
        found
        | {
            f"W8A8 by {name}, {rows} rows": partial(w8a8, tile, rows)
            for rows in W8A8_ROWS
            for name, tile in w8a8_kinds.items()
        }
        | {
            f"fp8 by blocks, {kind}, {rows} rows": partial(fp8_blocks, kind, rows)
            for rows in W8A8_ROWS
            for kind in ("W8A16", "W8A8")
        }
    )


def experts() -> dict[str, Callable[[], dict[str, float]]]:
    """The same of mixtures, both products and all between them."""
    plain: dict[int, float] = {}

    def mixture(form: str, tokens: int) -> dict[str, float]:
        if form == "bf16":
            stacks: list[Any] = [random(EXPERTS, 2 * WIDTH, HIDDEN), random(EXPERTS, HIDDEN, WIDTH)]
            size = sum(stack.nbytes for stack in stacks)
        else:
            stacks = [random_weight(form, EXPERTS, 2 * WIDTH, HIDDEN), random_weight(form, EXPERTS, HIDDEN, WIDTH)]
            size = sum(stack.values.nbytes + stack.scales.nbytes for stack in stacks)
        x = random(tokens, HIDDEN)
        tiles = policy().expert_tiles(tokens, TOP_K, EXPERTS, x.dtype, is_plain=form == "bf16")
        compute: Callable[..., torch.Tensor] = expert_gemv if tiles is None else partial(grouped_experts, tiles=tiles)
        # Other experts in each call: those of the call before would be in the L2 cache.
        routings = [
            route(random(tokens, EXPERTS), TOP_K, normalizes_top_k=True, groups=tiles is not None) for _ in range(16)
        ]
        chosen = len(torch.cat([one.experts.unique() for one in routings])) / len(routings)
        calls = [partial(compute, x, routing, *stacks) for routing in routings]
        found = figures(calls, int(size * chosen / EXPERTS), plain.get(tokens))
        if form == "bf16":
            plain[tokens] = found["us"]
        return found

    forms = ("bf16", *EXPERT_FORMS)
    return {f"experts, {form}, {tokens} tokens": partial(mixture, form, tokens) for form in forms for tokens in TOKENS}


def main() -> int:
    """All that the time allows; what there is is written after each."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--only", type=words, default=[], metavar="TEXT,...", help="products whose name has one of these"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        log_line("these kernels need an NVIDIA GPU: nothing is measured")
        return 0
    deadline, found = time.monotonic() + options.time_limit_s, dict[str, dict[str, float]]()
    failed = 0
    for name, measure in (products() | experts()).items():
        if options.only and not any(part in name for part in options.only):
            continue
        if time.monotonic() > deadline:
            log_line("no time is left")
            break
        try:
            found[name] = measure()
        except Exception as error:  # one form that does not run takes nothing from the others
            log_line(f"{name} failed: {type(error).__name__}: {error}"[:500])
            failed += 1
        save(options.out, {"products": found})
        torch.cuda.empty_cache()
    print_table(
        ["product", "us", "TB/s", "times bf16"],
        [[name, one["us"], one["TB/s"], one.get("times bf16")] for name, one in found.items()],
    )
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
