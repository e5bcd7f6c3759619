"""Products of more than 64 rows with quantised weights on a Hopper GPU, and the same kernel by programs on a CPU.

The CPU computes what the kernel says, without threads: its index arithmetic, its ring, its conversions.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton", reason="needs triton; on a CPU with TRITON_INTERPRET=1")
pytest.importorskip("triton.experimental.gluon", reason="needs a Triton that has Gluon")

from mini_infer_engine.config.options.mechanisms import Mechanism
from mini_infer_engine.kernels.context import KernelContext
from mini_infer_engine.kernels.gemm import large_m_gemm as module
from mini_infer_engine.kernels.gemm.gemm_config import LARGE_TILE_N, LargeMConfig
from mini_infer_engine.kernels.gemm.large_m_gemm import large_m_gemm
from mini_infer_engine.kernels.gemm.large_m_schedule import large_m_schedule
from mini_infer_engine.kernels.gemm.quantized_weight import QuantizedWeight, dequantized
from mini_infer_engine.kernels.sizes import cdiv
from mini_infer_engine.kernels.workspace import Workspace
from mini_infer_engine.ops.triton_ops import TritonOps
from tests.gpu.compiled_for_hopper import properties_of
from tests.gpu.device import BF16, INTERPRETED, KERNELS, POLICY, WORKSPACE, error, normal
from tests.gpu.test_quantized_gemm import GLUON, random_weight
from tests.support.gluon_on_cpu import Descriptor, Pointer, run_kernel

pytestmark = KERNELS
FORMATS = ["int8", "int8-groups", "fp8-groups", "int4", "int4-symmetric"]
CONFIGS = [
    LargeMConfig(64, 128, 1, 2),
    LargeMConfig(128, 128, 1, 4),
    LargeMConfig(128, 128, 3, 3),
    LargeMConfig(256, 128, 2, 2),
]
BYTES_ALONE = [LargeMConfig(128, 64, 2, 4), LargeMConfig(256, 64, 1, 5)]
"""Steps of 64 columns, which neither groups nor halves of bytes have."""
ON_A_CPU = pytest.mark.skipif(not INTERPRETED, reason="for machines without a GPU: TRITON_INTERPRET=1")


Compute = Callable[[torch.Tensor, QuantizedWeight, LargeMConfig, int, torch.Tensor | None], torch.Tensor]
"""Of x, weights, a config, a number of SMs and a bias."""


def on_cpu(
    x: torch.Tensor, weight: QuantizedWeight, config: LargeMConfig, sm_count: int, bias: torch.Tensor | None
) -> torch.Tensor:
    """`large_m_gemm` by `run_kernel`, and the sums of parts by the interpreter, in no more memory than they need."""
    (m, k), n = x.shape, weight.shape[0]
    schedule = large_m_schedule(m, n, k, config, sm_count=sm_count)
    out = torch.full((m, n), float("nan"), dtype=x.dtype)
    partials = torch.full((schedule.partial_sums,), float("nan"))
    run_kernel(
        module, "_large_m_gemm", (schedule.programs, 1, 1),
        Descriptor(weight.values, [LARGE_TILE_N, 64]), Descriptor(x, [config.block_m, 64]), Pointer(weight.scales),
        None if bias is None else Pointer(bias), Pointer(out), Pointer(partials), m, n, schedule.k_steps,
        schedule.whole_tiles, schedule.split_tiles, schedule.steps_of_split, n,
        STAGES=config.stages, GROUPED=weight.is_grouped, BIAS=bias is not None, HAS_SPLITS=config.splits > 1,
        BLOCK_K=config.block_k,
    )  # fmt: skip
    if schedule.split_tiles:
        module._sum_parts[(schedule.split_tiles, cdiv(min(m, config.block_m), 8))](
            partials, bias, out, m, n, schedule.whole_tiles, schedule.split_tiles, n,
            SPLITS=schedule.splits, BLOCK_M=config.block_m, BLOCK_N=LARGE_TILE_N, ROWS=8,
        )  # fmt: skip
    return out


def check(
    m: int, n: int, k: int, form: str, config: LargeMConfig, *, has_bias: bool, compute: Compute, sm_count: int = 132
) -> None:
    x, weight = normal(m, 2 * k, dtype=BF16)[:, :k], random_weight(form, n, k)
    bias = normal(n, dtype=BF16, seed=3) if has_bias else None
    exact = functional.linear(x.double(), dequantized(weight).double(), None if bias is None else bias.double())
    assert error(compute(x, weight, config, sm_count, bias), exact) < 3, config  # groups' scales are rounded to bf16


@ON_A_CPU
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("m", "n", "k"), [(65, 130, 256), (200, 200, 1088), (96, 128, 392)])
def test_interpreted_kernel_equals_the_product(m: int, n: int, k: int, form: str) -> None:
    """Rows, columns and K that fill no tile, an odd number of steps, more splits than steps."""
    for config in [*CONFIGS, *(BYTES_ALONE if form == "int8" else [])]:
        check(m, n, k, form, config, has_bias=config.splits != 2, compute=on_cpu)


SPLIT_LAST_WAVES = [
    (65, 300, 4, LargeMConfig(64, 128, 3, 3, splits_last_wave=True)),
    (65, 300, 4, LargeMConfig(64, 128, 2, 3, splits_last_wave=True)),
    (200, 260, 5, LargeMConfig(128, 128, 4, 2, splits_last_wave=True)),
    (257, 130, 3, LargeMConfig(256, 128, 3, 2, splits_last_wave=True)),
]
"""Rows, rows of weights, SMs, config: last waves of 2 tiles that stay whole, and of 2, 1 and 1 that are split."""


@ON_A_CPU
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("k", [1088, 392])
@pytest.mark.parametrize(("m", "n", "sm_count", "config"), SPLIT_LAST_WAVES)
def test_tiles_of_the_last_wave_may_be_split_alone(
    m: int, n: int, sm_count: int, config: LargeMConfig, k: int, form: str
) -> None:
    """With and without a bias, and a K that fills neither the last step nor the last part."""
    for has_bias in (True, False):
        check(m, n, k, form, config, has_bias=has_bias, compute=on_cpu, sm_count=sm_count)


def on_gpu(
    x: torch.Tensor, weight: QuantizedWeight, config: LargeMConfig, sm_count: int, bias: torch.Tensor | None
) -> torch.Tensor:
    """The kernel, into given memory, twice."""
    made = large_m_gemm(x, weight, config, sm_count=sm_count, workspace=WORKSPACE, bias=bias)
    out = torch.full((x.shape[0], weight.shape[0]), float("nan"), dtype=x.dtype, device=x.device)
    again = large_m_gemm(x, weight, config, sm_count=sm_count, workspace=WORKSPACE, bias=bias, out=out)
    assert again.data_ptr() == out.data_ptr()
    assert torch.equal(made, again), "results depend on timing"
    return made


@GLUON
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("m", [65, 96, 128, 200, 256, 512])
@pytest.mark.parametrize(("n", "k"), [(130, 256), (1000, 1088), (3584, 4096), (256, 392)])
def test_the_kernel_computes_the_product(m: int, n: int, k: int, form: str) -> None:
    for config in [*CONFIGS, *(BYTES_ALONE if form == "int8" else [])]:
        check(m, n, k, form, config, has_bias=config.splits != 2, compute=on_gpu)


@GLUON
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("m", "n", "sm_count", "config"), SPLIT_LAST_WAVES)
def test_the_kernel_splits_the_last_wave(m: int, n: int, sm_count: int, config: LargeMConfig, form: str) -> None:
    for k, has_bias in ((1088, True), (4096, False)):
        check(m, n, k, form, config, has_bias=has_bias, compute=on_gpu, sm_count=sm_count)


@GLUON
def test_a_graph_with_a_split_last_wave_needs_nothing_of_its_memory() -> None:
    """Of the 7B shape's widest product, on the GPU's own number of SMs: partial sums are NaN before each replay."""
    x, weight = normal(256, 3584, dtype=BF16), random_weight("int4", 37888, 3584)
    config, workspace = LargeMConfig(256, 128, 4, 3, splits_last_wave=True), Workspace(x.device)
    sm_count = POLICY.profile.sm_count

    def product() -> torch.Tensor:
        return large_m_gemm(x, weight, config, sm_count=sm_count, workspace=workspace)

    expected, graph = product().clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = product()
    for _ in range(2):
        workspace.partials().fill_(float("nan"))
        made.zero_()
        graph.replay()
        assert torch.equal(made, expected)


@GLUON
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("m", [65, 300, 700])
def test_gemm_results_are_equal_with_and_without_large_m_gemm(m: int, form: str) -> None:
    x, weight = normal(m, 3584, dtype=BF16), random_weight(form, 4608, 3584)
    exact = functional.linear(x.double(), dequantized(weight).double())
    assert POLICY.large_m_config(x, weight) is not None
    with_it = POLICY.without(Mechanism.FP8_BLOCK_GEMM)
    for policy in (with_it, with_it.without(Mechanism.LARGE_M_GEMM)):
        assert error(TritonOps(KernelContext(policy, WORKSPACE)).quantized(x, weight), exact) < 3


PROGRAM = """
import sys
import torch
from tests.gpu.compiled_for_hopper import pretend_hopper, print_properties

