"""GEMMs with quantised weights against fp64 products of the weights that they stand for, and whole models."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton", reason="needs triton, and an NVIDIA GPU or TRITON_INTERPRET=1")

from mini_infer_engine.config.options.mechanisms import Mechanism
from mini_infer_engine.kernels.context import KernelContext
from mini_infer_engine.kernels.gemm.fp8_block_gemm import fp8_block_linear, rounded_groups_of_rows
from mini_infer_engine.kernels.gemm.gemm_config import PdlGemmConfig, W8A8GemmConfig, pdl_block_m
from mini_infer_engine.kernels.gemm.gemm_dispatch import small_m_linear, small_m_linear_add_norm
from mini_infer_engine.kernels.gemm.gemm_rules import FP8_BLOCK_TILE, INT8_TILES, quantized_gemm_config
from mini_infer_engine.kernels.gemm.int8_gemm import int8_linear
from mini_infer_engine.kernels.gemm.quantized_gemm import quantized_linear, reordered, widened
from mini_infer_engine.kernels.gemm.quantized_weight import (
    GROUP,
    QuantizedWeight,
    column_order,
    dequantized,
    interleaved,
    packed_nibbles,
    packed_parameters,
)
from mini_infer_engine.ops.triton_ops import TritonOps
from tests.gpu.device import BF16, DEVICE, FP32, INTERPRETED, KERNELS, ON_GPU, POLICY, WORKSPACE, cases, error, normal
from tests.gpu.runs import make_engine, make_runner, make_settings, mixed_requests, texts
from tests.support.fp8_checkpoints import quantize_folder as quantize_to_fp8
from tests.support.integer_checkpoints import FORMATS as INTEGER_FORMATS
from tests.support.integer_checkpoints import quantize_folder as quantize_to_integers
from tests.support.tiny_models import PageDealer, reference_logits, run_chunks, save_tiny_model

pytestmark = KERNELS
GLUON = pytest.mark.usefixtures("hopper_kernels")
TOKENS = [(position * 37 + 11) % 190 + 5 for position in range(90)]
FORMATS = ["int8", "int8-groups", "fp8", "fp8-groups", "int4", "int4-symmetric"]
PARTS: list[dict[str, bool]] = [{}, {"bias": True}, {"residual": True}, {"gated": True}]


def random_weight(form: str, n: int, k: int, seed: int = 1) -> QuantizedWeight:
    """Every value of a format may occur; about the size of a model's weights."""
    dice = torch.Generator().manual_seed(seed)
    groups = -(-k // GROUP)
    if form.startswith("int4"):
        integers = torch.randint(0, 16, (n, k), generator=dice, dtype=torch.uint8)
        zeros = torch.randint(0, 16, (n, groups), generator=dice)
        zeros = torch.full_like(zeros, 8) if form == "int4-symmetric" else zeros
        scales = (torch.rand((n, groups), generator=dice) + 0.5) * k**-0.5 / 8
        return QuantizedWeight(packed_nibbles(integers).to(DEVICE), packed_parameters(scales, zeros).to(DEVICE), k)
    if form.startswith("int8"):
        values = torch.randint(-128, 128, (n, k), generator=dice).to(torch.int8)
        step = k**-0.5 / 64
    else:
        small = torch.rand((n, k), generator=dice) < 0.1  # subnormal numbers
        wide = torch.randn((n, k), generator=dice) * torch.where(small, 0.004, 100.0)
        values, step = wide.clamp(-448, 448).to(torch.float8_e4m3fn), k**-0.5 / 64
    scales = (torch.rand((groups, n) if "groups" in form else (n,), generator=dice) + 0.5) * step
    return QuantizedWeight(interleaved(values).to(DEVICE), scales.to(DEVICE), k)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "k", "dtype"),
    cases(
        [(3, 40, 200, FP32), (0, 40, 128, FP32), (70, 40, 128, FP32)],
        [
            (1, 3584, 3584, BF16),
            (40, 200, 704, BF16),
            (200, 640, 1152, BF16),
            (300, 640, 1024, BF16),
            (700, 640, 1024, BF16),
            (70, 96, 160, FP32),
        ],
    ),
)
def test_the_product_is_that_of_the_dequantised_weights(
    m: int, n: int, k: int, dtype: torch.dtype, has_bias: bool, form: str
) -> None:
    x, weight = normal(m, 2 * k, dtype=dtype)[:, :k], random_weight(form, n, k)
    bias = normal(n, dtype=dtype, seed=3) if has_bias else None
    exact = functional.linear(x.double(), dequantized(weight).double(), None if bias is None else bias.double())
    # W8A8 rounds activations to four bits; other products round what they multiply with once.
    is_w8a8 = form == "fp8" and m > 64 and dtype == BF16
    limit = 0.03 / torch.finfo(dtype).eps if is_w8a8 else 3 if dtype == BF16 else 64
    scaled_mm = POLICY.uses_scaled_mm(x, weight)
    assert error(quantized_linear(x, weight, scaled_mm=scaled_mm, bias=bias), exact) < limit
    out = torch.full((m, n), float("nan"), dtype=dtype, device=DEVICE)
    made = quantized_linear(x, weight, scaled_mm=scaled_mm, bias=bias, out=out)
    assert made.data_ptr() == out.data_ptr()
    assert error(out, exact) < limit


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("k", [256, 200])
def test_widened_weights_and_reordered_rows_agree(k: int, form: str) -> None:
    weight, x = random_weight(form, 70, k), normal(3, k)
    order = column_order(weight.bits).to(DEVICE)
    rows, padded_k = reordered(x, weight)[0], -(-k // GROUP) * GROUP
    expected = functional.pad(x, (0, padded_k - k)).view(3, -1, GROUP)[:, :, order].flatten(1)
    assert torch.equal(rows, expected)
    exact = functional.linear(x.double(), dequantized(weight).double())
    assert error(functional.linear(rows.double(), widened(weight, FP32).double()).float(), exact) < 64


def test_rows_in_fp8_keep_their_largest_value() -> None:
    weight = random_weight("fp8", 16, 256)
    x = (torch.arange(512, device=DEVICE) % 15 - 7.0).view(2, 256) * torch.tensor([[1.0], [64.0]], device=DEVICE)
    rows, scales = reordered(x, weight, to=torch.float8_e4m3fn)
    plain, _ = reordered(x, weight)
    assert rows.dtype == torch.float8_e4m3fn
    assert torch.allclose(scales, torch.tensor([[7.0], [448.0]], device=DEVICE) / 448)
    assert torch.allclose(rows.float() * scales, plain, rtol=1e-6 if ON_GPU else 0.5)  # the interpreter rounds wrongly


def test_rows_in_int8_keep_their_largest_value() -> None:
    weight = random_weight("int8", 16, 256)
    x = (torch.arange(512, device=DEVICE) % 15 - 7.0).view(2, 256) * torch.tensor([[1.0], [64.0]], device=DEVICE)
    rows, scales = reordered(x, weight, to=torch.int8)
    plain, _ = reordered(x, weight)
    assert rows.dtype == torch.int8
    assert torch.allclose(scales, torch.tensor([[7.0], [448.0]], device=DEVICE) / 127)
    assert ((rows.float() * scales - plain).abs() <= scales * 0.501).all()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "k", "dtype"), cases([(70, 40, 200, FP32)], [(65, 3584, 512, BF16), (300, 1040, 1088, BF16)])
)
def test_w8a8_is_the_product_of_rounded_rows(m: int, n: int, k: int, dtype: torch.dtype, has_bias: bool) -> None:
    x, weight = normal(m, 2 * k, dtype=dtype)[:, :k], random_weight("int8", n, k)
    bias = normal(n, dtype=dtype, seed=3) if has_bias else None
    scales = x.float().abs().amax(1, keepdim=True) / 127
    rounded = ((x.float() / scales + 0.5).floor() * scales).double()
    exact = functional.linear(rounded, dequantized(weight).double(), None if bias is None else bias.double())
    unrounded = functional.linear(x.double(), dequantized(weight).double(), None if bias is None else bias.double())
    for policy in (POLICY, POLICY.without(Mechanism.INT8_GEMM)):
        ops = TritonOps(KernelContext(policy, WORKSPACE))
        out = torch.full((m, n), float("nan"), dtype=dtype, device=DEVICE)
        actual = ops.quantized(x, replace(weight, int8_activations=True), bias, out)
        assert actual.data_ptr() == out.data_ptr()
        assert error(actual, exact) < (2 if dtype == BF16 else 5e4)  # single values may be rounded to the other side
        assert error(actual, unrounded) * torch.finfo(dtype).eps < 0.02


