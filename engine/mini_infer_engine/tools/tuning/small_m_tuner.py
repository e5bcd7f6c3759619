"""Measures small-M GEMMs on this GPU: every plausible config, beside the engine's current choice and cuBLAS."""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from mini_infer_engine.kernels.context import KernelContext
from mini_infer_engine.kernels.device import DeviceProfile
from mini_infer_engine.kernels.gemm.gemm_config import DeferredRMSNorm, PdlGemmConfig, portable_block_m
from mini_infer_engine.kernels.gemm.gemm_dispatch import small_m_linear, small_m_linear_add_norm
from mini_infer_engine.kernels.gemm.gemm_rules import ring_stages
from mini_infer_engine.kernels.gemm.tuned_configs import GemmConfig
from mini_infer_engine.kernels.norm.rms_norm import rms_norm
from mini_infer_engine.kernels.norm.silu_mul import silu_mul
from mini_infer_engine.tools.tuning.products import Product
from mini_infer_engine.tools.tuning.timing import graph_microseconds

BLOCKS_M = (8, 32, 16, 64)
"""The tiles' M that are timed, the most important first."""
_L2_BYTES = 50_000_000
_SQUARE_SUM_PARTS = 64
"""The number of square sums of a row: that of a residual stream of width 4,096 in tiles of 64."""
_MOST_ERROR = 1e-2
_TIMED_AGAIN = 3
"""The number of first candidates that are timed again at the end.

For products above 30 MB, the first candidates took 4 to 12 % longer than in a second timing in 32 of 175 cases; later
candidates, and those of smaller products, in one of 255. The cause is unknown.
"""

Gemm = Callable[[torch.Tensor, GemmConfig], object]


def candidates(product: Product, block_m: int, profile: DeviceProfile) -> list[PdlGemmConfig]:
    """Returns plausible configs: from one program for every third SM to two an SM; one to three rings in an SM."""
    found = []
    for tall, block_k, residents, splits in itertools.product((64, 128), (128, 256), (1, 2, 3), (1, 2, 3, 4, 6)):
        block_n = tall // (2 if product.gated else 1)
        blocks, steps = math.ceil(product.n / block_n), math.ceil(product.k / block_k)
        stages = min(ring_stages(residents, tall + block_m, block_k, profile), math.ceil(steps / splits))
        programs = blocks * splits
        if (tall == 128 and block_k == 256) or stages < 2 or math.ceil(steps / math.ceil(steps / splits)) != splits:
            continue
        if programs >= profile.sm_count // 3 and (splits == 1 or programs <= 2 * profile.sm_count):
            found.append(PdlGemmConfig(block_n, block_k, splits, stages))
    return list(dict.fromkeys(found))


def candidate_times(
    configs: Sequence[PdlGemmConfig], microseconds: Callable[[PdlGemmConfig], float]
) -> list[tuple[float, PdlGemmConfig]]:
    """Returns times and configs, the fastest first, without those that fail. The first ones are timed twice."""
    found: dict[PdlGemmConfig, float] = {}
    for config in (*configs, *configs[:_TIMED_AGAIN]):
        with contextlib.suppress(Exception):  # a config that does not fit the chip is only not a candidate
            found[config] = min(microseconds(config), found.get(config, math.inf))
    return sorted(((us, config) for config, us in found.items()), key=lambda pair: pair[0])


@dataclass(frozen=True, slots=True)
class Measured:
    """The result for one product with this many rows; times in microseconds."""

    product: Product
    rows: int
    before_us: float
    """The time with the engine's current choice."""
    us: float
    """The time with the fastest config."""
    config: GemmConfig | None
    """The fastest config; None: cuBLAS."""
    all_us: tuple[tuple[float, PdlGemmConfig], ...]

    @property
    def gain(self) -> float:
        """The share of the time that is saved."""
        return 1 - self.us / self.before_us


