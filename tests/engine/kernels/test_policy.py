"""All kernel choices as tables: what an H200 was measured with stays, other GPUs have choices that fit them."""

import itertools
import json
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mini_infer_engine.config.options.mechanisms import Mechanism
from mini_infer_engine.kernels.attention import attention_config
from mini_infer_engine.kernels.attention.attention_config import HopperPrefillConfig, PrefillShape
from mini_infer_engine.kernels.device import DeviceProfile
from mini_infer_engine.kernels.gemm import gemm_rules
from mini_infer_engine.kernels.gemm.gemm_config import LargeMConfig, PdlGemmConfig, SmallMConfig
from mini_infer_engine.kernels.gemm.large_m_schedule import large_m_schedule
from mini_infer_engine.kernels.gemm.quantized_weight import QuantizedWeight
from mini_infer_engine.kernels.gemm.tuned_configs import load_tuned_configs
from mini_infer_engine.kernels.moe.expert_tiles import ExpertTiles, Tile
from mini_infer_engine.kernels.policy import KernelPolicy, kernel_policy
from tests.engine.kernels.profiles import H100, H100_PCIE, H200, H200_OTHER_TRITON, L4

BF16, FP32 = torch.bfloat16, torch.float32
CHOICES: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "h200_choices.json").read_text())
"""What the engine chose on an H200 when its speed was measured, for all shapes of benchmarks/common/models.py."""


def policy_of(profile: DeviceProfile, *disabled: Mechanism) -> KernelPolicy:
    return KernelPolicy(profile, frozenset(disabled), load_tuned_configs(profile.name))


ON_H200 = policy_of(H200)


def brief(config: Any) -> list[Any] | None:
    """Without fields that no config of unquantised weights has."""
    if isinstance(config, PdlGemmConfig):
        assert (config.warps, config.wide) == (4, False)
        return ["PdlGemmConfig", config.block_n, config.block_k, config.splits, config.stages]
    return None if config is None else [type(config).__name__, *astuple(config)]


@pytest.mark.parametrize("product", CHOICES["gemm"])
def test_h200_gemm_configs_equal_the_measured_ones(product: str) -> None:
    n, k = (int(part.split("=")[1]) for part in product.split()[:2])
    gated, expected = "gated" in product, CHOICES["gemm"][product]
    made = {
        "pdl": [ON_H200.small_m_config(m, n, k, BF16, gated=gated, tma_operands=True) for m in CHOICES["M"]],
        "portable": [ON_H200.small_m_config(m, n, k, BF16, gated=gated) for m in CHOICES["M"]],
        "fp32": [ON_H200.small_m_config(m, n, k, FP32, gated=gated) for m in CHOICES["M"]],
    }
    for name, configs in made.items():
        if name != "pdl" or k % 64 == 0:
            assert [brief(config) for config in configs] == expected[name], name
    assert [ON_H200.k_splits(m, n, k) for m in CHOICES["M of k_splits"]] == expected["k_splits"]


@pytest.mark.parametrize("heads", CHOICES["attention"])
def test_h200_attention_configs_equal_the_measured_ones(heads: str) -> None:
    q_heads, kv_heads, head_dim = (int(part.split()[0]) for part in heads.split(", "))
    expected = CHOICES["attention"][heads]
    for tokens, sequences, longest_key, on_hopper, *flash_attention_2 in expected["prefill"]:
        shape = PrefillShape(BF16, BF16, tokens, sequences, q_heads, kv_heads, head_dim, 128, None, longest_key)
        chosen = ON_H200.prefill_config(shape)
        assert isinstance(chosen, HopperPrefillConfig) is on_hopper, shape
        assert chosen.programs == 132 or not on_hopper
        assert list(astuple(ON_H200.flash_attention_2_config(shape))) == flash_attention_2, shape
    for rows, *expected_config in expected["decode"]:
        config = ON_H200.decode_config(rows, kv_heads)
        actual = [config.block_tokens, config.warps, config.stages, config.target_programs, config.programs_per_row]
        assert [*actual, config.pdl] == expected_config, rows