pretend_hopper()
from mini_infer_engine.kernels.gemm import large_m_gemm as module

form, block_m, block_k, stages, has_splits = sys.argv[1], *map(int, sys.argv[2:])
n, k, is_int4 = 4096, 4096, form == "int4"
values = torch.empty(n, k // 2 if is_int4 else k, dtype=torch.uint8 if is_int4 else torch.int8)
scales = torch.empty(k // 128, n, dtype=torch.int32) if is_int4 else torch.empty(n)
x, out = torch.empty(256, k, dtype=torch.bfloat16), torch.empty(256, n, dtype=torch.bfloat16)
print_properties(module._large_m_gemm.warmup(
    module._descriptor(values.data_ptr(), values.dtype, tuple(values.shape), values.stride(), 128),
    module._descriptor(x.data_ptr(), x.dtype, tuple(x.shape), x.stride(), block_m),
    scales, None, out, torch.empty(4), 256, n, k // block_k, 132, 20, 8, n, STAGES=stages, GROUPED=is_int4,
    BIAS=False, HAS_SPLITS=bool(has_splits), BLOCK_K=block_k, num_warps=8, grid=(1, 1, 1)))
"""


@pytest.mark.parametrize("has_splits", [False, True])
@pytest.mark.parametrize(
    ("form", "block_m", "block_k", "stages"),
    [("int8", 128, 128, 4), ("int8", 256, 64, 5), ("int4", 128, 128, 5), ("int4", 256, 128, 3)],
)
def test_weights_are_operands_in_registers_and_products_overlap(
    form: str, block_m: int, block_k: int, stages: int, has_splits: bool, tmp_path: Path
) -> None:
    """Compiled for Hopper, with no GPU: wgmma of 16 columns each, of two steps, none waits for the one before."""
    properties = properties_of(PROGRAM, form, block_m, block_k, stages, int(has_splits), cache=tmp_path)
    assert properties.products == properties.from_registers == 2 * block_k // 16
    assert properties.shared_bytes <= 227 << 10
    assert (properties.is_serialized, properties.spilled_bytes) == (False, 0)
