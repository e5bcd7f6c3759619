"""Tune and time the kernels on this GPU: skinny products against cuBLAS.

usage: python benchmarks/gpu_kernels.py --out DIR
The fastest cuts are written as Python to DIR/tuned.txt; they are stored in kernels/tuned.py, never searched at start.
"""

import argparse
import contextlib
import itertools
import json
import math
import multiprocessing
from collections.abc import Callable
from pathlib import Path

import torch
from common.timing import graph_microseconds
from torch.nn import functional

from mini_infer_engine.kernels.rms_norm import rms_norm
from mini_infer_engine.kernels.silu_mul import silu_mul
from mini_infer_engine.kernels.skinny_linear import (
    HalfNormed,
    SkinnyConfig,
    row_block_of,
    skinny_linear,
    skinny_linear_then_norm,
)

SHAPES = {  # (columns, width, gated, residual) of every product of the three models
    "7b qkv": (4608, 3584, False, False),
    "7b o": (3584, 3584, False, True),
    "7b gate_up": (18944, 3584, True, False),
    "7b down": (3584, 18944, False, True),
    "7b head": (152064, 3584, False, False),
    "1.5b qkv": (2048, 1536, False, False),
    "1.5b o": (1536, 1536, False, True),
    "1.5b gate_up": (8960, 1536, True, False),
    "1.5b down": (1536, 8960, False, True),
    "1.5b head": (151936, 1536, False, False),
    "0.6b qkv": (4096, 1024, False, False),
    "0.6b o": (1024, 2048, False, True),
    "0.6b gate_up": (3072, 1024, True, False),
    "0.6b down": (1024, 3072, False, True),
    "0.6b head": (151936, 1024, False, False),
}

Product = Callable[..., object]

ROW_BLOCKS = (16, 32, 64)


def candidates(columns: int, width: int, splittable: bool) -> list[SkinnyConfig]:
    """Cuts worth trying: tiles of at least 4,096 weights that fit shared memory, sixteen programs a processor."""
    found = []
    for block_n, block_k, warps, stages in itertools.product((16, 32, 64, 128), (64, 128, 256), (4, 8), (3, 4, 5)):
        if block_n * block_k * stages * 2 > 190_000 or block_n * block_k < 4096 or block_k > width:
            continue
        blocks = math.ceil(columns / block_n)
        for split in (1, 2, 4, 8) if splittable else (1,):
            if blocks * split <= 132 * 16 or split == 1:
                found.append(SkinnyConfig(block_n, block_k, split, warps, stages))  # noqa: PERF401 (reads better)
    return found


def make_case(name: str, rows: int) -> tuple[list[torch.Tensor], Product, Product]:
    """As many weights as do not fit the L2 cache, and the product as fused.py runs it: by our kernel, by cuBLAS.

    A product that reads the residual stream includes its norm, one that writes it the beginning of the next.
    """
    columns, width, gated, writes_residual = SHAPES[name]
    weight_rows = columns * (2 if gated else 1)
    copies = max(2, math.ceil(260e6 / (weight_rows * width * 2)))
    weights = [torch.randn(weight_rows, width, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(copies)]
    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    if writes_residual:
        residual = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
        norm = torch.ones(columns, device="cuda", dtype=torch.bfloat16)

        def ours(weight: torch.Tensor, config: SkinnyConfig) -> object:
            return skinny_linear_then_norm(x, weight, config, bias=None, residual=residual, norm_weight=norm, eps=1e-6)

        def library(weight: torch.Tensor, _: SkinnyConfig | None = None) -> object:
            return residual.addmm_(x, weight.t())

        return weights, ours, library
    norm = torch.ones(width, device="cuda", dtype=torch.bfloat16)
    parts = torch.ones(math.ceil(width / 32), row_block_of(rows), device="cuda")
    half_normed = HalfNormed(x, parts, 1e-6)

    def ours(weight: torch.Tensor, config: SkinnyConfig) -> object:
        return skinny_linear(half_normed, weight, config, gated=gated)

    def library(weight: torch.Tensor, _: SkinnyConfig | None = None) -> object:
        out = functional.linear(rms_norm(x, norm, 1e-6), weight)
        return silu_mul(out) if gated else out

    return weights, ours, library


def compile_part(arguments: tuple[int, int]) -> None:
    """Compile one process's share of all candidates into the shared cache."""
    part, parts = arguments
    for name in ("0.6b qkv", "0.6b o", "0.6b gate_up"):
        _, width, gated, _ = SHAPES[name]
        configs = candidates(8192, width, not gated)
        for index, (rows, config) in enumerate(itertools.product(ROW_BLOCKS, configs)):
            if index % parts == part:
                weights, ours, _ = make_case(name, rows)
                with contextlib.suppress(Exception):  # a cut that does not fit the chip is only not a candidate
                    ours(weights[0], config)


def tune(out: Path) -> None:
    """Time every candidate of every product at each tile of rows."""
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        pool.map(compile_part, [(part, 14) for part in range(14)])
    print("compiled", flush=True)
    lines, results = [], {}
    for name, (columns, width, gated, _) in SHAPES.items():
        byte_count = columns * (2 if gated else 1) * width * 2
        for rows in ROW_BLOCKS:
            weights, ours, library = make_case(name, rows)
            cublas = graph_microseconds([lambda w=w: library(w) for w in weights])
            timed = []
            for config in candidates(columns, width, not gated):
                if columns > 100_000 and config.block_n < 32:
                    continue
                try:
                    calls = [lambda w=w, c=config: ours(w, c) for w in weights]
                    timed.append((graph_microseconds(calls, 7), config))
                except Exception:
                    continue
            timed.sort(key=lambda pair: pair[0])
            best, config = timed[0]
            results[f"{name} rows {rows}"] = {"us": best, "cublas_us": cublas, "tb_s": byte_count / best / 1e6}
            print(
                f"{name:14} rows {rows:2}: {best:7.2f} us {byte_count / best / 1e6:5.2f} TB/s, cuBLAS "
                f"{cublas:7.2f} us; {config}; next {timed[1][0]:.2f} {timed[1][1]}",
                flush=True,
            )
            values = (config.block_n, config.block_k, config.split_k, config.warps, config.stages)
            cut = f"SkinnyConfig{values}" if best < cublas else "None"
            lines.append(f"    ({columns}, {width}, {gated}, {rows}): {cut},")
    (out / "tuned.txt").write_text("\n".join(lines))
    (out / "kernels.json").write_text(json.dumps(results, indent=1))


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    tune(arguments.out)


if __name__ == "__main__":
    main()