@pytest.mark.parametrize("tile", INT8_TILES)
@pytest.mark.parametrize(
    ("m", "n", "k", "dtype"), cases([(200, 300, 200, FP32)], [(1100, 1040, 1088, BF16), (4096, 3584, 3584, BF16)])
)
def test_each_tile_of_int8_has_the_products_of_the_same_integers(
    tile: tuple[int, int, int], m: int, n: int, k: int, dtype: torch.dtype
) -> None:
    """More tiles of M than are neighbours, tiles that are not full."""
    x, weight = normal(m, k, dtype=dtype), random_weight("int8", n, k)
    values, x_scales = reordered(x, weight, to=torch.int8)
    sums = values.double() @ weight.values.double().t()
    exact = sums * x_scales.double() * weight.scales.double()
    block_m, block_n, warps = tile
    actual = int8_linear(x, weight, W8A8GemmConfig(block_m, block_n, 128, warps, 3))
    assert error(actual, exact) < (1 if dtype == BF16 else 8)


def test_groups_of_rows_in_fp8_keep_their_largest_value() -> None:
    weight = random_weight("fp8-groups", 16, 200)
    x = normal(3, 200) * torch.tensor([[1.0], [100.0], [0.0]], device=DEVICE)
    rows, scales = rounded_groups_of_rows(x)
    plain, _ = reordered(x, weight)
    assert rows.shape == plain.shape == (3, 256)
    maxima = functional.pad(x, (0, 56)).view(3, 2, GROUP).abs().amax(2)
    assert torch.allclose(scales, (maxima / 448).clamp(min=1e-12))
    widened_rows = rows.float() * scales.repeat_interleave(GROUP, 1)
    # e4m3 has three bits after the leading one; the interpreter rounds wrongly.
    assert torch.allclose(widened_rows, plain, rtol=1 / 15 if ON_GPU else 0.5, atol=float(maxima.max()) / 448)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "k", "dtype"), cases([(70, 140, 200, FP32)], [(65, 3584, 512, BF16), (1100, 1040, 1088, BF16)])
)
def test_fp8_by_blocks_adds_each_group_with_both_scales(
    m: int, n: int, k: int, dtype: torch.dtype, has_bias: bool
) -> None:
    x, weight = normal(m, 2 * k, dtype=dtype)[:, :k], random_weight("fp8-groups", n, k)
    bias = normal(n, dtype=dtype, seed=3) if has_bias else None
    values, scales = rounded_groups_of_rows(x)
    rows = values.double().view(m, -1, GROUP) * scales.double().unsqueeze(2)
    columns = weight.values.double().view(n, -1, GROUP) * weight.scales.double().t().unsqueeze(2)
    exact = rows.flatten(1) @ columns.flatten(1).t()
    exact = exact if bias is None else exact + bias.double()
    block_m, block_n, warps = FP8_BLOCK_TILE
    out = torch.full((m, n), float("nan"), dtype=dtype, device=DEVICE)
    config = W8A8GemmConfig(block_m, block_n, GROUP, warps, 3)
    assert fp8_block_linear(x, weight, config, bias=bias, out=out).data_ptr() == out.data_ptr()
    # A group is four instructions of tensor cores, each of which cuts its sum to 14 bits.
    assert error(out, exact) < (2 if dtype == BF16 else 4 * 2**10 if ON_GPU else 8)


