"""The tuner of small-M GEMMs: see kernels.py."""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional

from common.gpu import policy, workspace
from common.timing import graph_microseconds
from mini_infer_engine.kernels.gemm.gemm_config import DeferredRMSNorm, PdlGemmConfig, SmallMConfig, portable_block_m
from mini_infer_engine.kernels.gemm.gemm_dispatch import small_m_linear, small_m_linear_add_norm
from mini_infer_engine.kernels.gemm.gemm_rules import ring_stages
from mini_infer_engine.kernels.gemm.tuned_configs import (
    GemmConfig,
    file_name,
    load_tuned_configs,
    tuned_configs_json,
)
from mini_infer_engine.kernels.gemm.tuned_configs import (
    Shape as TunedShape,
)
from mini_infer_engine.kernels.norm.rms_norm import rms_norm
from mini_infer_engine.kernels.norm.silu_mul import silu_mul

Gemm = Callable[[torch.Tensor, GemmConfig], object]

L2_BYTES = 50_000_000
COMPILERS = 15
BLOCKS_M = (8, 32, 16, 64)
"""M of the tiles that are timed, the most important first."""
SQUARE_SUM_PARTS = 64
"""Square sums of a row: as many as a residual stream of 4,096 in tiles of 64 has."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """One GEMM of a model: [M, K] to [M, N]."""

    n: int
    k: int
    gated: bool = False
    writes_residual: bool = False

    @property
    def weight_rows(self) -> int:
        """Rows of the weight matrix: a gate has as many again."""
        return self.n * (2 if self.gated else 1)

    @property
    def byte_count(self) -> int:
        """Of the weights, bf16."""
        return self.weight_rows * self.k * 2


SHAPES = {
    "7b gate_up": Shape(18944, 3584, gated=True),
    "7b down": Shape(3584, 18944, writes_residual=True),
    "7b qkv": Shape(4608, 3584),
    "7b o": Shape(3584, 3584, writes_residual=True),
    "7b head": Shape(152064, 3584),
    "1.5b gate_up": Shape(8960, 1536, gated=True),
    "1.5b down": Shape(1536, 8960, writes_residual=True),
    "1.5b qkv": Shape(2048, 1536),
    "1.5b o": Shape(1536, 1536, writes_residual=True),
    "1.5b head": Shape(151936, 1536),
    "0.6b gate_up": Shape(3072, 1024, gated=True),
    "0.6b down": Shape(1024, 3072, writes_residual=True),
    "0.6b qkv": Shape(4096, 1024),
    "0.6b o": Shape(1024, 2048, writes_residual=True),
    "0.6b head": Shape(151936, 1024),
}


def candidates(shape: Shape, block_m: int) -> list[PdlGemmConfig]:
    """Configs worth trying: from a program for every third SM to two an SM; rings of which one to three fit."""
    found, profile = [], policy().profile
    for tall, block_k, residents, splits in itertools.product((64, 128), (128, 256), (1, 2, 3), (1, 2, 3, 4, 6)):
        block_n = tall // (2 if shape.gated else 1)
        blocks, steps = math.ceil(shape.n / block_n), math.ceil(shape.k / block_k)
        stages = min(ring_stages(residents, tall + block_m, block_k, profile), math.ceil(steps / splits))
        programs = blocks * splits
        if (tall == 128 and block_k == 256) or stages < 2 or math.ceil(steps / math.ceil(steps / splits)) != splits:
            continue
        if programs >= profile.sm_count // 3 and (splits == 1 or programs <= 2 * profile.sm_count):
            found.append(PdlGemmConfig(block_n, block_k, splits, stages))
    return list(dict.fromkeys(found))


def key_of(shape: Shape, block_m: int) -> TunedShape:
    """Its place in the engine's table."""
    return shape.n, shape.k, shape.gated, block_m


