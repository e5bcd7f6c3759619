"""Both products of MXFP4 experts at gpt-oss's shapes on one GPU: every kernel and tile, by tokens.

    python benchmarks/mx_experts.py --out FILE [--tokens 1,8,32,64,128] [--experts 32,128]

Random weights, a random routing to 4 experts for each call; microseconds inside a CUDA graph. Weights of all experts do
not fit the L2 cache, and calls of few tokens have routings of their own. Every result is compared with a product of
dequantised weights in fp32. The bound reads the weights of the experts that have tokens once, at 4.3 TB/s.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from common.report import integers, log_line, make_parser, print_table, save
from common.timing import graph_microseconds

from mini_infer_engine.kernels.gemm.grouped_weight import GroupedWeight, dequantized_groups, ordered_for_mx_experts
from mini_infer_engine.kernels.moe.mx_experts import MXTile, mx_product, mx_tile
from mini_infer_engine.kernels.moe.mx_few_rows import FewRowsTile, few_rows_product
from mini_infer_engine.kernels.moe.route import Routing, route
from mini_infer_engine.layers.moe import swiglu_oai

SIZE, TOP_K, LIMIT, CALLS = 2880, 4, 7.0, 8
BYTES_PER_US = 4.3e6
FEW_ROWS = [
    (8, FewRowsTile(rows, warps, stages))
    for rows, warps, every_stages in (
        (16, 4, (2, 3)),
        (32, 1, (3, 4, 6)),
        (32, 2, (2, 3, 4)),
        (32, 4, (2, 3)),
        (64, 1, (2, 3, 4)),
        (64, 2, (2, 3, 4)),
    )
    for stages in every_stages
]
OTHERS = [MXTile(64, 64, 4, 3), MXTile(64, 64, 4, 4), MXTile(64, 32, 4, 4), MXTile(128, 32, 8, 4)]


@dataclass(frozen=True, slots=True)
class Layer:
    """The experts of one layer."""

    gate_up: GroupedWeight
    down: GroupedWeight
    gate_up_bias: torch.Tensor
    down_bias: torch.Tensor


def stack(experts: int, rows: int) -> GroupedWeight:
    """Returns random weights [experts, rows, SIZE]."""
    values = torch.randint(0, 256, (experts, rows, SIZE // 2), dtype=torch.uint8, device="cuda")
    scales = torch.randint(119, 122, (experts, rows, SIZE // 32), dtype=torch.uint8, device="cuda")
    return ordered_for_mx_experts(GroupedWeight("fp4", values, scales, SIZE, 32))


def make_layer(experts: int) -> Layer:
    """Returns a layer with biases."""
    biases = (torch.randn((experts, rows), dtype=torch.bfloat16, device="cuda") for rows in (2 * SIZE, SIZE))
    return Layer(stack(experts, 2 * SIZE), stack(experts, SIZE), *biases)


def routings(tokens: int, experts: int) -> list[Routing]:
    """Returns routings of random logits; one token's have no lists, as in the engine."""
    made = (torch.randn((tokens, experts), dtype=torch.bfloat16, device="cuda") for _ in range(CALLS))
    return [route(logits, TOP_K, normalizes_top_k=True, groups=tokens > 1) for logits in made]


Call = Callable[[torch.Tensor, Routing, torch.Tensor, Layer, bool], None]


def operands(layer: Layer, is_gated: bool) -> tuple[GroupedWeight, dict[str, Any]]:
    """Returns the weight and the options of a product."""
    weight, bias = (layer.gate_up, layer.gate_up_bias) if is_gated else (layer.down, layer.down_bias)
    return weight, {"is_gated": is_gated, "bias": bias, "limit": LIMIT}


def by_few_rows(
    height: int,
    tile: FewRowsTile,
    x: torch.Tensor,
    routing: Routing,
    out: torch.Tensor,
    layer: Layer,
    is_gated: bool,
) -> None:
    """Computes a product by `few_rows_product`."""
    weight, options = operands(layer, is_gated)
    few_rows_product(x, routing, weight, out, height, tile, **options)


def by_tiles(
    height: int,
    short: int,
    tile: MXTile,
    x: torch.Tensor,
    routing: Routing,
    out: torch.Tensor,
    layer: Layer,
    is_gated: bool,
) -> None:
    """Computes a product by `mx_product`."""
    weight, options = operands(layer, is_gated)
    mx_product(x, routing, weight, out, height, replace(tile, short=short), **options)