def quantized(form: str, n: int, k: int, *, int8_activations: bool = False) -> QuantizedWeight:
    """Without memory."""
    groups = (k // 128, n)
    with torch.device("meta"):
        if form == "int4":
            return QuantizedWeight(torch.empty(n, k // 2, dtype=torch.uint8), torch.empty(groups, dtype=torch.int32), k)
        dtype = torch.int8 if form.startswith("int8") else torch.float8_e4m3fn
        scales = torch.empty(groups if form.endswith("-groups") else (n,))
        return QuantizedWeight(torch.empty(n, k, dtype=torch.uint8).view(dtype), scales, k, int8_activations)


@pytest.mark.parametrize(
    ("form", "n", "k", "m", "is_wide"),
    [
        *((form, 3584, 18944, 1, True) for form in ("int8", "fp8", "int4")),
        ("int4", 4096, 4096, 1, True),
        *((form, 4096, 4096, 1, False) for form in ("int8", "fp8")),
        *((form, 3584, 18944, m, False) for form in ("int8", "fp8", "int4") for m in (32, 64)),
    ],
)
def test_wide_panels_are_used_for_the_measured_shapes(form: str, n: int, k: int, m: int, is_wide: bool) -> None:
    """By the table and by the rule; switched off, nothing else changes."""
    weight, off = quantized(form, n, k), policy_of(H200, Mechanism.WIDE_PANELS)
    config = ON_H200.quantized_config(m, n, k, weight)
    assert config is not None
    assert config.wide is is_wide
    assert off.quantized_config(m, n, k, weight) == replace(config, wide=False)


@pytest.mark.parametrize("form", ["int8", "int8-groups", "fp8-groups", "int4"])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (3584, 3584), (37888, 3584), (3584, 18944), (1024, 1024)])
@pytest.mark.parametrize("m", [65, 128, 200, 256, 512, 1024])
def test_large_m_integer_gemm_configs_fit_an_h200(m: int, n: int, k: int, form: str) -> None:
    weight = quantized(form, n, k)
    config = ON_H200.large_m_config(torch.empty(m, k, dtype=BF16, device="meta"), weight)
    assert config is not None
    assert config.block_m <= 2 * max(64, m)
    assert config.block_k == 128 or form == "int8"
    assert config.stages >= 2
    stage_bytes = config.block_k * (128 * weight.bits // 8 + 2 * config.block_m)
    assert config.stages * stage_bytes < H200.shared_memory_bytes
    most = ON_H200.large_m_config(torch.empty(128 << (m - 1).bit_length() - 7, k, dtype=BF16, device="meta"), weight)
    assert m < 128 or config == most, "each number of rows would compile a kernel of its own"


def test_another_gemm_is_chosen_when_large_m_gemm_is_unsupported() -> None:
    def config(policy: KernelPolicy, form: str, m: int, dtype: torch.dtype = BF16, **kinds: bool) -> Any:
        return policy.large_m_config(
            torch.empty(m, 3584, dtype=dtype, device="meta"), quantized(form, 4608, 3584, **kinds)
        )

    assert config(ON_H200, "int8", 65) is not None
    assert config(ON_H200, "int8", 64) is None, "a small product"
    assert config(ON_H200, "int8", 65, FP32) is None
    assert config(ON_H200, "int8", 65, int8_activations=True) is None, "W8A8"
    assert config(ON_H200, "fp8", 65) is None, "W8A8"
    assert config(ON_H200, "int4", 4096) is None, "a copy for cuBLAS"
    assert config(policy_of(H200, Mechanism.LARGE_M_GEMM), "int8", 65) is None
    for other in (L4, H200_OTHER_TRITON):
        assert config(policy_of(other), "int8", 65) is None
    measured = LargeMConfig(64, 64, 3, 5)
    tuned = replace(ON_H200.tuned, large_m={("int8", 4608, 3584, 256): measured, ("int8", 4608, 3584, 512): None})
    assert config(replace(ON_H200, tuned=tuned), "int8", 200) == measured
    assert config(replace(ON_H200, tuned=tuned), "int8", 512) is None
    assert config(replace(ON_H200, tuned=tuned, disabled=frozenset({Mechanism.TUNED_CONFIGS})), "int8", 512) is not None


def test_integer_gemm_runs_in_chunks_when_large_m_gemm_is_unsupported() -> None:
    def config(policy: KernelPolicy, form: str, m: int, **kinds: bool) -> Any:
        x = torch.empty(m, 3584, dtype=BF16, device="meta")
        return policy.chunk_config(x, quantized(form, 4608, 3584, **kinds))

    for form in ("int8", "int4", "fp8-groups"):
        assert isinstance(config(ON_H200, form, 256), PdlGemmConfig), form
        assert config(ON_H200, form, 257) is None, form
    assert config(ON_H200, "fp8", 200) is None, "W8A8"
    assert config(ON_H200, "int8", 200, int8_activations=True) is None, "W8A8"
    assert config(policy_of(L4), "int8", 200) is None


@pytest.mark.parametrize(
    ("form", "m", "n", "dtype", "policy", "expected"),
    [
        ("fp8", 65, 4608, BF16, ON_H200, True),
        ("fp8", 65, 4608, BF16, policy_of(H200_OTHER_TRITON), True),
        ("fp8", 64, 4608, BF16, ON_H200, False),
        ("fp8", 65, 4600, BF16, ON_H200, False),
        ("fp8", 65, 4608, FP32, ON_H200, False),
        ("fp8-groups", 65, 4608, BF16, ON_H200, False),
        ("int8", 65, 4608, BF16, ON_H200, False),
        ("fp8", 65, 4608, BF16, policy_of(L4), False),
    ],
)
def test_fp8_per_row_gemm_uses_torchs_scaled_mm_on_hopper(
    form: str, m: int, n: int, dtype: torch.dtype, policy: KernelPolicy, expected: bool
) -> None:
    x = torch.empty(m, 3584, dtype=dtype, device="meta")
    assert policy.uses_scaled_mm(x, quantized(form, n, 3584)) is expected


def test_grouped_expert_gemm_is_used_from_two_tokens() -> None:
    def tiles(tokens: int, policy: KernelPolicy = ON_H200, dtype: torch.dtype = BF16) -> ExpertTiles | None:
        return policy.expert_tiles(tokens, 8, 128, dtype, is_plain=True)

    assert tiles(1) is None
    assert tiles(2) == ExpertTiles(16, Tile(32, 128, 2, 4), Tile(64, 128, 4, 3))
    heights = {tokens: found.height for tokens in (160, 161, 320, 321, 1537) if (found := tiles(tokens))}
    assert heights == {160: 16, 161: 32, 320: 32, 321: 64, 1537: 128}
    on_l4, in_fp32 = tiles(1024, policy_of(L4)), tiles(2, dtype=FP32)
    assert on_l4 is not None
    assert 2 * (64 + 128) * 64 * on_l4.gated.num_stages <= L4.shared_memory_bytes
    assert in_fp32 is not None
    assert in_fp32.gated == in_fp32.down == Tile(32, 32, 4, 2)
    quantised = ON_H200.expert_tiles(1024, 8, 128, BF16, is_plain=False)
    assert quantised == ExpertTiles(64, Tile(64, 64, 4, 3), Tile(128, 64, 4, 3))


def rule(m: int, n: int, k: int, *, bits: int = 8, profile: DeviceProfile = H200) -> LargeMConfig | None:
    return gemm_rules.large_m_config(m, n, k, bits=bits, grouped=bits == 4, profile=profile)


def test_the_last_wave_is_split_when_that_saves_a_tenth() -> None:
    gate_up_of_32b = rule(512, 55296, 5120)  # 864 tiles of 256 rows: six waves and 72 tiles, too many for two parts
    assert gate_up_of_32b is not None
    assert not gate_up_of_32b.splits_last_wave
    down = rule(1024, 5120, 17408)  # 160 tiles: a wave, and 28 tiles of 136 steps
    assert down is not None
    assert (down.splits, down.splits_last_wave) == (4, True)
    assert rule(256, 37888, 3584, bits=4) == LargeMConfig(256, 128, 1, 3), "a twelfth less"
    small = replace(H200, sm_count=200)
    assert rule(1024, 5120, 17408, profile=small) != down, "the tiles are less than a wave there"


@pytest.mark.parametrize("profile", [H200, H100_PCIE], ids=lambda profile: profile.name)
def test_last_wave_splits_make_at_most_one_wave(profile: DeviceProfile) -> None:
    for m, n, k, tile in itertools.product((128, 300, 4096), (1000, 17920, 37888), (512, 3584), gemm_rules.LARGE_TILES):
        for splits in gemm_rules.last_wave_splits(m, n, k, tile, profile=profile):
            config = LargeMConfig(tile, 128, splits, 2, splits_last_wave=True)
            found = large_m_schedule(m, n, k, config, sm_count=profile.sm_count)
            assert found.whole_tiles % profile.sm_count == 0
            assert 0 < found.split_tiles * found.splits <= profile.sm_count
            assert found.splits >= 2


@pytest.mark.parametrize("profile", [H200, H100_PCIE, H200_OTHER_TRITON], ids=lambda profile: profile.name)
@pytest.mark.parametrize("m", [65, 200, 1000, 9000])
def test_int8_gemm_configs_fit_shared_memory(m: int, profile: DeviceProfile) -> None:
    weight = quantized("int8", 4608, 3584, int8_activations=True)
    config = policy_of(profile).int8_gemm_config(m, weight)
    assert config is not None
    assert 2 <= config.stages <= profile.shared_memory_bytes // ((config.block_m + config.block_n) * config.block_k)
    for other in (quantized("int8", 4608, 3584), quantized("fp8", 4608, 3584), quantized("int4", 4608, 3584)):
        assert policy_of(profile).int8_gemm_config(m, other) is None
    assert policy_of(profile).int8_gemm_config(64, weight) is None, "few rows keep their dtype"
    assert policy_of(profile, Mechanism.INT8_GEMM).int8_gemm_config(m, weight) is None
    assert policy_of(L4).int8_gemm_config(m, weight) is None, "torch, where there is no TMA"


@pytest.mark.parametrize("m", [65, 200, 1000, 9000])
def test_fp8_block_weights_use_w8a8_for_many_rows(m: int) -> None:
    weight, x = quantized("fp8-groups", 4608, 3584), torch.empty(m, 3584, dtype=BF16, device="meta")
    config = ON_H200.fp8_block_gemm_config(x, weight)
    assert config is not None
    assert config.block_k == 128
    assert 2 <= config.stages <= H200.shared_memory_bytes // ((config.block_m + config.block_n) * 128)
    for other in (quantized("int8-groups", 4608, 3584), quantized("fp8", 4608, 3584), quantized("int4", 4608, 3584)):
        assert ON_H200.fp8_block_gemm_config(x, other) is None
    assert ON_H200.fp8_block_gemm_config(x.float(), weight) is None
    assert ON_H200.fp8_block_gemm_config(x[:64], weight) is None, "few rows keep their dtype"
    assert policy_of(L4).fp8_block_gemm_config(x, weight) is None
    assert policy_of(H200, Mechanism.FP8_BLOCK_GEMM).fp8_block_gemm_config(x, weight) is None


def test_h200_sampling_has_the_measured_number_of_programs() -> None:
    assert ON_H200.sample_programs == 1056


def test_an_h100_uses_the_h200s_configs() -> None:
    on_h100 = policy_of(H100)
    assert on_h100.tuned == ON_H200.tuned
    for m in (1, 16, 64):
        assert on_h100.small_m_config(m, 4608, 3584, BF16, tma_operands=True) == ON_H200.small_m_config(
            m, 4608, 3584, BF16, tma_operands=True
        )


def test_kernel_rules_follow_the_number_of_sms() -> None:
    on_pcie = policy_of(H100_PCIE)
    config = on_pcie.small_m_config(1, 640, 4096, BF16)
    assert isinstance(config, SmallMConfig)
    assert config.programs == 4 * 114
    assert on_pcie.decode_config(1, 8).target_programs == 2 * 114
    for rows, programs_per_sm in ((1, 2), (64, 4)):
        one_byte = on_pcie.decode_config(rows, 8, quantized=True)
        assert one_byte.stages == on_pcie.decode_config(rows, 8).stages + 1
        assert one_byte.target_programs == programs_per_sm * 114
    assert on_pcie.without(Mechanism.SPLIT_KV).decode_config(64, 8, quantized=True).target_programs == 0
    assert on_pcie.sample_programs == 8 * 114
    tiles = {"m": 512, "n": 3840, "k": 8192}  # 120: one wave of 132 SMs, two of 114
    assert (on_pcie.k_splits(**tiles), ON_H200.k_splits(**tiles)) == (2, 1)
    shape = PrefillShape(BF16, BF16, 4096, 1, 28, 4, 128, 128, None, 4096)
    assert on_pcie.prefill_config(shape) == HopperPrefillConfig(114)


def test_cublas_and_smaller_tiles_are_used_when_shared_memory_is_small() -> None:
    on_l4 = policy_of(L4)
    assert on_l4.small_m_config(1, 4096, 4096, BF16) is None
    shape = PrefillShape(BF16, BF16, 8192, 1, 32, 8, 128, 128, None, 8192)
    config = on_l4.prefill_config(shape)
    assert not isinstance(config, HopperPrefillConfig)
    assert (config.rows + 2 * (config.stages - 1) * config.keys) * 128 * 2 <= 99 << 10
    assert not on_l4.decode_config(1, 8).pdl


@pytest.mark.parametrize(("head_dim", "dtype", "rows"), [(256, FP32, 32), (512, BF16, 32), (512, FP32, 16)])
def test_prompts_have_smaller_tiles_when_heads_are_wide(head_dim: int, dtype: torch.dtype, rows: int) -> None:
    config = ON_H200.prefill_config(PrefillShape(dtype, dtype, 4096, 1, 16, 2, head_dim, 128, None, 4096))
    assert not isinstance(config, HopperPrefillConfig)
    assert config.rows == config.keys == rows


def test_portable_kernels_are_used_when_the_triton_version_differs() -> None:
    policy = policy_of(H200_OTHER_TRITON)
    assert isinstance(policy.small_m_config(1, 4608, 3584, BF16, tma_operands=True), SmallMConfig)
    assert not policy.decode_config(1, 4).pdl
    assert not policy.hopper_fa3


GEMM = {"n": 4608, "k": 3584, "dtype": BF16, "tma_operands": True}
LONG_PROMPT = PrefillShape(BF16, BF16, 4096, 1, 28, 4, 128, 128, None, 4096)


def test_only_the_disabled_mechanism_is_off() -> None:
    def off(mechanism: Mechanism) -> KernelPolicy:
        return ON_H200.without(mechanism)

    def gemm(policy: KernelPolicy, m: int, **changes: Any) -> SmallMConfig | PdlGemmConfig | None:
        return policy.small_m_config(m, **(GEMM | changes))

    assert isinstance(gemm(ON_H200, 8), PdlGemmConfig)
    assert gemm(off(Mechanism.SMALL_M_GEMM), 8) is None
    assert isinstance(gemm(off(Mechanism.PDL), 8), SmallMConfig)
    assert isinstance(gemm(off(Mechanism.PDL), 33), SmallMConfig)
    assert not off(Mechanism.PDL).decode_config(1, 4).pdl
    assert gemm(off(Mechanism.PDL).without(Mechanism.STREAM_K), 33) is None
    assert isinstance(gemm(off(Mechanism.PDL).without(Mechanism.STREAM_K), 16), SmallMConfig)
    assert isinstance(gemm(off(Mechanism.STREAM_K), 33), PdlGemmConfig)
    assert isinstance(ON_H200.small_m_config(64, 18944, 3584, BF16, gated=True, tma_operands=True), SmallMConfig)
    assert off(Mechanism.STREAM_K).small_m_config(64, 18944, 3584, BF16, gated=True, tma_operands=True) is None
    assert gemm(off(Mechanism.TUNED_CONFIGS), 16) != gemm(ON_H200, 16)
    assert ON_H200.k_splits(128, 1024, 3072) == 4
    assert off(Mechanism.SPLIT_K).k_splits(128, 1024, 3072) == 1
    unsplit = off(Mechanism.SPLIT_KV).decode_config(1, 4)
    assert (unsplit.target_programs, unsplit.programs_per_row) == (0, 1.0)
    assert unsplit.pdl
    assert isinstance(ON_H200.prefill_config(LONG_PROMPT), HopperPrefillConfig)
    assert not isinstance(off(Mechanism.HOPPER_FA3).prefill_config(LONG_PROMPT), HopperPrefillConfig)
    assert isinstance(off(Mechanism.PDL).prefill_config(LONG_PROMPT), HopperPrefillConfig)


def test_speculative_verification_uses_tiles_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six tokens of seven heads, as five guesses of a 7B shape; PDL for few sequences, as in decode steps."""
    monkeypatch.setattr(attention_config, "MOST_CHECKED_SEQUENCES", 0)
    assert ON_H200.check_config(1, 64, 4, 256) is None, "it is not used"
    monkeypatch.setattr(attention_config, "MOST_CHECKED_SEQUENCES", 32)
    assert ON_H200.check_config(33, 64, 4, 256) is None
    config = ON_H200.check_config(1, 64, 4, 256)
    assert config is not None
    assert (config.target_programs, config.block_tokens, config.pdl) == (132, 64, True)
    many = ON_H200.check_config(32, 64, 4, 256)
    assert many is not None
    assert not many.pdl
    small = ON_H200.check_config(1, 16, 2, 128)
    assert small == ON_H200.decode_config(1, 2)
    assert ON_H200.check_config(1, 128, 4, 256) is None, "prompt chunks' attention has tiles for these"
    assert ON_H200.without(Mechanism.CHECK_ATTENTION).check_config(1, 16, 2, 128) is None
    on_l4 = policy_of(L4)
    wide = on_l4.check_config(1, 64, 4, 512)
    assert wide is not None
    assert wide.block_tokens == 32
    assert on_l4.check_config(1, 64, 4, 1024) is None


def test_portable_kernels_are_used_when_scores_are_soft_capped() -> None:
    other = replace(LONG_PROMPT, caps_scores=True)
    assert isinstance(ON_H200.prefill_config(LONG_PROMPT), HopperPrefillConfig)
    assert ON_H200.prefill_config(other) == ON_H200.flash_attention_2_config(LONG_PROMPT)
    assert ON_H200.decode_config(4, 8, shape=LONG_PROMPT).hopper
    assert not ON_H200.decode_config(4, 8, shape=other).hopper


def test_flash_attention_2_is_used_when_there_are_windows_or_fp8_pages() -> None:
    for changes in ({"sliding_window": 100}, {"pages_dtype": torch.float8_e4m3fn}):
        assert not isinstance(ON_H200.prefill_config(replace(LONG_PROMPT, **changes)), HopperPrefillConfig)


def test_one_byte_pages_are_widened_when_it_pays() -> None:
    narrow = replace(LONG_PROMPT, pages_dtype=torch.float8_e4m3fn, longest_key=32_768, pages=256, wide_pages=512)
    assert ON_H200.prefill_config(narrow) == HopperPrefillConfig(132, widens=True)
    assert ON_H200.prefill_config(replace(narrow, pages_dtype=BF16)) == HopperPrefillConfig(132)
    two = ON_H200.flash_attention_2_config(narrow)
    for changes in ({"pages": 513}, {"wide_pages": 0}, {"tokens": 100}, {"q_heads": 4, "sequences": 64}):
        left = replace(narrow, **changes)
        assert ON_H200.prefill_config(left) == ON_H200.flash_attention_2_config(left), changes
    for off in (Mechanism.WIDE_PAGES, Mechanism.HOPPER_FA3):
        assert ON_H200.without(off).prefill_config(narrow) == two
        assert ON_H200.without(off).scratch_pages(32_768, narrow) == 0
    assert not isinstance(policy_of(L4).prefill_config(narrow), HopperPrefillConfig)
    others = ON_H200.without(Mechanism.WIDE_PAGES).prefill_config(LONG_PROMPT)
    assert others == HopperPrefillConfig(132), "pages of 16 bits stay with it"


def test_scratch_memory_is_allocated_only_when_pages_may_be_widened() -> None:
    shape = replace(LONG_PROMPT, pages_dtype=torch.int8)
    assert ON_H200.scratch_pages(32_768, shape) == 512
    assert policy_of(L4).scratch_pages(32_768, shape) == 0
    for changes in ({"head_dim": 256}, {"page_size": 16}, {"caps_scores": True}, {"dtype": FP32}):
        assert ON_H200.scratch_pages(32_768, replace(shape, **changes)) == 0, changes
    assert ON_H200.scratch_pages(32_768, LONG_PROMPT) == 0, "pages of 16 bits"


def test_the_error_lists_mechanisms_when_one_is_unknown() -> None:
    with pytest.raises(ValueError, match=r"'stream-k'.*'stream_k'\?.*small_m_gemm"):
        kernel_policy(torch.device("cpu"), ["pdl", "stream-k"])
    assert kernel_policy(torch.device("cpu"), ["pdl"]).disabled == {Mechanism.PDL}
