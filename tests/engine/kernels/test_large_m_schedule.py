"""Which tiles of a product are whole and which are split along K."""

import pytest

from mini_infer_engine.kernels.gemm.gemm_config import LargeMConfig
from mini_infer_engine.kernels.gemm.large_m_schedule import LargeMSchedule, large_m_schedule
from mini_infer_engine.kernels.sizes import cdiv


def schedule(m: int, n: int, k: int, splits: int, *, block_m: int = 256, last_wave: bool = True) -> LargeMSchedule:
    return large_m_schedule(m, n, k, LargeMConfig(block_m, 128, splits, 3, last_wave), sm_count=132)


def test_large_m_schedule_splits_only_the_last_wave() -> None:
    """gate_up of a 7B shape at 256 rows: 296 tiles, 28 steps."""
    found = schedule(256, 37888, 3584, 4)
    assert (found.whole_tiles, found.split_tiles, found.splits, found.steps_of_split) == (264, 32, 4, 8)
    assert found.programs == 264 + 32 * 4
    assert found.partial_sums == 32 * 4 * 256 * 128


@pytest.mark.parametrize(
    ("m", "n", "k", "splits", "reason"),
    [
        (256, 37888, 3584, 5, "160 parts would be two waves"),
        (512, 37888, 3584, 4, "64 tiles in 4 parts would be, too"),
        (256, 132 * 128, 3584, 4, "the last wave is full"),
        (256, 37888, 200, 4, "K is one pair of steps"),
        (256, 37888, 3584, 1, "there is one part"),
    ],
)
def test_large_m_schedule_keeps_the_last_wave_whole_when(m: int, n: int, k: int, splits: int, reason: str) -> None:
    found = schedule(m, n, k, splits)
    assert (found.split_tiles, found.splits, found.partial_sums) == (0, 1, 0), reason
    assert found.programs == found.whole_tiles == cdiv(m, 256) * cdiv(n, 128)


def test_large_m_schedule_splits_all_tiles_when_last_wave_is_off() -> None:
    found = schedule(512, 4608, 3584, 2, last_wave=False)
    assert (found.whole_tiles, found.split_tiles, found.splits, found.steps_of_split) == (0, 72, 2, 14)


@pytest.mark.parametrize("block_k", [64, 128])
@pytest.mark.parametrize("k", [128, 392, 1088, 3584, 18944])
@pytest.mark.parametrize("splits", [1, 2, 3, 4, 6, 8, 66])
@pytest.mark.parametrize("last_wave", [False, True])
def test_large_m_splits_cover_each_tile(block_k: int, k: int, splits: int, last_wave: bool) -> None:
    found = large_m_schedule(200, 1000, k, LargeMConfig(64, block_k, splits, 3, last_wave), sm_count=15)
    assert found.k_steps * block_k == cdiv(k, 128) * 128
    assert found.whole_tiles + found.split_tiles == 4 * 8
    assert found.splits <= splits
    if found.split_tiles:
        assert found.steps_of_split % 2 == 0
        assert (found.splits - 1) * found.steps_of_split < found.k_steps <= found.splits * found.steps_of_split