def portable_config(shape: Shape, block_m: int) -> SmallMConfig | None:
    """What the engine takes without programmatic dependent launch, if not cuBLAS."""
    config = policy().small_m_config(block_m, shape.n, shape.k, torch.bfloat16, gated=shape.gated)
    assert not isinstance(config, PdlGemmConfig)
    return config


def random(*shape: int) -> torch.Tensor:
    """Standard normal values, bf16."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def ours(shape: Shape, rows: int) -> Gemm:
    """The GEMM as serving runs it; one that writes the residual stream prepares the next norm."""
    x = random(rows, shape.k)
    if shape.writes_residual:
        residual, norm = random(rows, shape.n), random(shape.n)
        return lambda weight, config: small_m_linear_add_norm(
            x, weight, config, workspace=workspace(), bias=None, residual=residual, norm_weight=norm, eps=1e-6
        )
    deferred_norm = DeferredRMSNorm(x, torch.ones(SQUARE_SUM_PARTS, portable_block_m(rows), device="cuda"), 1e-6)
    return lambda weight, config: small_m_linear(
        deferred_norm, weight, config, workspace=workspace(), gated=shape.gated
    )


def cublas(shape: Shape, rows: int) -> Callable[[torch.Tensor], object]:
    """The same by cuBLAS. Beside our kernels, one GEMM by cuBLAS costs a norm of its own, before it or after."""
    x = random(rows, shape.k)
    if shape.writes_residual:
        residual, norm = random(rows, shape.n), random(shape.n)
        return lambda weight: rms_norm(residual.addmm_(x, weight.t()), norm, 1e-6)
    norm = random(shape.k)

    def run(weight: torch.Tensor) -> torch.Tensor:
        out = functional.linear(rms_norm(x, norm, 1e-6), weight)
        return silu_mul(out) if shape.gated else out

    return run


def relative_error(shape: Shape, rows: int, config: GemmConfig, weight: torch.Tensor) -> float:
    """Norm of the difference to fp32 over the norm of the fp32 result."""
    x, residual = random(rows, shape.k), random(rows, shape.n)
    actual = small_m_linear(
        x,
        weight,
        config,
        workspace=workspace(),
        residual=residual if shape.writes_residual else None,
        gated=shape.gated,
    ).float()
    exact = x.float() @ weight.float().t()
    if shape.gated:
        gate, up = exact.chunk(2, dim=-1)
        exact = functional.silu(gate) * up
    if shape.writes_residual:
        exact += residual.float()
    return float((actual - exact).norm() / exact.norm())


def compile_kernels(kernels: list[tuple[Shape, int, GemmConfig]]) -> None:
    """Compile into the shared cache."""
    torch.set_num_threads(1)
    for shape, block_m, config in kernels:
        with contextlib.suppress(Exception):  # a config that does not fit the chip is only not a candidate
            weight = torch.empty((shape.weight_rows, shape.k), dtype=torch.bfloat16, device="cuda")
            ours(shape, block_m)(weight, config)


def compile_all() -> int:
    """Every candidate's kernel, in several processes: how many there are."""
    kernels: list[tuple[Shape, int, GemmConfig]] = []
    for block_m, shape in itertools.product(BLOCKS_M, SHAPES.values()):
        portable = portable_config(shape, block_m)
        configs = [*candidates(shape, block_m), *([portable] if portable else [])]
        kernels += [(shape, block_m, config) for config in configs]
    with multiprocessing.get_context("spawn").Pool(COMPILERS) as pool:
        pool.map(compile_kernels, [kernels[part::COMPILERS] for part in range(COMPILERS)], chunksize=1)
    return len(kernels)


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What was measured of one shape with so many rows; times in microseconds."""

    name: str
    rows: int
    us: float
    tb_s: float
    portable_us: float
    cublas_us: float
    error: float
    config: GemmConfig
    runners_up: list[tuple[float, GemmConfig]]

    def line(self) -> str:
        """One row of the table."""
        second_us, second = self.runners_up[0] if self.runners_up else (0.0, None)
        second_config = None if second is None else dataclasses.astuple(second)
        return (
            f"{self.name:12} {self.rows:4} {self.us:8.2f} {self.tb_s:5.2f} {self.portable_us:8.2f} "
            f"{self.cublas_us:8.2f} {self.error:.0e}  {dataclasses.astuple(self.config)!s:18} "
            f"{second_us:8.2f} {second_config}"
        )


def tune(name: str, rows: int) -> Result:
    """Time every candidate over more weights than the L2 cache holds, then the best few again and longer.

    GEMMs follow each other at once, as in a decode step: what one does while the one before runs counts.
    """
    shape = SHAPES[name]
    copies = max(2, math.ceil(5 * L2_BYTES / shape.byte_count))
    weights = [random(shape.weight_rows, shape.k) * shape.k**-0.5 for _ in range(copies)]
    gemm, by_cublas = ours(shape, rows), cublas(shape, rows)
    cublas_us = graph_microseconds([functools.partial(by_cublas, weight) for weight in weights])

    def microseconds(config: GemmConfig, replays: int) -> float:
        return graph_microseconds([functools.partial(gemm, weight, config) for weight in weights], replays)

    first: list[tuple[float, GemmConfig]] = []
    for config in candidates(shape, rows):
        with contextlib.suppress(Exception):  # as above
            first.append((microseconds(config, 6), config))
    first.sort(key=lambda pair: pair[0])
    portable = portable_config(shape, rows)
    portable_us = microseconds(portable, 15) if portable else math.inf
    again: list[tuple[float, GemmConfig]] = [(microseconds(config, 15), config) for _, config in first[:4]]
    timed = sorted([*again, *([(portable_us, portable)] if portable else [])], key=lambda pair: pair[0])
    (best_us, best), runners_up = timed[0], timed[1:] + first[4:]
    error = relative_error(shape, rows, best, weights[0])
    tb_s = shape.byte_count / best_us / 1e6
    return Result(name, rows, best_us, tb_s, portable_us, cublas_us, error, best, runners_up)


def tuned_file(measured: dict[TunedShape, GemmConfig | None]) -> tuple[str, str]:
    """Name and contents of this GPU's file with these configs; shapes that were not measured keep what they have."""
    device = policy().profile.name
    known = load_tuned_configs(device)
    made = dataclasses.replace(known, device=device, with_pdl={**known.with_pdl, **measured})
    return file_name(device), tuned_configs_json(made)


