"""Chooses between kernels, and their launch configs: all decisions, by sizes alone.

A policy is made once for a runner, from its device's profile and the disabled mechanisms. It launches nothing; the
kernels do not choose.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from mini_infer_engine.config.options.mechanisms import Mechanism, parse_mechanisms
from mini_infer_engine.kernels.attention import attention_config
from mini_infer_engine.kernels.attention.attention_config import (
    DecodeConfig,
    HopperPrefillConfig,
    PrefillConfig,
    PrefillShape,
)
from mini_infer_engine.kernels.device import DeviceProfile, device_profile
from mini_infer_engine.kernels.gemm import gemm_rules
from mini_infer_engine.kernels.gemm.gemm_config import (
    MAX_M,
    SMALL_M,
    LargeMConfig,
    PdlGemmConfig,
    SmallMConfig,
    W8A8GemmConfig,
    are_large_m_operands,
    are_tma_operands,
    pdl_block_m,
    portable_block_m,
)
from mini_infer_engine.kernels.gemm.grouped_weight import GroupedWeight
from mini_infer_engine.kernels.gemm.quantized_weight import QuantizedWeight
from mini_infer_engine.kernels.gemm.tuned_configs import (
    NO_TUNED_CONFIGS,
    TunedConfigs,
    load_tuned_configs,
    rows_of_large_m,
)
from mini_infer_engine.kernels.moe import expert_tiles
from mini_infer_engine.kernels.moe.expert_tiles import ExpertTiles

_MOST_CHUNKED_ROWS = 256
"""Rows up to which an integer GEMM runs as several of MAX_M rows where large_m_gemm does not.