def contenders(mean_rows: float) -> dict[str, Call]:
    """Returns what computes products of experts with so many tokens, by name; the engine's tile is the first."""
    height, tile = mx_tile(mean_rows)
    found: dict[str, Call] = {
        f"tiles {height} {short} {tile}": partial(by_tiles, height, short, tile)
        for short in (0, height // 4, height // 2)
        if short == 0 or short >= 64
    }
    if mean_rows <= 20:
        found |= {f"tiles 16 {one}": partial(by_tiles, 16, 0, one) for one in OTHERS}
        found |= {f"few {height} {one}": partial(by_few_rows, height, one) for height, one in FEW_ROWS}
    return found


def expected(x: torch.Tensor, routing: Routing, layer: Layer, is_gated: bool) -> torch.Tensor:
    """Returns a product's result by dequantised weights, in fp32."""
    weight, options = operands(layer, is_gated)
    chosen = routing.experts.flatten().long()
    tokens = routing.experts.shape[0]
    made = torch.zeros((tokens * TOP_K, weight.shape[0]), dtype=torch.float32, device="cuda")
    sources = x.repeat_interleave(TOP_K, 0) if is_gated else x
    for expert in chosen.unique().tolist():
        wide = dequantized_groups(weight.at(expert)).float()
        mine = chosen == expert
        made[mine] = sources[mine].float() @ wide.T + options["bias"][expert].float()
    if is_gated:
        return swiglu_oai(*made.chunk(2, dim=-1), LIMIT)
    made *= routing.weights.flatten()[:, None]
    return made.view(tokens, TOP_K, -1).transpose(0, 1)


def output(tokens: int, is_gated: bool) -> torch.Tensor:
    """Returns memory for a product's result."""
    sizes = (tokens * TOP_K, SIZE) if is_gated else (TOP_K, tokens, SIZE)
    return torch.zeros(sizes, dtype=torch.bfloat16, device="cuda")


def compile_part(part: int, parts: int) -> None:
    """Compiles a share of the kernels into Triton's cache."""
    layer = make_layer(8)
    every: dict[str, Call] = {}
    for mean_rows in (1.0, 15.0, 64.0, 128.0, 512.0):
        every |= contenders(mean_rows)
    for number, (tokens, is_gated, call) in enumerate(product((1, 2), (True, False), every.values())):
        if number % parts == part:
            x = torch.randn((tokens * (1 if is_gated else TOP_K), SIZE), dtype=torch.bfloat16, device="cuda")
            try:
                call(x, routings(tokens, 8)[0], output(tokens, is_gated), layer, is_gated)
            except Exception as error:  # it is reported where it is timed
                log_line(f"not compiled: {error!r:.100}")
    torch.cuda.synchronize()


def measured(experts: int, tokens: int, layer: Layer) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields the figures of both products, by contender."""
    made = routings(tokens, experts)
    for is_gated in (True, False):
        rows = tokens if is_gated else tokens * TOP_K
        x = torch.randn((rows, SIZE), dtype=torch.bfloat16, device="cuda")
        weight, _ = operands(layer, is_gated)
        bytes_of_expert = sum(part[0].numel() * part.element_size() for part in (weight.values, weight.scales))
        hit = sum(len(routing.experts.unique()) for routing in made) / CALLS
        yield f"{'gated' if is_gated else 'down'}, bound", {"us": hit * bytes_of_expert / BYTES_PER_US}
        right, out = expected(x, made[0], layer, is_gated), output(tokens, is_gated)
        for name, call in contenders(tokens * TOP_K / experts if tokens > 1 else 1.0).items():
            try:
                out.fill_(float("nan"))
                call(x, made[0], out, layer, is_gated)
                error = float((out.float() - right).abs().max() / right.abs().max())
                calls = [partial(call, x, routing, out, layer, is_gated) for routing in made]
                found = {"us": graph_microseconds(calls), "error": error}
            except Exception as failure:
                log_line(f"{name}: {failure!r:.300}")
                torch.cuda.synchronize()
                continue
            yield f"{'gated' if is_gated else 'down'}, {name}", found


def layers(experts: int, tokens: int, layer: Layer) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields the microseconds of both products, one after the other."""
    made = routings(tokens, experts)
    x = torch.randn((tokens, SIZE), dtype=torch.bfloat16, device="cuda")
    between, out = output(tokens, True), output(tokens, False)
    calls = contenders(tokens * TOP_K / experts if tokens > 1 else 1.0)

    def both(call: Call, routing: Routing) -> None:
        call(x, routing, between, layer, True)
        call(between, routing, out, layer, False)

    for name, call in calls.items():
        out.fill_(float("nan"))
        both(call, made[0])
        right = expected(between, made[0], layer, False)
        error = float((out.float() - right).abs().max() / right.abs().max())
        yield f"both, {name}", {"us": graph_microseconds([partial(both, call, one) for one in made]), "error": error}


def main() -> None:
    """Times everything, the fastest first in each table."""
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=integers, default=[1, 8, 32, 64, 128], metavar="N,...")
    parser.add_argument("--experts", type=integers, default=[32, 128], metavar="N,...")
    parser.add_argument("--compile", type=integers, metavar="PART,PARTS", help="only compile a share of all kernels")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.compile:
        return compile_part(*args.compile)
    parts = max(1, min(12, (os.cpu_count() or 1) - 2))
    command = [sys.executable, __file__, "--compile"]
    for process in [subprocess.Popen([*command, f"{part},{parts}"]) for part in range(parts)]:
        process.wait()
    log_line("compiled")
    result: dict[str, Any] = {"parts": {}}
    for experts in args.experts:
        layer = make_layer(experts)
        for tokens in args.tokens:
            found = dict(measured(experts, tokens, layer)) | dict(layers(experts, tokens, layer))
            result["parts"][f"{experts} experts, {tokens} tokens"] = found
            save(args.out, result)
            rows = sorted(
                ([name, one["us"], one.get("error", "")] for name, one in found.items()), key=lambda one: one[1]
            )
            for side in ("gated", "down", "both"):
                head = [f"{experts} experts, {tokens} tokens", "us", "error"]
                print_table(head, [row for row in rows if row[0].startswith(side)])
    return None


if __name__ == "__main__":
    main()