def check_pdl(
    m: int, n: int, k: int, weight: QuantizedWeight, config: PdlGemmConfig, *, bias: bool = False,
    residual: bool = False, gated: bool = False
) -> None:  # fmt: skip
    x = normal(m, 2 * k, dtype=BF16)[:, :k]
    bias_values = normal(n, dtype=BF16, seed=2) if bias else None
    residual_values = normal(m, n, dtype=BF16, seed=3) if residual else None
    exact = functional.linear(x.double(), dequantized(weight).double())
    exact = exact if bias_values is None else exact + bias_values.double()
    if gated:
        gate, up = exact.chunk(2, dim=-1)
        exact = functional.silu(gate) * up
    exact = exact if residual_values is None else exact + residual_values.double()
    run = [
        small_m_linear(x, weight, config, workspace=WORKSPACE, bias=bias_values, residual=residual_values, gated=gated)
        for _ in range(2)
    ]
    assert error(run[0], exact) <= 1.0, config
    assert torch.equal(run[0], run[1]), "counters were not left at zero, or results depend on timing"


@GLUON
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9, 32, 64])
def test_pdl_gemm_widens_weights_in_registers(rows: int, wide: bool, parts: dict[str, bool], form: str) -> None:
    """Fewer steps than stages, more splits than steps, tiles and splits that are not full, K of half a group more."""
    pieces = 2 if parts.get("gated") else 1
    for n, k in ((208, 128), (1008, 1088), (120, 4096)):
        weight = random_weight(form, n * pieces, k)
        for tall, block_k, splits, stages, warps in (
            (64, 128, 1, 3, 4), (64, 256, 4, 2, 4), (128, 128, 3, 4, 4), (128, 256, 2, 2, 8)
        ):  # fmt: skip
            grouped_beyond = weight.is_grouped and -(-k // GROUP) * GROUP % block_k
            if grouped_beyond or (tall == 128 and rows > 32):
                continue
            config = PdlGemmConfig(tall // pieces, block_k, splits, stages, warps, wide)
            check_pdl(rows, n, k, weight, config, **parts)


@GLUON
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("form", ["int8", "fp8", "fp8-groups", "int4"])
@pytest.mark.parametrize("size", [1e-5, 1e5])
def test_small_and_large_activations_keep_their_precision(size: float, form: str, wide: bool) -> None:
    """Weights are widened to a power of two of what they are: sums of products neither vanish nor overflow."""
    weight, x = random_weight(form, 128, 1024), (normal(2, 1024, dtype=FP32) * size).to(BF16)
    exact = functional.linear(x.double(), dequantized(weight).double())
    config = PdlGemmConfig(64, 256, 1, 3, wide=wide)
    actual = small_m_linear(x, weight, config, workspace=WORKSPACE)
    assert float((actual.double() - exact).norm() / exact.norm()) < 4e-3


@GLUON
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("rows", [1, 16, 17, 64])
@pytest.mark.parametrize(
    ("n", "k", "gated"), [(384, 256, False), (3584, 18944, False), (4608, 3584, False), (18944, 3584, True)]
)
def test_the_rule_has_a_config_for_every_shape(n: int, k: int, gated: bool, rows: int, form: str) -> None:
    weight = random_weight(form, n * (2 if gated else 1), k)
    config = quantized_gemm_config(
        pdl_block_m(rows), n, k, bits=weight.bits, grouped=weight.is_grouped, gated=gated, profile=POLICY.profile
    )
    assert POLICY.quantized_config(rows, n, k, weight, gated=gated) is not None
    check_pdl(rows, n, k, weight, config, gated=gated)


@GLUON
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("rows", [1, 33])
def test_a_deferred_norm_between_two_products(rows: int, form: str) -> None:
    """residual + x @ weight.T, whose deferred norm the next product finishes."""
    first, second = random_weight(form, 1024, 512, 2), random_weight(form, 2 * 384, 1024, 3)
    x, residual = normal(rows, 512, dtype=BF16), normal(rows, 1024, dtype=BF16, seed=4)
    norm_weight = normal(1024, dtype=BF16, seed=5)
    out, deferred_norm = small_m_linear_add_norm(
        x, first, PdlGemmConfig(64, 128, 2, 2), workspace=WORKSPACE, bias=None, residual=residual,
        norm_weight=norm_weight, eps=1e-5
    )  # fmt: skip
    exact = residual.double() + functional.linear(x.double(), dequantized(first).double())
    assert error(out, exact) <= 1.0
    normed = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-5) * norm_weight.double()
    gate, up = functional.linear(normed, dequantized(second).double()).chunk(2, dim=-1)
    actual = small_m_linear(deferred_norm, second, PdlGemmConfig(32, 128, 1, 3), workspace=WORKSPACE, gated=True)
    assert error(actual, functional.silu(gate) * up) <= 3.0


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("m", "n", "k", "dtype"), cases([(70, 40, 128, FP32)], [(65, 3584, 512, BF16), (200, 768, 1088, BF16)])
)
def test_more_rows_than_a_small_gemm_has(m: int, n: int, k: int, dtype: torch.dtype, form: str) -> None:
    ops = TritonOps(KernelContext(POLICY, WORKSPACE))
    x, weight, bias = normal(m, k, dtype=dtype), random_weight(form, n, k), normal(n, dtype=dtype, seed=3)
    exact = functional.linear(x.double(), dequantized(weight).double(), bias.double())
    limit = 0.04 / torch.finfo(dtype).eps if form.startswith("fp8") and dtype == BF16 else 3 if dtype == BF16 else 64
    assert error(ops.quantized(x, weight, bias), exact) < limit


