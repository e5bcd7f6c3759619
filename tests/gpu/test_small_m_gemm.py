"""Small-M GEMMs against fp64: odd shapes, every fused epilogue, and every stored tile config."""

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton", reason="needs an NVIDIA GPU, and triton")

from mini_infer_engine.kernels.gemm.gemm_config import MAX_M, PdlGemmConfig, SmallMConfig, portable_block_m
from mini_infer_engine.kernels.gemm.gemm_dispatch import small_m_linear, small_m_linear_add_norm
from mini_infer_engine.kernels.gemm.gemm_rules import small_m_config
from mini_infer_engine.kernels.gemm.tuned_configs import FALLBACK_DEVICE, load_tuned_configs
from mini_infer_engine.kernels.workspace import Workspace
from tests.gpu.device import BF16, DEVICE, FP32, KERNELS, ON_GPU, POLICY, WORKSPACE, cases, error, normal

pytestmark = KERNELS
FP16 = torch.float16
ROUNDING = {FP32: 32.0, BF16: 1.0, FP16: 1.0}
GLUON = pytest.mark.usefixtures("hopper_kernels")
Config = SmallMConfig | PdlGemmConfig
TUNED = load_tuned_configs(FALLBACK_DEVICE)
PARTS: list[dict[str, bool]] = [
    {},
    {"bias": True},
    {"residual": True},
    {"gated": True},
    {"bias": True, "residual": True},
]


def check(
    rows: int,
    columns: int,
    width: int,
    config: Config,
    dtype: torch.dtype,
    *,
    bias: bool = False,
    residual: bool = False,
    gated: bool = False,
) -> None:
    x = normal(rows, 2 * width, dtype=dtype)[:, :width]  # strided rows
    weight = normal(columns * (2 if gated else 1), width, dtype=dtype, seed=1) * width**-0.5
    bias_values = normal(columns, dtype=dtype, seed=2) if bias else None
    residual_values = normal(rows, columns, dtype=dtype, seed=3) if residual else None
    exact = functional.linear(x.double(), weight.double())  # and weights, which are fetched early, are ready
    if bias_values is not None:
        exact = exact + bias_values.double()
    if gated:
        gate, up = exact.chunk(2, dim=-1)
        exact = functional.silu(gate) * up
    if residual_values is not None:
        exact = exact + residual_values.double()
    run = [
        small_m_linear(x, weight, config, workspace=WORKSPACE, bias=bias_values, residual=residual_values, gated=gated)
        for _ in range(2)
    ]
    assert error(run[0], exact) <= ROUNDING[dtype], (rows, config)
    assert torch.equal(run[0], run[1]), "counters were not left at zero, or results depend on timing"


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize(
    ("columns", "width", "dtype"), cases([(50, 96, FP32), (64, 40, FP32)], [(199, 64, BF16), (1001, 1032, BF16)])
)
def test_every_epilogue_at_odd_shapes(columns: int, width: int, dtype: torch.dtype, parts: dict[str, bool]) -> None:
    for programs in (0, 3, 5):  # whole tiles, then programs that end within a tile
        for rows in (0, 1, 5, 16):
            check(rows, columns, width, SmallMConfig(16, 32, programs, 4, 2), dtype, **parts)


@pytest.mark.parametrize("programs", [1, 2, 3, 4, 5, 6, 7, 12, 100])
def test_any_number_of_programs_split_the_work(programs: int) -> None:
    """Four tiles of three steps: programs of one step, of less and of more than a tile, and of several tiles."""
    for gated in (False, True):
        check(3, 64, 96, SmallMConfig(16, 32, programs, 4, 2), FP32, gated=gated)


@pytest.mark.parametrize("rows", cases([2, 16], [17, 31, 32, 33, 63, 64]))
def test_all_row_counts(rows: int) -> None:
    assert rows <= MAX_M
    check(rows, 96, 128, SmallMConfig(32, 32, 4, 4, 3), FP32, residual=True)
    check(rows, 96, 128, SmallMConfig(64, 64, 3, 4, 3), BF16 if ON_GPU else FP32, residual=True)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("rows", "width", "dtype"),
    cases([(1, 96, FP32), (5, 50, FP32)], [(16, 1024, BF16), (3, 3584, BF16), (33, 1024, BF16), (64, 1536, BF16)]),
)
def test_a_deferred_norm_between_two_gemms(rows: int, width: int, dtype: torch.dtype, gated: bool) -> None:
    """residual + x @ weight.T, whose deferred norm the next GEMM finishes."""
    x, residual = normal(rows, 64, dtype=dtype), normal(rows, width, dtype=dtype, seed=1)
    first, second = normal(width, 64, dtype=dtype, seed=2) / 8, normal(192, width, dtype=dtype, seed=3) * width**-0.5
    bias, norm_weight = normal(width, dtype=dtype, seed=4), normal(width, dtype=dtype, seed=5)
    configs: list[tuple[Config, Config]] = [
        (SmallMConfig(16, 32, first_programs, 4, 2), SmallMConfig(32, 64, next_programs, 4, 2))
        for first_programs in (0, 5)
        for next_programs in (0, 5)
    ]
    if POLICY.pdl and dtype == BF16:  # pdl_gemm before itself, then each kernel before the other
        ahead, next_ahead = PdlGemmConfig(64, 64, 1, 2), PdlGemmConfig(32 if gated else 64, 128, 3, 3)
        configs += [(ahead, next_ahead), (PdlGemmConfig(128, 64, 1, 2), next_ahead), (configs[0][0], next_ahead)]
        configs += [(ahead, configs[0][1])]
    for config, next_config in configs:
        out, deferred_norm = small_m_linear_add_norm(
            x, first, config, workspace=WORKSPACE, bias=bias, residual=residual, norm_weight=norm_weight, eps=1e-5
        )
        exact = residual.double() + functional.linear(x.double(), first.double(), bias.double())
        assert error(out, exact) <= ROUNDING[dtype]
        normed = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-5) * norm_weight.double()
        expected = functional.linear(normed, second.double())
        if gated:
            gate, up = expected.chunk(2, dim=-1)
            expected = functional.silu(gate) * up
        actual = small_m_linear(deferred_norm, second, next_config, workspace=WORKSPACE, gated=gated)
        assert error(actual, expected) <= 3 * ROUNDING[dtype], (
            config,
            next_config,
        )  # the deferred norm's rows were rounded, too


