"""pdl_gemm by programs on a CPU: what the kernel says, without threads, its index arithmetic, ring and conversions."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton", reason="needs triton; on a CPU with TRITON_INTERPRET=1")
pytest.importorskip("triton.experimental.gluon", reason="needs a Triton that has Gluon")

from mini_infer_engine.kernels.gemm import pdl_gemm as module
from mini_infer_engine.kernels.gemm.gemm_config import DeferredRMSNorm, PdlGemmConfig, pdl_block_m, portable_block_m
from mini_infer_engine.kernels.gemm.gemm_dispatch import small_m_linear, small_m_linear_add_norm
from mini_infer_engine.kernels.gemm.quantized_weight import dequantized
from mini_infer_engine.kernels.sizes import next_power_of_2
from tests.gpu.device import BF16, INTERPRETED, KERNELS, WORKSPACE, error, normal
from tests.gpu.test_quantized_gemm import random_weight
from tests.support.gluon_on_cpu import Descriptor, Pointer, run_kernel

pytestmark = [*KERNELS, pytest.mark.skipif(not INTERPRETED, reason="for machines without a GPU: TRITON_INTERPRET=1")]
FORMATS = ["int8", "int8-groups", "fp8", "fp8-groups", "int4", "int4-symmetric"]
CONFIGS = [
    PdlGemmConfig(64, 128, 1, 2),
    PdlGemmConfig(64, 256, 3, 2),
    PdlGemmConfig(128, 256, 2, 3, 8),
    PdlGemmConfig(64, 512, 1, 3),
]


class Launches:
    """Runs every launch at once, by `run_kernel`, and knows how each was launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.constants: list[dict[str, Any]] = []
        self._kernels = SimpleNamespace(**vars(module))  # the module, with the kernel that is run
        self._tensors: dict[int, torch.Tensor] = {}
        monkeypatch.setattr(module, "_pdl_gemm", self)
        monkeypatch.setattr(module, "_descriptor", self._descriptor)

    def read(self, *tensors: torch.Tensor) -> None:
        """What descriptors may be made of."""
        self._tensors |= {tensor.data_ptr(): tensor for tensor in tensors}

    def _descriptor(
        self, address: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], block: Sequence[int]
    ) -> Descriptor:
        memory = self._tensors[address]
        assert memory.dtype == dtype
        return Descriptor(memory.as_strided(shape, strides), list(block))

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, launch_pdl: bool, **constants: Any) -> None:
            assert launch_pdl
            self.constants.append(constants | {"warps": num_warps, "x": args[1].block_shape})
            pointers = [Pointer(value) if isinstance(value, torch.Tensor) else value for value in args]
            run_kernel(self._kernels, "_pdl_gemm", (*grid, 1), *pointers, **constants)

        return launch


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return Launches(monkeypatch)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("rows", [1, 2, 3, 9])
def test_interpreted_kernel_equals_the_product(rows: int, form: str, wide: bool, launches: Launches) -> None:
    """Tiles, steps and splits that are not full, fewer steps than stages, bias, gate, residual and deferred norm."""
    n, k = 72, 1152
    x, sums = normal(rows, k, dtype=BF16), torch.rand(5, portable_block_m(rows)) + 0.5
    root = torch.rsqrt(sums[:, :rows].sum(0) / k + 1e-6)[:, None].double()
    both, weight = random_weight(form, 2 * n, k), random_weight(form, n, k)
    bias, residual = normal(n, dtype=BF16, seed=3), normal(rows, n, dtype=BF16)
    launches.read(x, both.values, both.scales, weight.values, weight.scales)
    gate, up = (functional.linear(x.double(), dequantized(both).double()) * root).chunk(2, dim=-1)
    exact = functional.linear(x.double(), dequantized(weight).double(), bias.double()) + residual.double()
    for plain in CONFIGS:
        if k % plain.block_k and weight.is_grouped:
            continue  # the last step would have groups without scales
        config = replace(plain, wide=wide)
        gated = replace(config, block_n=config.block_n // 2)
        made = small_m_linear(DeferredRMSNorm(x, sums, 1e-6), both, gated, workspace=WORKSPACE, gated=True)
        assert error(made, functional.silu(gate) * up) <= 2.0, config
        out, deferred = small_m_linear_add_norm(
            x, weight, config, workspace=WORKSPACE, bias=bias, residual=residual, norm_weight=bias, eps=1e-6
        )
        assert error(out, exact) <= 1.0, config
        assert torch.allclose(deferred.square_sums[:, :rows].sum(0), out.float().square().sum(1), rtol=1e-3)
    tokens = next_power_of_2(rows) if wide else pdl_block_m(rows)
    assert {(launch["WIDE"], launch["x"][1]) for launch in launches.constants} == {(wide, tokens)}
