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

from common.gemm_tuner import L2_BYTES, SHAPES, Shape, random, random_weight
from common.gpu import policy, workspace
from common.layer_tuner import PRODUCTS, tune_model
from common.timing import graph_microseconds
from mini_infer_engine.config.options.mechanisms import Mechanism
from mini_infer_engine.kernels.context import KernelContext
from mini_infer_engine.kernels.gemm.gemm_config import MAX_M, LargeMConfig
from mini_infer_engine.kernels.gemm.gemm_rules import LARGE_TILES, large_m_stages, last_wave_splits
from mini_infer_engine.kernels.gemm.large_m_gemm import large_m_gemm
from mini_infer_engine.kernels.gemm.quantized_weight import QuantizedWeight
from mini_infer_engine.kernels.gemm.tuned_configs import (
    LARGE_M_ROWS,
    TunedConfigs,
    file_name,
    load_tuned_configs,
    tuned_configs_json,
)
from mini_infer_engine.ops.triton_ops import TritonOps

FORMATS = ("int8", "fp8", "int4")
BLOCKS_M = (8, 32, 16, 64)
LARGE_FORMATS = ("int8", "int4")
Config = TypeVar("Config")


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


def compile_all(rows: int, names: tuple[str, ...]) -> None:
    """Candidates of every product with so many rows, in a process for each."""
    works = [[(name, rows, form)] for form, name in itertools.product(LARGE_FORMATS, names)]
    with multiprocessing.get_context("spawn").Pool(len(works)) as pool:
        pool.map(compile_large, works, chunksize=1)


def tune_all(
    out: Path | None, deadline: float, all_rows: tuple[int, ...], model: str = "7b"
) -> Iterator[dict[str, object]]:
    """Every GEMM of a layer with each M and format until the deadline; the file of configs is written as they come.

    all_rows: of BLOCKS_M and LARGE_M_ROWS; none: all of them.
    """
    tuned = load_tuned_configs(policy().profile.name)
    tuned = dataclasses.replace(tuned, device=policy().profile.name)
    for rows in all_rows or (*BLOCKS_M[:1], 256, 512, *BLOCKS_M[1:], 128, 1024, 4096, 2048):
        for line, made in (_tune_few if rows <= MAX_M else _tune_many)(tuned, rows, model):
            tuned = made
            if out is not None:
                (out / file_name(tuned.device)).write_text(tuned_configs_json(tuned))
            yield {"rows": rows} | line
            if time.monotonic() > deadline:
                return


def _tune_few(tuned: TunedConfigs, rows: int, model: str) -> Iterator[tuple[dict[str, object], TunedConfigs]]:
    """Of pdl_gemm. Tiles of eight rows are tuned with one, which most decode steps of one request have."""
    for form in FORMATS:
        for name, config, figures in tune_model(model, form, 1 if rows == BLOCKS_M[0] else rows):
            shape = SHAPES[f"{model} {name}"]
            if config is not None:
                key = (form, shape.n, shape.k, shape.gated, rows)
                tuned = dataclasses.replace(tuned, quantized={**tuned.quantized, key: config})
            found = config and dataclasses.astuple(config)
            yield {"product": name, "format": form, "config": found} | figures, tuned


def _tune_many(tuned: TunedConfigs, rows: int, model: str) -> Iterator[tuple[dict[str, object], TunedConfigs]]:
    """Of large_m_gemm."""
    names = tuple(f"{model} {name}" for name in PRODUCTS)
    compile_all(rows, names)
    for form, name in itertools.product(FORMATS, names):
        shape = SHAPES[name]
        config, figures = tune_large(shape, rows, form)
        if form in LARGE_FORMATS and rows in LARGE_M_ROWS:
            key = (form, shape.weight_rows, shape.k, rows)
            tuned = dataclasses.replace(tuned, large_m={**tuned.large_m, key: config})
        found = config and dataclasses.astuple(config)
        yield {"product": name, "format": form, "config": found} | figures, tuned