Each of them reads the weights once more. That still costs less than the bf16 copy of them, which pays for more rows.
"""
_SAMPLE_PROGRAMS_PER_SM = 8
"""Programs of sampling for each SM, of which five are resident at a time."""


@dataclass(frozen=True, slots=True)
class KernelPolicy:
    """All choices for one device. `pdl`, `hopper_fa3`, ...: True if the device supports it and settings allow it."""

    profile: DeviceProfile
    disabled: frozenset[Mechanism] = frozenset()
    tuned: TunedConfigs = NO_TUNED_CONFIGS

    def uses(self, mechanism: Mechanism) -> bool:
        """True if settings leave the mechanism on; the device is not considered."""
        return mechanism not in self.disabled

    def without(self, *mechanisms: Mechanism) -> "KernelPolicy":
        """Returns the policy with these mechanisms switched off, too."""
        return replace(self, disabled=self.disabled.union(mechanisms))

    @property
    def pdl(self) -> bool:
        """True if kernels begin by programmatic dependent launch."""
        return Mechanism.PDL not in self.disabled and self.profile.supports_gluon

    @property
    def hopper_fa3(self) -> bool:
        """True if prompts may use the FlashAttention-3 kernel."""
        return Mechanism.HOPPER_FA3 not in self.disabled and self.profile.supports_gluon

    @property
    def wide_pages(self) -> bool:
        """True if one-byte pages may be widened for the FlashAttention-3 kernel."""
        return self.hopper_fa3 and Mechanism.WIDE_PAGES not in self.disabled

    @property
    def sample_programs(self) -> int:
        """The number of sampling programs, for all rows together."""
        return _SAMPLE_PROGRAMS_PER_SM * self.profile.sm_count

    def gemm_config(
        self, x: torch.Tensor, weight: torch.Tensor | QuantizedWeight | GroupedWeight, *, gated: bool = False
    ) -> SmallMConfig | PdlGemmConfig | None:
        """Returns `small_m_config` of x [M, K] and weight [N, K], or [2 N, K] if gated; None for grouped weights."""
        m, (weight_rows, k) = x.shape[0], weight.shape
        if m > MAX_M or isinstance(weight, GroupedWeight):
            return None
        n = weight_rows // 2 if gated else weight_rows
        tma = self.pdl and are_tma_operands(x, weight)
        if isinstance(weight, QuantizedWeight):
            return self.quantized_config(m, n, k, weight, gated=gated) if tma else None
        return self.small_m_config(m, n, k, x.dtype, gated=gated, tma_operands=tma)

    def small_m_config(
        self, m: int, n: int, k: int, dtype: torch.dtype, *, gated: bool = False, tma_operands: bool = False
    ) -> SmallMConfig | PdlGemmConfig | None:
        """Returns the kernel and its config for x [m, k] @ weight [n, k].T, or None for cuBLAS.

        cuBLAS is chosen if m is too large, the configs do not fit the device, or cuBLAS is faster. `tma_operands` is
        the result of `are_tma_operands` for x and weight.
        """
        too_small = self.profile.shared_memory_bytes < gemm_rules.MIN_SHARED_MEMORY_BYTES
        if m > MAX_M or too_small or Mechanism.SMALL_M_GEMM in self.disabled:
            return None
        tuned = NO_TUNED_CONFIGS if Mechanism.TUNED_CONFIGS in self.disabled else self.tuned
        config: SmallMConfig | PdlGemmConfig | None
        if tma_operands and self.pdl:
            key = (n, k, gated, pdl_block_m(m))
            if key in tuned.with_pdl:
                config = tuned.with_pdl[key]
            else:
                config = gemm_rules.pdl_gemm_config(pdl_block_m(m), n, k, gated=gated, profile=self.profile)
        else:
            key = (n, k, gated, portable_block_m(m))
            if dtype != torch.float32 and key in tuned.portable:
                config = tuned.portable[key]
            else:
                config = gemm_rules.small_m_config(portable_block_m(m), n, dtype, gated=gated, profile=self.profile)
        is_stream_k = isinstance(config, SmallMConfig) and m > SMALL_M
        return None if is_stream_k and Mechanism.STREAM_K in self.disabled else config

    def quantized_config(
        self, m: int, n: int, k: int, weight: QuantizedWeight, *, gated: bool = False
    ) -> PdlGemmConfig | None:
        """Returns the config of pdl_gemm with quantised weights, or None for `quantized_gemm`, which fuses nothing."""
        too_small = self.profile.shared_memory_bytes < gemm_rules.MIN_SHARED_MEMORY_BYTES
        if m > MAX_M or too_small or not self.pdl or Mechanism.SMALL_M_GEMM in self.disabled:
            return None
        key = (weight.format, n, k, gated, pdl_block_m(m))
        if key in self.tuned.quantized and Mechanism.TUNED_CONFIGS not in self.disabled:
            config = self.tuned.quantized[key]
        else:
            config = gemm_rules.quantized_gemm_config(
                pdl_block_m(m), n, k, bits=weight.bits, grouped=weight.is_grouped, gated=gated, profile=self.profile
            )
        return config if Mechanism.WIDE_PANELS not in self.disabled else replace(config, wide=False)

    def large_m_config(self, x: torch.Tensor, weight: QuantizedWeight | GroupedWeight) -> LargeMConfig | None:
        """Returns the config of large_m_gemm for x [M > MAX_M, K], or None if it is unable, off, or slower.

        FP8 with scales of rows, and integers whose activations may be rounded, are W8A8 instead.
        """
        m, (n, k) = x.shape[0], weight.shape
        if isinstance(weight, GroupedWeight) or weight.format == "fp8" or weight.int8_activations or m <= MAX_M:
            return None
        if not self.profile.supports_gluon or Mechanism.LARGE_M_GEMM in self.disabled:
            return None
        if not are_large_m_operands(x, weight):
            return None
        rows = rows_of_large_m(m)
        key = (weight.format, n, k, rows)
        if key in self.tuned.large_m and Mechanism.TUNED_CONFIGS not in self.disabled:
            return self.tuned.large_m[key]
        return gemm_rules.large_m_config(rows, n, k, bits=weight.bits, grouped=weight.is_grouped, profile=self.profile)

    def int8_gemm_config(self, m: int, weight: QuantizedWeight | GroupedWeight) -> W8A8GemmConfig | None:
        """Returns the config of int8_gemm for m rows that may be rounded to int8; None: torch, or not W8A8."""
        if isinstance(weight, GroupedWeight) or not weight.int8_activations or weight.format != "int8" or m <= MAX_M:
            return None
        if not self.profile.reads_tensors or Mechanism.INT8_GEMM in self.disabled:
            return None
        return gemm_rules.int8_gemm_config(rows_of_large_m(m), weight.shape[0], profile=self.profile)

    def fp8_block_gemm_config(self, x: torch.Tensor, weight: QuantizedWeight | GroupedWeight) -> W8A8GemmConfig | None:
        """Returns the config of fp8_block_gemm for x [M, K], which may be rounded to FP8; None: activations keep their
        dtype.
        """
        m = x.shape[0]
        if isinstance(weight, GroupedWeight) or weight.format != "fp8-groups" or m <= MAX_M:
            return None
        if x.dtype != torch.bfloat16 or not self.profile.reads_tensors or Mechanism.FP8_BLOCK_GEMM in self.disabled:
            return None
        return gemm_rules.w8a8_gemm_config(gemm_rules.FP8_BLOCK_TILE, profile=self.profile)

    def chunk_config(self, x: torch.Tensor, weight: QuantizedWeight) -> SmallMConfig | PdlGemmConfig | None:
        """Returns the config for several products of MAX_M rows of x [M > MAX_M, K]; None: one by torch, or W8A8."""
        w8a8 = weight.format == "fp8" or weight.int8_activations
        return None if w8a8 or x.shape[0] > _MOST_CHUNKED_ROWS else self.gemm_config(x[:MAX_M], weight)

    def uses_scaled_mm(self, x: torch.Tensor, weight: QuantizedWeight) -> bool:
        """True if torch multiplies x [M > MAX_M, K], rounded to FP8, by FP8 with scales of rows."""
        is_fp8 = weight.format == "fp8" and x.dtype == torch.bfloat16 and weight.shape[0] % 16 == 0
        return is_fp8 and self.profile.is_hopper and x.shape[0] > MAX_M

    def expert_tiles(
        self, tokens: int, experts_per_token: int, num_experts: int, dtype: torch.dtype, *, is_plain: bool
    ) -> ExpertTiles | None:
        """Returns the tiles of grouped GEMM for experts, or None for one token, which is computed by GEMVs.

        `is_plain` is False for quantised weights. Shared experts count among both numbers, other ranks' experts too.
        """
        if tokens == 1:
            return None
        mean_rows = tokens * experts_per_token / num_experts
        return expert_tiles.expert_tiles(mean_rows, dtype.itemsize, self.profile.shared_memory_bytes, is_plain=is_plain)

    def k_splits(self, m: int, n: int, k: int) -> int:
        """Returns the splits of K for cuBLAS's product of x [m, k] and weight [n, k]; 1: none."""
        return 1 if Mechanism.SPLIT_K in self.disabled else gemm_rules.k_splits(m, n, k, profile=self.profile)

    def decode_config(
        self, rows: int, kv_heads: int, *, quantized: bool = False, shape: PrefillShape | None = None
    ) -> DecodeConfig:
        """Returns the config of decode attention for this many rows; `quantized`: over pages with one byte an element.

        `shape` describes its heads and pages; without it the Hopper kernel is not used.
        """
        hopper_block = None
        if shape is not None and Mechanism.HOPPER_DECODE not in self.disabled:
            hopper_block = attention_config.hopper_decode_block(shape)
        return attention_config.decode_config(
            rows,
            kv_heads,
            self.profile.sm_count,
            split_kv=Mechanism.SPLIT_KV not in self.disabled,
            pdl=self.pdl,
            quantized=quantized,
            hopper_block=hopper_block,
        )

    def check_config(self, sequences: int, tile_rows: int, kv_heads: int, row_bytes: int) -> DecodeConfig | None:
        """Returns the config of attention from a few new tokens of each sequence; None: as prompt chunks.

        `attention_config.check_config` documents the arguments.
        """
        if Mechanism.CHECK_ATTENTION in self.disabled:
            return None
        split_kv = Mechanism.SPLIT_KV not in self.disabled
        profile = self.profile
        return attention_config.check_config(
            sequences,
            tile_rows,
            kv_heads,
            row_bytes,
            profile.sm_count,
            profile.shared_memory_bytes,
            split_kv=split_kv,
            pdl=self.pdl,
        )

    def latent_decode_config(self, rows: int) -> DecodeConfig:
        """Returns the config of absorbed latent attention from this many rows."""
        split_kv = Mechanism.SPLIT_KV not in self.disabled
        return attention_config.latent_decode_config(rows, self.profile.sm_count, split_kv=split_kv, pdl=self.pdl)

    def prefill_config(self, shape: PrefillShape) -> PrefillConfig | HopperPrefillConfig:
        """Returns the config of attention from prompt chunks, for the faster of the two kernels."""
        supported = self.hopper_prefill_config(shape)
        is_faster = attention_config.hopper_fa3_is_faster(shape.tokens, shape.sequences, shape.q_heads)
        if supported and is_faster and (not supported.widens or attention_config.widening_pays(shape)):
            return supported
        return self.flash_attention_2_config(shape)

    def hopper_prefill_config(self, shape: PrefillShape) -> HopperPrefillConfig | None:
        """Returns the config of the FlashAttention-3 kernel, or None if it cannot compute this, or is switched off."""
        if self.hopper_fa3 and attention_config.supports_hopper_fa3(shape):
            return HopperPrefillConfig(self.profile.sm_count)
        if self.wide_pages and attention_config.fits_wide_pages(shape):
            return HopperPrefillConfig(self.profile.sm_count, widens=True)
        return None

    def scratch_pages(self, longest_sequence: int, shape: PrefillShape) -> int:
        """Returns the number of wide pages in scratch memory for prompts over pages of this shape; 0: none are made."""
        page_elements = 2 * shape.page_size * shape.kv_heads * shape.head_dim
        pages = attention_config.wide_pages(longest_sequence, shape.page_size, page_elements * shape.dtype.itemsize)
        config = self.hopper_prefill_config(replace(shape, pages=1, wide_pages=pages))
        return pages if config is not None and config.widens else 0

    def flash_attention_2_config(self, shape: PrefillShape) -> PrefillConfig:
        """Returns the config of the FlashAttention-2 kernel, which can compute everything."""
        return attention_config.prefill_config(shape, self.profile.sm_count, self.profile.shared_memory_bytes)


def kernel_policy(device: torch.device, disabled: Iterable[str] = ()) -> KernelPolicy:
    """Returns the policy for a device, with these mechanisms switched off. Raises ValueError if a name is unknown."""
    profile = device_profile(device)
    return KernelPolicy(profile, parse_mechanisms(disabled), load_tuned_configs(profile.name))