def tune_all(out: Path, deadline: float) -> None:
    """Every GEMM with each M until the deadline; what has been measured is on disk at all times."""
    measured: dict[TunedShape, GemmConfig | None] = {}
    results = []
    print(
        f"{'GEMM':12} {'rows':>4} {'us':>8} {'TB/s':>5} {'portable':>8} {'cuBLAS':>8} error  config, the second best",
        flush=True,
    )
    for rows, (name, shape) in itertools.product(BLOCKS_M, SHAPES.items()):
        if time.monotonic() > deadline:
            print(f"out of time before {name}, {rows} rows", flush=True)
            return
        result = tune(name, rows)
        print(result.line(), flush=True)
        results.append(dataclasses.asdict(result))
        wins = result.us < result.cublas_us and result.error < 1e-2
        measured[key_of(shape, rows)] = result.config if wins else None
        name_of_file, text = tuned_file(measured)
        (out / name_of_file).write_text(text)
        (out / "kernels.json").write_text(json.dumps(results, indent=1))


def main(description: str | None) -> None:
    """Compile, then tune."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--time-limit-s", type=float, default=240.0)
    arguments = parser.parse_args()
    started = time.monotonic()
    arguments.out.mkdir(parents=True, exist_ok=True)
    count = compile_all()
    print(f"compiled {count} kernels in {time.monotonic() - started:.0f} s", flush=True)
    tune_all(arguments.out, started + arguments.time_limit_s)
    print(f"{time.monotonic() - started:.0f} s", flush=True)