@pytest.mark.parametrize(
    ("rows", "columns", "width", "gated", "dtype"),
    cases(
        [(1, 384, 256, False, FP32), (16, 768, 256, True, FP32), (7, 320, 256, False, FP32)],
        [
            (rows, columns, width, gated, BF16)
            for rows in (1, 16, 32, 50, 64)
            for columns, width, gated in ((384, 264, False), (5632, 2048, True), (2560, 4096, False))
        ],
    ),
)
def test_shapes_that_were_never_tuned_have_a_config(
    rows: int, columns: int, width: int, gated: bool, dtype: torch.dtype
) -> None:
    config = small_m_config(portable_block_m(rows), columns, dtype, gated=gated, profile=POLICY.profile)
    assert config is not None
    check(rows, columns, width, config, dtype, gated=gated)


@pytest.mark.parametrize(
    ("columns", "width", "gated", "row_block"),
    cases([], [key for key, config in TUNED.portable.items() if config is not None]),
)
def test_stored_configs(columns: int, width: int, gated: bool, row_block: int) -> None:
    config = TUNED.portable[columns, width, gated, row_block]
    assert config is not None
    # The epilogue that the model's GEMM of this shape has: o and down add the residual, qkv may have a bias.
    check(row_block, columns, width, config, BF16, gated=gated, residual=not gated and columns <= width)
    check(max(1, row_block - 3), columns, width, config, BF16, gated=gated, residual=not gated and columns <= width)


@GLUON
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 16, 17, 32, 33, 64])
def test_pdl_gemm_at_odd_shapes(rows: int, parts: dict[str, bool]) -> None:
    """Fewer steps than stages, more splits than steps, tiles and splits that are not full."""
    pieces = 2 if parts.get("gated") else 1
    for columns, width in ((199, 64), (1001, 1088), (120, 4160)):
        for tall, block_k, splits, stages in ((64, 128, 1, 3), (64, 256, 4, 2), (128, 64, 3, 4)):
            check(rows, columns, width, PdlGemmConfig(tall // pieces, block_k, splits, stages), BF16, **parts)
    check(rows, 264, 512, PdlGemmConfig(64 // pieces, 128, 2, 2), FP16, **parts)


@GLUON
@pytest.mark.parametrize("rows", [1, 16, 32, 50, 64])
@pytest.mark.parametrize(
    ("columns", "width", "gated"), [(384, 256, False), (5632, 2048, True), (2560, 4096, False), (18944, 3584, True)]
)
def test_pdl_gemm_has_a_config_for_every_shape(rows: int, columns: int, width: int, gated: bool) -> None:
    config = POLICY.small_m_config(rows, columns, width, BF16, gated=gated, tma_operands=True)
    assert config is not None
    check(rows, columns, width, config, BF16, gated=gated)


@GLUON
@pytest.mark.parametrize(
    ("columns", "width", "gated", "rows"), [key for key, config in TUNED.with_pdl.items() if config]
)
def test_stored_configs_of_pdl_gemm(columns: int, width: int, gated: bool, rows: int) -> None:
    config = TUNED.with_pdl[columns, width, gated, rows]
    assert config is not None
    check(rows, columns, width, config, BF16, gated=gated, residual=not gated and columns <= width)
    check(max(1, rows // 2 + 1), columns, width, config, BF16, gated=gated)


@pytest.mark.parametrize("rows", cases([5], [40]))
def test_another_runners_unfinished_sums_change_nothing(rows: int) -> None:
    """Two engines in one process may run at the same time: one is in the middle of a split product here."""
    busy, own = Workspace(DEVICE), Workspace(DEVICE)
    busy.counters.fill_(1)
    busy.partials().fill_(float("nan"))
    x, weight = normal(rows, 96), normal(64, 96, seed=1)
    actual = small_m_linear(x, weight, SmallMConfig(16, 32, 12, 4, 2), workspace=own)
    assert error(actual, functional.linear(x.double(), weight.double())) <= ROUNDING[FP32]
    assert not own.counters.any()
    assert bool((busy.counters == 1).all())
    assert bool(busy.partials().isnan().all())
