"""Chooses the tile config of a GEMM whose shape was not measured, by the device's sizes.

Does not launch anything, and does not know the tuned configs.
"""

import functools

import torch

from mini_infer_engine.kernels.device import DeviceProfile
from mini_infer_engine.kernels.gemm.gemm_config import (
    LARGE_TILE_N,
    MAX_M,
    SMALL_M,
    LargeMConfig,
    PdlGemmConfig,
    SmallMConfig,
    W8A8GemmConfig,
)
from mini_infer_engine.kernels.gemm.large_m_schedule import large_m_schedule
from mini_infer_engine.kernels.gemm.quantized_weight import GROUP
from mini_infer_engine.kernels.sizes import cdiv

MIN_SHARED_MEMORY_BYTES = 227 << 10
"""Shared memory of a program that the deepest rings of these rules and of the H200's tuned configs need."""
_SYSTEM_BYTES = 4096
"""Shared memory of a program beside its ring: barriers, and CUDA's own."""
_TWO_PROGRAMS_BYTES = 112_000
"""The largest shared memory of a program of which two are resident on an SM."""
K_SPLITS = (4, 2)
"""The values of `k_splits` beside 1."""
_CUBLAS_TILE = 128
"""The approximate number of rows and columns in an output tile of cuBLAS."""
_MIN_SPLIT_K = 512
"""The least width of a split of K."""
_WIDE_STAGES = 5
"""Stages of 256 columns that are as good as twice as many of 128; one stage fewer if the ring holds all of K."""
_MOST_PDL_SPLITS = 4
_ENOUGH_SMS = 0.45
"""The share of the SMs for which splits of more than eight rows provide a program.

(On an H200 64 of 132 read as fast as 128; any share of 0.42 to 0.48 gives the same splits for all measured shapes.)
"""
_UNEVEN_SMS = (0.56, 0.67)
"""Shares of the SMs with a program between which products took 2 to 10 % longer: 80 of 132 did; 72 and 96 did not."""
_LEAST_UNEVEN_K, _LEAST_UNEVEN_K_A_ROW = 5120, 256
"""The least K, absolute and per row, for which three splits of such products pay.

Their sums, written and read, are 12 M / K of the weights' bytes: 5 % at most.
"""
_LEAST_TWO_SPLITS_K, _MOST_TWO_SPLITS_ROWS = 10_000, 32
"""The least K and the most rows for two splits of products whose tiles fill a third to half of the SMs.

Within these limits two splits cost nothing (1.5 % at most) and may save much: 4,096 by 11,008, the shape of Llama-2-7B,
Yi-6B and OLMo-2-7B, took 4 to 9 % less on an H100.
"""

_FLOPS_A_CYCLE = 4096
"""Bf16 operations per cycle of an SM's tensor cores."""
_CUBLAS_UTILISATION = 0.8
_COPIED_BYTES_A_CYCLE, _COPY_CYCLES = 2000, 10_000
"""Bytes per cycle of all SMs when quantised weights are read and written in bf16, and that kernel's start-up."""
_WIDENING_CYCLES, _STEP_CYCLES, _WAVE_CYCLES = 1250, 100, 7000
"""Cycles of widening a tile's 128 columns of weights, of a step's barriers, and of a wave's beginning and end.

Widening overlaps with the products before. (28 products of the 7B shape on an H200: within a fifth of the measured
time.)
"""
_PARTIAL_CYCLES_A_BYTE = 1 / 1500
"""Cycles per byte of all SMs together when sums of splits are written and read."""
_REDUCTION_CYCLES = 2000
"""Cycles of the second kernel, which adds the partial sums."""
LARGE_TILES = (64, 128, 256)
"""Numbers of rows of x in a tile of large_m_gemm."""
_MIN_SPLIT_STEPS = 4
"""The least number of steps, of GROUP columns, in a split of a tile of large_m_gemm."""
_UNMEASURED_GAIN = 0.9
"""The share of the other ways' time below which a last wave is split: its gain has not been measured on any GPU."""


