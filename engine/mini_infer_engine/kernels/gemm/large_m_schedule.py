"""Assigns the work of large_m_gemm to programs: tiles of the output whole, or parts of tiles along K.

Output tiles run in waves of as many as a GPU has SMs. The tiles of an incomplete last wave would take as long as those
of a full one. They alone can be split, as in Stream-K's hybrid of data-parallel tiles and split ones (Osama et al.
2023, arXiv 2301.03598), with parts of equal size. Does not know Triton, times, or who chose the config.
"""

from dataclasses import dataclass

from mini_infer_engine.kernels.gemm.gemm_config import LARGE_TILE_N, LargeMConfig
from mini_infer_engine.kernels.gemm.quantized_weight import GROUP
from mini_infer_engine.kernels.sizes import cdiv


@dataclass(frozen=True, slots=True)
class LargeMSchedule:
    """Programs in order: one for each whole tile, then one for each split tile's first part, second part, ..."""

    k_steps: int
    """Steps of K in a whole tile."""
    whole_tiles: int
    split_tiles: int
    splits: int
    """Parts of a split tile; 1 if there is none."""
    steps_of_split: int
    """Steps in a part, an even number; the last part may have fewer."""
    tile_values: int
    """Values of a tile: its rows of x times its rows of weights."""

    @property
    def programs(self) -> int:
        """The number of programs in the grid."""
        return self.whole_tiles + self.split_tiles * self.splits

    @property
    def partial_sums(self) -> int:
        """The number of partial sums of all parts of all split tiles."""
        return self.split_tiles * self.splits * self.tile_values


def large_m_schedule(m: int, n: int, k: int, config: LargeMConfig, *, sm_count: int) -> LargeMSchedule:
    """Returns the schedule for x [m, k] by weights [n, k]."""
    k_steps = cdiv(k, GROUP) * GROUP // config.block_k
    steps_of_split = cdiv(k_steps, 2 * config.splits) * 2
    splits = cdiv(k_steps, steps_of_split)
    tiles = cdiv(m, config.block_m) * cdiv(n, LARGE_TILE_N)
    split_tiles = tiles % sm_count if config.splits_last_wave else tiles
    if splits == 1 or (config.splits_last_wave and split_tiles * splits > sm_count):
        split_tiles = 0
    tile_values = config.block_m * LARGE_TILE_N
    return LargeMSchedule(
        k_steps, tiles - split_tiles, split_tiles, splits if split_tiles else 1, steps_of_split, tile_values
    )
