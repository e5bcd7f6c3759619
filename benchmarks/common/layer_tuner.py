"""The tuner of small-M GEMMs with quantised weights, in a chain of layers: see quantization.py --products.

A kernel begins while the one before it still runs, and what one leaves of an SM's memory the next one fills with
weights: how fast a product is alone says little. So the products of several layers follow each other as in a decode
step, without attention, and one product's config is exchanged at a time.
"""

import contextlib
import itertools
import math
import multiprocessing
import statistics
from collections.abc import Iterator, Mapping
from functools import partial
from multiprocessing.pool import Pool

import torch

from common.gemm_tuner import SHAPES, Shape, random, random_weight
from common.gpu import policy, workspace
from mini_infer_engine.kernels.gemm.gemm_config import (
    DeferredRMSNorm,
    PdlGemmConfig,
    pdl_block_m,
    portable_block_m,
)
from mini_infer_engine.kernels.gemm.gemm_dispatch import small_m_linear, small_m_linear_add_norm
from mini_infer_engine.kernels.gemm.gemm_rules import quantized_stage_bytes
from mini_infer_engine.kernels.gemm.quantized_weight import GROUP
from mini_infer_engine.tools.tuning.timing import graph_microseconds

PRODUCTS = ("gate_up", "down", "qkv", "o")
"""Of a layer, those of most bytes first."""
HEAD = "head"
_LAYER_BYTES = 4 * 50_000_000
"""Of all layers of a chain: several times what the L2 cache holds."""
_PROGRAM_KB = (44, 56, 75, 112, 150, 225)
"""Shared memory of a program: of which five to one are resident on an SM."""
_BEST = 8
"""Configs of a product that are tried again when the others' are better."""

Configs = Mapping[str, PdlGemmConfig]