@functools.cache
def pdl_gemm_config(block_m: int, n: int, k: int, *, gated: bool, profile: DeviceProfile) -> PdlGemmConfig:
    """Returns the config of pdl_gemm, by the waves of the output's tiles of 64 rows of weights, with one tile per SM.

    More than three waves: the end of a wave matters little, and one program per SM has all memory for its ring. More
    than one: all programs are resident at once, up to three per SM. Otherwise one program per SM, with splits of K if
    tiles are few. (81 products of twenty checkpoints, M of 8 to 64, on an H200:
    benchmarks/results/2026-11-26-fourth-h200.md.)
    """

    def config(tall: int, block_k: int, residents: int, splits: int = 1) -> PdlGemmConfig:
        steps = cdiv(k, block_k)
        steps_of_split = cdiv(steps, min(splits, steps))
        stages = min(ring_stages(residents, tall + block_m, block_k, profile), steps_of_split)
        return PdlGemmConfig(tall // (2 if gated else 1), block_k, cdiv(steps, steps_of_split), max(2, stages))

    sms, tiles = profile.sm_count, cdiv(2 * n if gated else n, 64)
    wide_stages = ring_stages(1, 64 + block_m, 256, profile)
    if tiles > 3 * sms:
        # Tiles of 128 rows read x half as often. A ring that holds all of K is empty when its program ends.
        return config(64, 256, 1) if wide_stages >= _WIDE_STAGES and k > wide_stages * 256 else config(128, 128, 1)
    if tiles > sms:
        return config(64, 128, residents=cdiv(tiles, sms))
    if _is_uneven(tiles, sms) and k >= max(_LEAST_UNEVEN_K, _LEAST_UNEVEN_K_A_ROW * block_m):
        return config(64, 128, residents=2, splits=3)
    splits = _pdl_splits(block_m, tiles, k, profile)
    fits_all = cdiv(cdiv(k, 256), splits) <= wide_stages
    is_wide = wide_stages >= _WIDE_STAGES or (wide_stages == _WIDE_STAGES - 1 and fits_all)
    return config(64, 256 if is_wide else 128, 1, splits)


def _pdl_splits(block_m: int, tiles: int, k: int, profile: DeviceProfile) -> int:
    """Returns the splits of K: one or two if tiles fill a third of the SMs or more.

    With fewer tiles there are as many splits as let rings hold all of K, so that all weights are there before x is
    waited for, and as many as give a third of the SMs a program, if K is wide enough. With more than eight rows, whose
    sums take longer to store, only nearly half of the SMs get a program: that many read as fast as all.
    """
    sms, ring_columns = profile.sm_count, ring_stages(1, 64 + block_m, 64, profile) * 64
    if tiles >= sms // 3:
        return 2 if 2 * tiles <= sms and k >= _LEAST_TWO_SPLITS_K and block_m <= _MOST_TWO_SPLITS_ROWS else 1
    desired = max(round(k / ring_columns), min(cdiv(sms // 3, tiles), cdiv(k, _MIN_SPLIT_K)))
    most = sms // tiles if block_m <= 8 else cdiv(int(_ENOUGH_SMS * sms), tiles)
    if _is_uneven(most * tiles, sms) and (most + 1) * tiles <= sms:
        most += 1
    return min(desired, most, _MOST_PDL_SPLITS)


def _is_uneven(programs: int, sms: int) -> bool:
    """True if programs are more than half of the SMs, but not many more, so that most pairs of SMs have one, some two.

    The assumption that the SMs of a pair share a path to memory is a guess at why such products took longer.
    """
    return _UNEVEN_SMS[0] * sms < programs < _UNEVEN_SMS[1] * sms


def quantized_gemm_config(
    block_m: int, n: int, k: int, *, bits: int, grouped: bool, gated: bool, profile: DeviceProfile
) -> PdlGemmConfig:
    """Returns the config of pdl_gemm with quantised weights: two or three programs per SM, as widening needs all SMs.

    4-bit weights and few rows are `wide`: a layer of a 7B shape takes 51.8 us on an H200, else 54.4; with 8-bit weights
    these configs take 80 us wide and 71 otherwise.
    """
    block_n = 32 if gated else 64
    tiles = cdiv(n, block_n)
    padded_k = cdiv(k, GROUP) * GROUP
    block_k = 256 if block_m <= 16 and padded_k % 256 == 0 else 128
    steps = cdiv(k, block_k)
    splits = max(1, min(2 * profile.sm_count // tiles, 4, cdiv(steps, 4)))
    residents = min(3, max(1, cdiv(tiles * splits, profile.sm_count)))
    kept_bytes = cdiv(steps, splits) * (block_k // GROUP) * 64 * 4 if grouped else 0
    ring_bytes = profile.sm_shared_memory_bytes // residents - _SYSTEM_BYTES - kept_bytes
    stages = ring_bytes // quantized_stage_bytes(64, block_k, block_m, bits)
    stages = max(2, min(stages, cdiv(steps, splits), 8))
    return PdlGemmConfig(block_n, block_k, splits, stages, wide=bits == 4 and block_m == 8)


def quantized_stage_bytes(tall: int, block_k: int, block_m: int, bits: int) -> int:
    """Returns the shared memory of a stage of pdl_gemm's ring: `tall` rows of quantised weights, and x.

    For fewer than five rows of x it needs less.
    """
    return block_k * tall * bits // 8 + block_k * block_m * 2


def large_m_config(m: int, n: int, k: int, *, bits: int, grouped: bool, profile: DeviceProfile) -> LargeMConfig | None:
    """Returns the config of large_m_gemm: the tile and splits that take the fewest cycles by calculation.

    Returns None if a bf16 copy of the weights and cuBLAS take fewer.
    """

    def cycles(config: LargeMConfig) -> float:
        return _large_m_cycles(m, n, k, config, profile=profile)

    def config(block_m: int, splits: int, *, splits_last_wave: bool = False) -> LargeMConfig:
        block_k = 64 if block_m == 256 and bits == 8 and not grouped else GROUP
        stages = large_m_stages(block_m, block_k, bits=bits, profile=profile)
        return LargeMConfig(block_m, block_k, splits, stages, splits_last_wave)

    steps = cdiv(k, GROUP)
    plain = [
        config(tile, splits)
        for tile in LARGE_TILES
        for splits in (1, 2, 3, 4, 6)
        if splits == 1 or steps >= _MIN_SPLIT_STEPS * splits
    ]
    last_waves = [
        config(tile, splits, splits_last_wave=True)
        for tile in LARGE_TILES
        for splits in last_wave_splits(m, n, k, tile, profile=profile)
    ]
    best, best_last_wave = min(plain, key=cycles), min(last_waves, key=cycles, default=None)
    without = _cycles_of_copy_and_cublas(m, n, k, bits=bits, profile=profile)
    if best_last_wave is not None and cycles(best_last_wave) < _UNMEASURED_GAIN * min(cycles(best), without):
        return best_last_wave
    return best if cycles(best) <= without else None


def last_wave_splits(m: int, n: int, k: int, block_m: int, *, profile: DeviceProfile) -> range:
    """Returns the splits of large_m_gemm's last wave of tiles that make one wave at most; none if it is full or the
    only one.
    """
    whole_waves, tiles = divmod(cdiv(m, block_m) * cdiv(n, LARGE_TILE_N), profile.sm_count)
    if not whole_waves or not tiles:
        return range(0)
    return range(2, min(profile.sm_count // tiles, cdiv(k, GROUP) // _MIN_SPLIT_STEPS) + 1)


def _large_m_cycles(m: int, n: int, k: int, config: LargeMConfig, *, profile: DeviceProfile) -> float:
    schedule = large_m_schedule(m, n, k, config, sm_count=profile.sm_count)
    products = 2 * LARGE_TILE_N * config.block_m * GROUP / _FLOPS_A_CYCLE
    step = max(products, _WIDENING_CYCLES) + _STEP_CYCLES

    def waves(programs: int, k_steps: int) -> float:
        groups = k_steps * config.block_k / GROUP
        return cdiv(programs, profile.sm_count) * (groups * step + _WAVE_CYCLES)

    sums = 0.0
    if schedule.split_tiles:
        sums = _REDUCTION_CYCLES + 2 * schedule.partial_sums * 4 * _PARTIAL_CYCLES_A_BYTE
    parts = waves(schedule.split_tiles * schedule.splits, schedule.steps_of_split)
    return waves(schedule.whole_tiles, schedule.k_steps) + parts + sums


def _cycles_of_copy_and_cublas(m: int, n: int, k: int, *, bits: int, profile: DeviceProfile) -> float:
    products = 2 * m * n * k / (_FLOPS_A_CYCLE * profile.sm_count * _CUBLAS_UTILISATION)
    return _WAVE_CYCLES + products + _COPY_CYCLES + n * k * (2 + bits / 8) / _COPIED_BYTES_A_CYCLE


def large_m_stages(block_m: int, block_k: int, *, bits: int, profile: DeviceProfile) -> int:
    """Returns the number of stages of large_m_gemm's ring that fit a program's shared memory."""
    stage_bytes = block_k * (LARGE_TILE_N * bits // 8 + block_m * 2)
    return min((profile.shared_memory_bytes - _SYSTEM_BYTES) // stage_bytes, 6)


INT8_TILES = ((64, 128, 4), (128, 256, 8))
"""M, N and warps of int8_gemm's tiles."""
FP8_BLOCK_TILE = (64, 128, 4)
"""M, N and warps of the tile of fp8_block_gemm, which has sums of a group beside the total.

(128 x 128 took 1.3 times as long on an H200.)
"""
_SMALL_TILE_CYCLES, _LARGE_TILE_CYCLES = 490, 1630
"""Cycles of a step of GROUP columns with int8_gemm's tiles, on an H200."""


def int8_gemm_config(m: int, n: int, *, profile: DeviceProfile) -> W8A8GemmConfig:
    """Returns the config of int8_gemm with the faster tile. Small tiles share an SM, so that their waves overlap."""
    small, large = INT8_TILES
    small_cycles = max(1.0, cdiv(m, small[0]) * cdiv(n, small[1]) / profile.sm_count) * _SMALL_TILE_CYCLES
    large_cycles = cdiv(cdiv(m, large[0]) * cdiv(n, large[1]), profile.sm_count) * _LARGE_TILE_CYCLES
    fits = w8a8_gemm_stages(*large[:2], profile=profile) >= 2
    return w8a8_gemm_config(large if fits and large_cycles < small_cycles else small, profile=profile)


def w8a8_gemm_config(tile: tuple[int, int, int], *, profile: DeviceProfile) -> W8A8GemmConfig:
    """Returns the config of int8_gemm or fp8_block_gemm with this tile."""
    block_m, block_n, warps = tile
    return W8A8GemmConfig(block_m, block_n, GROUP, warps, w8a8_gemm_stages(block_m, block_n, profile=profile))


def w8a8_gemm_stages(block_m: int, block_n: int, *, profile: DeviceProfile) -> int:
    """Returns the number of stages of GROUP columns that fit a program's shared memory."""
    return min((profile.shared_memory_bytes - _SYSTEM_BYTES) // ((block_m + block_n) * GROUP), 4)


def ring_stages(residents: int, tile_rows: int, block_k: int, profile: DeviceProfile) -> int:
    """Returns the number of stages of a ring of 16-bit weights and x, of which `residents` share an SM's memory."""
    return (profile.sm_shared_memory_bytes // residents - _SYSTEM_BYTES) // (tile_rows * block_k * 2)


def small_m_config(
    block_m: int, n: int, dtype: torch.dtype, *, gated: bool, profile: DeviceProfile
) -> SmallMConfig | None:
    """Returns the config of small_m_gemm and stream_k_gemm, or None to leave the product to cuBLAS.

    It has two programs per SM, four for few rows, and tiles at least about as tall as x. In fp32, without tensor cores,
    larger tiles do not fit the registers.
    """
    if block_m == SMALL_M:
        programs = 4 * profile.sm_count
        if dtype == torch.float32:
            return SmallMConfig(16, 32, programs, warps=4, stages=3)
        return SmallMConfig(32 if n <= 16384 else 64, 128, programs, warps=4, stages=4)
    if dtype == torch.float32:
        return None
    block_n = 64 if block_m <= 32 or gated else 128
    weight_rows = block_n * (2 if gated else 1)
    block_k = 128 if weight_rows + block_m <= 96 else 64
    stages = _TWO_PROGRAMS_BYTES // ((weight_rows + block_m) * block_k * 2)
    return SmallMConfig(block_n, block_k, programs=2 * profile.sm_count, warps=4, stages=stages)


def k_splits(m: int, n: int, k: int, *, profile: DeviceProfile) -> int:
    """Returns the splits of K with which cuBLAS is fastest, by measurements on an H200; 1: a single product.

    Splits pay if output tiles leave many SMs idle, or are a few more than the SMs and so would take two waves.
    """
    if m <= MAX_M:
        return 1  # only where our own kernels cannot run, and nothing was measured there
    tiles = cdiv(m, _CUBLAS_TILE) * cdiv(n, _CUBLAS_TILE)
    sms = profile.sm_count
    wave_and_a_half = sms < tiles <= 1.5 * sms
    for splits, suits in zip(K_SPLITS, (tiles <= 40, tiles <= 84 or wave_and_a_half), strict=True):
        split_k, rest = divmod(k, splits)
        least = _MIN_SPLIT_K if tiles * splits <= sms else 2 * _MIN_SPLIT_K
        if suits and split_k >= least and not rest and not split_k % 8:
            return splits
    return 1