class SmallMTuner:
    """Measures small-M GEMMs on one device."""

    def __init__(self, kernels: KernelContext) -> None:
        self.policy, self._workspace = kernels.policy, kernels.workspace

    def compile(self, jobs: Iterable[tuple[Product, int]]) -> None:
        """Compiles all candidates into Triton's cache."""
        for product, rows in jobs:
            gemm = self._gemm(product, rows)
            weight = torch.empty((product.weight_rows, product.k), dtype=torch.bfloat16, device="cuda")
            for config in candidates(product, rows, self.policy.profile):
                with contextlib.suppress(Exception):  # as above
                    gemm(weight, config)

    def measure(self, product: Product, rows: int) -> Measured:
        """Times every candidate over more weights than fit the L2 cache, then the best few again and longer.

        GEMMs follow each other immediately, as in a decode step, so that overlap with the GEMM before counts. A config
        whose result is wrong is not chosen.
        """
        copies = max(2, math.ceil(5 * _L2_BYTES / product.byte_count))
        weights = [_random(product.weight_rows, product.k) * product.k**-0.5 for _ in range(copies)]
        gemm, cublas = self._gemm(product, rows), _cublas(product, rows)

        def microseconds(config: GemmConfig | None, replays: int) -> float:
            if config is None:
                return graph_microseconds([functools.partial(cublas, each) for each in weights], replays)
            return graph_microseconds([functools.partial(gemm, each, config) for each in weights], replays)

        current = self.policy.small_m_config(
            rows, product.n, product.k, torch.bfloat16, gated=product.gated, tma_operands=True
        )
        first = candidate_times(candidates(product, rows, self.policy.profile), lambda config: microseconds(config, 6))
        before_us = microseconds(current, 15)
        again: list[tuple[float, GemmConfig | None]] = [(microseconds(config, 15), config) for _, config in first[:4]]
        timed = [*again, (before_us, current), (microseconds(None, 15), None)]
        timed.sort(key=lambda pair: pair[0])
        us, config = next(
            (us, config)
            for us, config in timed
            if config is None or self._error(product, rows, config, weights[0]) < _MOST_ERROR
        )
        return Measured(product, rows, before_us, us, config, tuple(first))

    def _gemm(self, product: Product, rows: int) -> Gemm:
        """Returns the GEMM as serving runs it; one that writes the residual stream prepares the next norm."""
        x = _random(rows, product.k)
        if product.writes_residual:
            residual, norm = _random(rows, product.n), _random(product.n)
            return lambda weight, config: small_m_linear_add_norm(
                x, weight, config, workspace=self._workspace, bias=None, residual=residual, norm_weight=norm, eps=1e-6
            )
        sums = torch.ones(_SQUARE_SUM_PARTS, portable_block_m(rows), device="cuda")
        deferred = DeferredRMSNorm(x, sums, 1e-6)
        return lambda weight, config: small_m_linear(
            deferred, weight, config, workspace=self._workspace, gated=product.gated
        )

    def _error(self, product: Product, rows: int, config: GemmConfig, weight: torch.Tensor) -> float:
        """Returns the norm of the difference to fp32 over the norm of the fp32 result."""
        x, residual = _random(rows, product.k), _random(rows, product.n)
        actual = small_m_linear(
            x,
            weight,
            config,
            workspace=self._workspace,
            residual=residual if product.writes_residual else None,
            gated=product.gated,
        ).float()
        exact = x.float() @ weight.float().t()
        if product.gated:
            gate, up = exact.chunk(2, dim=-1)
            exact = functional.silu(gate) * up
        if product.writes_residual:
            exact += residual.float()
        return float((actual - exact).norm() / exact.norm())


def _cublas(product: Product, rows: int) -> Callable[[torch.Tensor], object]:
    """Returns the product by cuBLAS. Beside our kernels it costs a norm of its own, before or after it."""
    x = _random(rows, product.k)
    if product.writes_residual:
        residual, norm = _random(rows, product.n), _random(product.n)
        return lambda weight: rms_norm(residual.addmm_(x, weight.t()), norm, 1e-6)
    norm = _random(product.k)

    def run(weight: torch.Tensor) -> torch.Tensor:
        out = functional.linear(rms_norm(x, norm, 1e-6), weight)
        return silu_mul(out) if product.gated else out

    return run


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)
