"""The tuner of GEMMs with quantised weights: see quantization.py, whose part "products" it is."""

import contextlib
import dataclasses
import functools
import itertools
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch

from common.gemm_tuner import L2_BYTES, SHAPES, SQUARE_SUM_PARTS, Shape, random
from common.gpu import policy, workspace
from common.timing import graph_microseconds
from mini_infer_engine.config.mechanisms import Mechanism
from mini_infer_engine.kernels.context import KernelContext
from mini_infer_engine.kernels.gemm.gemm_config import (
    MAX_M,
    DeferredRMSNorm,
    LargeMConfig,
    PdlGemmConfig,
    portable_block_m,
)
from mini_infer_engine.kernels.gemm.gemm_dispatch import small_m_linear, small_m_linear_add_norm
from mini_infer_engine.kernels.gemm.gemm_rules import LARGE_TILES, large_m_stages, last_wave_splits
from mini_infer_engine.kernels.gemm.large_m_gemm import large_m_gemm
from mini_infer_engine.kernels.gemm.quantized_gemm import quantized_linear
from mini_infer_engine.kernels.gemm.quantized_weight import (
    GROUP,
    QuantizedWeight,
    interleaved,
    packed_nibbles,
    packed_parameters,
)
from mini_infer_engine.kernels.gemm.tuned_configs import (
    LARGE_M_ROWS,
    LargeShape,
    QuantizedShape,
    file_name,
    load_tuned_configs,
    tuned_configs_json,
)
from mini_infer_engine.ops.triton_ops import TritonOps

FORMATS = ("int8", "fp8", "int4")
BLOCKS_M = (8, 32, 16, 64)
LARGE_FORMATS = ("int8", "int4")
Config = TypeVar("Config")