def candidates(shape: Shape, rows: int, bits: int) -> list[PdlGemmConfig]:
    """From a program for every third SM to four an SM; tiles of 64 rows of weights, and of 128."""
    found = []
    sms, block_m = policy().profile.sm_count, pdl_block_m(rows)
    configs = [(64, 4, block_k, size) for block_k in (128, 256, 512) for size in _PROGRAM_KB]
    configs += [(128, warps, 256, size) for warps in (4, 8) for size in _PROGRAM_KB[2:5]]
    for (tall, warps, block_k, size), splits in itertools.product(configs, (1, 2, 3, 4, 6)):
        block_n = tall // (2 if shape.gated else 1)
        tiles, steps = math.ceil(shape.n / block_n), math.ceil(shape.k / block_k)
        steps_of_split = math.ceil(steps / splits)
        programs = tiles * splits
        if shape.k % block_k or math.ceil(steps / steps_of_split) != splits or (block_k == 512 and block_m > 16):
            continue
        if programs < sms // 3 or (splits > 1 and programs > 4 * sms) or (tall == 128 and block_m > 32):
            continue
        kept = steps_of_split * (block_k // GROUP) * tall * 4 if bits == 4 else 0
        ring = size * 1024 - 2048 - kept
        stages = min(ring // quantized_stage_bytes(tall, block_k, block_m, bits), steps_of_split, 14)
        if stages >= 2:
            found.append(PdlGemmConfig(block_n, block_k, splits, stages, warps))
    return list(dict.fromkeys(found))


class LayerChain:
    """Layers of one model's products with weights of one format."""

    def __init__(self, model: str, form: str, rows: int) -> None:
        self.form, self.rows = form, rows
        self.shapes = {name: SHAPES[f"{model} {name}"] for name in PRODUCTS}
        self.bits = 4 if form == "int4" else 8
        self.bytes = sum(shape.weight_rows * shape.k for shape in self.shapes.values()) * self.bits // 8
        self.weights = [
            {name: random_weight(form, shape.weight_rows, shape.k) for name, shape in self.shapes.items()}
            for _ in range(max(4, math.ceil(_LAYER_BYTES / self.bytes)))
        ]
        hidden = self.shapes["o"].n
        self.x, self.norm, self.bias = random(rows, hidden), random(hidden), random(self.shapes["qkv"].n)
        self.square_sums = torch.ones(hidden // 64, portable_block_m(rows), device="cuda") * 64

    def engine_configs(self) -> dict[str, PdlGemmConfig]:
        """What the engine takes now."""
        found = {}
        for name, shape in self.shapes.items():
            weight = self.weights[0][name]
            config = policy().quantized_config(self.rows, shape.n, shape.k, weight, gated=shape.gated)
            assert config is not None, "needs a Hopper GPU"
            found[name] = config
        return found

    def run(self, configs: Configs) -> torch.Tensor:
        """A decode step's products."""
        residual, x = self.x, DeferredRMSNorm(self.x, self.square_sums, 1e-6)
        linear = partial(small_m_linear, workspace=workspace())
        then_norm = partial(small_m_linear_add_norm, workspace=workspace(), bias=None, norm_weight=self.norm, eps=1e-6)
        for layer in self.weights:
            qkv = linear(x, layer["qkv"], configs["qkv"], bias=self.bias)
            mixed = qkv[:, : self.shapes["o"].k]
            residual, x = then_norm(mixed, layer["o"], configs["o"], residual=residual)
            gated = linear(x, layer["gate_up"], configs["gate_up"], gated=True)
            residual, x = then_norm(gated, layer["down"], configs["down"], residual=residual)
        return residual

    def microseconds(self, configs: Configs, replays: int = 8) -> float:
        """Of one layer."""
        return graph_microseconds([partial(self.run, configs)], replays + 3) / len(self.weights)


def tune_layer(chain: LayerChain, choices: Mapping[str, list[PdlGemmConfig]]) -> tuple[Configs, dict[str, object]]:
    """The fastest configs that were found one after another, and microseconds of a layer: of them, of the engine's, and
    of all choices beside the best of the others so far.
    """
    best: dict[str, PdlGemmConfig] = chain.engine_configs()
    before = us = chain.microseconds(best, 20)
    tried: dict[str, list[tuple[float, PdlGemmConfig]]] = {name: [] for name in PRODUCTS}
    for round_, name in itertools.product(range(2), PRODUCTS):
        again = [config for _, config in sorted(tried[name], key=lambda pair: pair[0])[:_BEST]]
        for config in again if round_ else choices[name]:
            with contextlib.suppress(Exception):  # a config that does not fit the chip is only not a candidate
                found = chain.microseconds({**best, name: config}, 16 if round_ else 6)
                if not round_:
                    tried[name].append((found, config))
                if found < us:
                    us, best = found, {**best, name: config}
        us = chain.microseconds(best, 16)
    us = statistics.median(chain.microseconds(best, 16) for _ in range(3))
    figures: dict[str, object] = {"before us": before, "us": us, "TB/s": chain.bytes / us / 1e6, "tried": tried}
    return best, figures


def tune_head(model: str, form: str, rows: int) -> tuple[PdlGemmConfig | None, dict[str, object]]:
    """The output layer's fastest config, after itself: nothing follows it in a decode step that reads weights."""
    shape = SHAPES[f"{model} {HEAD}"]
    weights = [random_weight(form, shape.weight_rows, shape.k) for _ in range(2)]
    x, sums = random(rows, shape.k), torch.ones(shape.k // 64, portable_block_m(rows), device="cuda")

    def microseconds(config: PdlGemmConfig, replays: int) -> float:
        calls = [
            partial(small_m_linear, DeferredRMSNorm(x, sums, 1e-6), weight, config, workspace=workspace())
            for weight in weights * 2
        ]
        return graph_microseconds(calls, replays)

    engines = policy().quantized_config(rows, shape.n, shape.k, weights[0])
    assert engines is not None, "needs a Hopper GPU"
    before = microseconds(engines, 12)
    tried = []
    for config in head_candidates(model, form, rows):
        with contextlib.suppress(Exception):  # as above
            tried.append((microseconds(config, 8), config))
    us, best = min([*tried, (before, engines)], key=lambda pair: pair[0])
    return best, {"before us": before, "us": us, "tried": tried}


def head_candidates(model: str, form: str, rows: int) -> list[PdlGemmConfig]:
    """Some of `candidates`: so many tiles need no splits."""
    shape = SHAPES[f"{model} {HEAD}"]
    return [config for config in candidates(shape, rows, 4 if form == "int4" else 8) if config.block_k > 128]


Work = tuple[str, str, int, str, list[PdlGemmConfig]]
"""Model, format, rows, product, and configs of it."""


def compile_all(works: list[Work], pool: Pool | None = None) -> None:
    """Launch each kernel once in processes of their own, so that all are in Triton's cache."""
    pieces = [(*work[:4], work[4][begin : begin + 5]) for work in works for begin in range(0, len(work[4]), 5)]
    if pool is not None:
        pool.map(compile_some, pieces, chunksize=1)
        return
    with multiprocessing.get_context("spawn").Pool(min(len(pieces), multiprocessing.cpu_count())) as own:
        own.map(compile_some, pieces, chunksize=1)


def compile_some(work: Work) -> None:
    """A piece of `compile_all`, in one process."""
    torch.set_num_threads(1)
    model, form, rows, name, configs = work
    shape = SHAPES[f"{model} {name}"]
    weight, x = random_weight(form, shape.weight_rows, shape.k), random(rows, shape.k)
    sums = torch.ones(SHAPES[f"{model} o"].n // 64, portable_block_m(rows), device="cuda")
    for config in configs:
        with contextlib.suppress(Exception):  # a config that does not fit the chip is only not a candidate
            if shape.writes_residual:
                residual, norm = random(rows, shape.n), random(shape.n)
                small_m_linear_add_norm(
                    x, weight, config, workspace=workspace(), bias=None, residual=residual, norm_weight=norm, eps=1e-6
                )
            else:
                bias = random(shape.n) if name == "qkv" else None
                deferred = DeferredRMSNorm(x, sums, 1e-6)
                small_m_linear(deferred, weight, config, workspace=workspace(), gated=shape.gated, bias=bias)
    torch.cuda.synchronize()


def tune_model(model: str, form: str, rows: int) -> Iterator[tuple[str, PdlGemmConfig | None, dict[str, object]]]:
    """Each product's config and what was measured of it; figures of a layer stand with its first product."""
    shapes = {name: SHAPES[f"{model} {name}"] for name in PRODUCTS}
    bits = 4 if form == "int4" else 8
    choices = {name: candidates(shape, rows, bits) for name, shape in shapes.items()}
    works = [(model, form, rows, name, configs) for name, configs in choices.items()]
    compile_all([*works, (model, form, rows, HEAD, head_candidates(model, form, rows))])
    configs, figures = tune_layer(LayerChain(model, form, rows), choices)
    for name in PRODUCTS:
        yield name, configs[name], figures if name == PRODUCTS[0] else {}
    yield HEAD, *tune_head(model, form, rows)