ON_A_GPU = pytest.mark.skipif(INTERPRETED, reason="whole models are too slow for the interpreter: needs an NVIDIA GPU")
MAKERS: dict[str, Callable[[Path], dict[str, torch.Tensor]]] = {
    "fp8-channel": lambda folder: quantize_to_fp8(folder, "compressed-channel"),
    "gptq": lambda folder: quantize_to_integers(folder, "gptq"),
    "w8a8": lambda folder: quantize_to_integers(folder, "w8a8"),
    "awq": lambda folder: quantize_to_integers(folder, "awq"),
}


@ON_A_GPU
@pytest.mark.parametrize("kind", ["int8", "fp8", "int4", "w8a8-int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_rounded_on_load_is_that_of_torch(kind: str, dtype: str, tmp_path: Path) -> None:
    """The kernels against torch's products over the same packed weights: chunks of many, of few and of one token."""
    save_tiny_model(tmp_path, "qwen2", head_dim=32, hidden_size=256, intermediate_size=384)
    changes = {"dtype": dtype, "quantization": kind, "enforce_eager": True, "page_size": 16}
    expected, actual = (
        run_chunks(runner, TOKENS, PageDealer(runner).table(90), [33, 1, 56])
        for runner in (
            make_runner(make_settings(tmp_path, attention_backend="torch", **changes)),
            make_runner(make_settings(tmp_path, **changes)),
        )
    )
    difference, scale = (actual - expected).abs(), float(expected.abs().max())
    if dtype == "float32":
        assert float(difference.max()) <= 1e-3 * scale
    else:  # layers of so wide weights enlarge what bf16 rounds: single logits differ by a tenth
        assert float(difference.float().mean()) <= 0.02 * scale


@ON_A_GPU
@pytest.mark.parametrize("kind", ["int8", "fp8", "int4", "w8a8-int8"])
def test_graphs_and_single_passes_make_the_same_text(kind: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3", head_dim=64, hidden_size=256, intermediate_size=384)
    made = []
    for eager in (False, True):
        settings = make_settings(tmp_path, dtype="bfloat16", quantization=kind, enforce_eager=eager)
        made.append(texts(make_engine(settings, make_runner(settings)), mixed_requests(12, 199, 100)))
    same = sum(first == second for first, second in zip(*made, strict=True))
    assert same >= len(made[0]) * 3 // 4, "rows of other passes round differently, most texts are the same"


@ON_A_GPU
def test_a_checkpoint_for_w8a8_rounds_activations_of_many_rows(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, "qwen2", head_dim=32, hidden_size=256, intermediate_size=384)
    model.load_state_dict(MAKERS["w8a8"](tmp_path), strict=False)
    expected = reference_logits(model, TOKENS)
    runner = make_runner(make_settings(tmp_path, enforce_eager=True, page_size=16))
    actual = run_chunks(runner, TOKENS, PageDealer(runner).table(90), [90]).cpu()
    difference = (actual - expected).abs()
    assert float(difference.max()) > 1e-3
    assert float(difference.mean()) < 0.05 * float(expected.abs().max())


@ON_A_GPU
@pytest.mark.parametrize("maker", MAKERS)
def test_checkpoints_stay_packed_where_their_groups_fit(
    maker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for form in ("gptq", "awq"):
        monkeypatch.setitem(INTEGER_FORMATS[form], "group_size", GROUP)
    model = save_tiny_model(tmp_path, "qwen2", head_dim=32, hidden_size=256, intermediate_size=384)
    model.load_state_dict(MAKERS[maker](tmp_path), strict=False)
    expected = reference_logits(model, TOKENS)
    runner = make_runner(make_settings(tmp_path, enforce_eager=True, page_size=16))
    layer = runner.worker.model.layers[0].mlp.down_proj
    assert type(layer.method).__name__ == "PackedMethod"
    actual = run_chunks(runner, TOKENS, PageDealer(runner).table(90), [33, 1, 56]).cpu()
    assert (actual - expected).abs().max() <= 1e-3