def random_weight(form: str, rows: int, k: int) -> QuantizedWeight:
    """Of one of FORMATS, on the GPU."""
    if form == "int4":
        integers = torch.randint(0, 16, (rows, k), dtype=torch.uint8, device="cuda")
        scales = torch.full((rows, k // GROUP), k**-0.5 / 8, device="cuda")
        return QuantizedWeight(packed_nibbles(integers), packed_parameters(scales, torch.full_like(scales, 8)), k)
    values = torch.randint(-127, 128, (rows, k), device="cuda").to(torch.int8)
    scales = torch.full((rows,), k**-0.5 / 64, device="cuda")
    return QuantizedWeight(interleaved(values if form == "int8" else values.to(torch.float8_e4m3fn)), scales, k)


def candidates(shape: Shape, block_m: int, bits: int) -> list[PdlGemmConfig]:
    """From a program for every second SM to four an SM; rings of which one to four fit."""
    found = []
    profile = policy().profile
    tall = 64
    for block_k, residents, splits in itertools.product((128, 256), (1, 2, 3, 4, 6), (1, 2, 3, 4, 6, 8)):
        if block_k == 256 and shape.k % 256:
            continue
        block_n = tall // (2 if shape.gated else 1)
        tiles, steps = math.ceil(shape.n / block_n), math.ceil(shape.k / block_k)
        kept = math.ceil(steps / splits) * (block_k // GROUP) * tall * 4 if bits == 4 else 0
        ring = profile.sm_shared_memory_bytes // residents - 4096 - kept
        stages = min(ring // (block_k * tall * bits // 8 + block_k * block_m * 2), math.ceil(steps / splits), 12)
        if stages >= 2 and profile.sm_count // 2 <= tiles * splits and (splits == 1 or tiles * splits <= 4 * 132):
            found.append(PdlGemmConfig(block_n, block_k, splits, stages))
    return list(dict.fromkeys(found))


def call(shape: Shape, rows: int) -> Callable[[QuantizedWeight, PdlGemmConfig], object]:
    """The GEMM as serving runs it."""
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


def large_candidates(rows: int, n: int, k: int, bits: int) -> list[LargeMConfig]:
    """All tiles and splits that are not plainly too many, with deep rings and with those of two programs an SM.

    Of a last wave that is split alone: as many splits as fit, and half of them.
    """
    found = []
    profile = policy().profile
    for block_m, block_k in itertools.product(LARGE_TILES, (64, 128)):
        if block_m >= 2 * max(rows, 64) or (block_k == 64 and bits == 4):
            continue
        most_stages = large_m_stages(block_m, block_k, bits=bits, profile=profile)
        most_splits = last_wave_splits(rows, n, k, block_m, profile=profile).stop - 1
        choices = [(splits, False) for splits in (1, 2, 3, 4, 6) if splits == 1 or rows <= 1024]
        choices += [(splits, True) for splits in {most_splits, most_splits // 2} if splits > 1]
        found += [
            LargeMConfig(block_m, block_k, splits, stages, splits_last_wave)
            for splits, splits_last_wave in choices
            for stages in {most_stages, max(2, most_stages // 2)}
        ]
    return found


def fastest(configs: list[Config], microseconds: Callable[[Config, int], float]) -> tuple[float, Config] | None:
    """The best of `configs` and its microseconds; of all it is known roughly, of the first three well. None: none runs.

    microseconds: of a config, from so many replays.
    """
    timed: list[tuple[float, Config]] = []
    for config in configs:
        with contextlib.suppress(Exception):  # a config that does not fit the chip is only not a candidate
            timed.append((microseconds(config, 6), config))
    timed.sort(key=lambda pair: pair[0])
    again = [(microseconds(config, 15), config) for _, config in timed[:3]]
    return min(again, key=lambda pair: pair[0], default=None)


def large_product(x: torch.Tensor, weight: QuantizedWeight, config: LargeMConfig) -> torch.Tensor:
    """As serving runs it."""
    return large_m_gemm(x, weight, config, sm_count=policy().profile.sm_count, workspace=workspace())


def compile_large(works: list[tuple[str, int, str]]) -> None:
    """All of `large_candidates` into the shared cache; shapes of a model share them."""
    torch.set_num_threads(1)
    for name, rows, form in works:
        x, weight = random(rows, SHAPES[name].k), random_weight(form, SHAPES[name].weight_rows, SHAPES[name].k)
        for config in large_candidates(rows, *weight.shape, weight.bits):
            with contextlib.suppress(Exception):  # a config that does not fit the chip is only not a candidate
                large_product(x, weight, config)
        torch.cuda.synchronize()


def tune_large(shape: Shape, rows: int, form: str) -> tuple[LargeMConfig | None, dict[str, float]]:
    """The fastest config of large_m_gemm, None: what runs without it is faster; microseconds of both and of bf16.

    FP8 has no such kernel: of it, microseconds alone.
    """
    x, n, k = random(rows, shape.k), shape.weight_rows, shape.k
    bits = 4 if form == "int4" else 8
    copies = max(2, math.ceil(4 * L2_BYTES / (n * k * bits // 8)))
    weights = [random_weight(form, n, k) for _ in range(copies)]
    ops = TritonOps(KernelContext(policy().without(Mechanism.LARGE_M_GEMM), workspace()))
    wide = [random(n, k) for _ in range(max(2, math.ceil(4 * L2_BYTES / (2 * n * k))))]
    figures = {"bf16 us": graph_microseconds([functools.partial(torch.mm, x, each.t()) for each in wide])}
    del wide
    figures["without us"] = graph_microseconds([functools.partial(ops.quantized, x, each) for each in weights])
    if form not in LARGE_FORMATS:
        return None, figures

    def microseconds(config: LargeMConfig, replays: int) -> float:
        calls = [functools.partial(large_product, x, each, config) for each in weights]
        return graph_microseconds(calls, replays)

    rule = policy().without(Mechanism.TUNED_CONFIGS).large_m_config(x, weights[0])
    if rule is not None:
        figures["rule's us"] = microseconds(rule, 15)
    best = fastest(large_candidates(rows, n, k, bits), microseconds)
    if best is None:
        return None, figures
    tuned_us, config = best
    figures |= {"tuned us": tuned_us, "times bf16": figures["bf16 us"] / tuned_us}
    return config if tuned_us < figures["without us"] else None, figures


def compile_kernels(works: list[tuple[str, int, str]]) -> None:
    """All candidates of some products into the shared cache."""
    torch.set_num_threads(1)
    for name, rows, form in works:
        shape = SHAPES[name]
        weight, gemm = random_weight(form, shape.weight_rows, shape.k), call(shape, rows)
        for config in candidates(shape, rows, weight.bits):
            with contextlib.suppress(Exception):  # a config that does not fit the chip is only not a candidate
                gemm(weight, config)
        torch.cuda.synchronize()


def compile_all(rows: int, names: tuple[str, ...]) -> None:
    """Candidates of every product with so many rows, in a process for each."""
    large = rows > MAX_M
    works = [[(name, rows, form)] for form, name in itertools.product(LARGE_FORMATS if large else FORMATS, names)]
    with multiprocessing.get_context("spawn").Pool(len(works)) as pool:
        pool.map(compile_large if large else compile_kernels, works, chunksize=1)


def tune(shape: Shape, rows: int, form: str) -> tuple[PdlGemmConfig | None, dict[str, float]]:
    """The fastest config, and microseconds: of it, of the rule's, of the kernel for many rows."""
    bits = 4 if form == "int4" else 8
    byte_count = shape.weight_rows * shape.k * bits // 8
    copies = max(2, math.ceil(4 * L2_BYTES / byte_count))
    weights = [random_weight(form, shape.weight_rows, shape.k) for _ in range(copies)]
    x = random(rows, shape.k)
    unfused = functools.partial(quantized_linear, x, scaled_mm=policy().uses_scaled_mm(x, weights[0]))
    figures = {"unfused us": graph_microseconds([functools.partial(unfused, each) for each in weights])}
    gemm = call(shape, rows)

    def microseconds(config: PdlGemmConfig, replays: int) -> float:
        return graph_microseconds([functools.partial(gemm, each, config) for each in weights], replays)

    rule = policy().quantized_config(rows, shape.n, shape.k, weights[0], gated=shape.gated)
    assert rule is not None, "needs a Hopper GPU"
    figures["engine's us"] = microseconds(rule, 15)
    best = fastest(candidates(shape, rows, bits), microseconds)
    if best is None:
        return None, figures
    figures |= {"tuned us": best[0], "TB/s": byte_count / best[0] / 1e6}
    return best[1], figures


def tune_all(
    out: Path | None,
    deadline: float,
    all_rows: tuple[int, ...],
    names: tuple[str, ...] = ("7b gate_up", "7b down", "7b qkv", "7b o"),
) -> Iterator[dict[str, object]]:
    """Every GEMM of a layer with each M and format until the deadline; the file of configs is written as they come.

    all_rows: of BLOCKS_M and LARGE_M_ROWS; none: all of them.
    """
    measured: dict[QuantizedShape, PdlGemmConfig] = {}
    large: dict[LargeShape, LargeMConfig | None] = {}
    compiled: set[int] = set()
    known = load_tuned_configs(policy().profile.name)
    order = all_rows or (*BLOCKS_M[:1], 256, 512, *BLOCKS_M[1:], 128, 1024, 4096, 2048)
    for rows, form, name in itertools.product(order, FORMATS, names):
        if time.monotonic() > deadline:
            return
        if rows not in compiled:
            compiled.add(rows)
            compile_all(rows, names)
        shape = SHAPES[name]
        config: PdlGemmConfig | LargeMConfig | None
        if rows > MAX_M:
            config, figures = tune_large(shape, rows, form)
            if form in LARGE_FORMATS and rows in LARGE_M_ROWS:
                large[form, shape.weight_rows, shape.k, rows] = config
        else:
            config, figures = tune(shape, rows, form)
            if config is not None:
                measured[form, shape.n, shape.k, shape.gated, rows] = config
        made = dataclasses.replace(
            known,
            device=policy().profile.name,
            quantized={**known.quantized, **measured},
            large_m={**known.large_m, **large},
        )
        if out is not None:
            (out / file_name(made.device)).write_text(tuned_configs_json(made))
        yield {
            "product": name,
            "rows": rows,
            "format": form,
            "config": config and dataclasses.astuple(config),
        } | figures
