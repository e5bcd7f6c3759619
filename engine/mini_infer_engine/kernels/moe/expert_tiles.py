"""Chooses the tiles of the experts' products, by the mean number of tokens per expert.

The rule follows timings of three shapes on an H200: benchmarks/results/2026-11-24-one-h200.md.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Tile:
    """The tile of one program of grouped GEMM; for gate and up together it has BLOCK_N columns of each."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """The tiles of both products of experts."""

    height: int
    """Tokens in a tile."""
    gated: Tile
    down: Tile


MEAN_ROWS = {16: 10, 32: 20, 64: 96, 128: 128}
"""The largest mean number of tokens per expert for each height of a tile of tokens; the last height has no limit.

An expert with one more token than the height has two tiles, and may read its weights twice.
"""
_GATED = {16: Tile(32, 128, 2, 4), 32: Tile(64, 128, 4, 3), 64: Tile(64, 64, 4, 3), 128: Tile(128, 64, 8, 3)}
_DOWN = {16: Tile(64, 128, 4, 3), 32: Tile(128, 128, 4, 3), 64: Tile(128, 64, 8, 4), 128: Tile(256, 64, 8, 4)}


def tile_rows(mean_rows: float) -> int:
    """Returns the height of tiles for experts with this mean number of tokens."""
    return next((height for height, most in MEAN_ROWS.items() if mean_rows <= most), max(MEAN_ROWS))


def expert_tiles(mean_rows: float, itemsize: int, shared_memory_bytes: int, *, is_plain: bool) -> ExpertTiles:
    """Returns the tiles for experts with this mean number of tokens; `expert_tile` documents the other arguments."""
    height = tile_rows(mean_rows)
    gated, down = (
        expert_tile(height, itemsize, shared_memory_bytes, is_gated=is_gated, is_plain=is_plain)
        for is_gated in (True, False)
    )
    return ExpertTiles(height, gated, down)


def expert_tile(height: int, itemsize: int, shared_memory_bytes: int, *, is_gated: bool, is_plain: bool) -> Tile:
    """Returns the tile of the product with gate and up, or of the second one, with as many stages as fit shared memory.

    `itemsize` is that of x's elements, in bytes, and of plain weights'. Quantised weights are widened in registers, of
    which small tiles need fewer; fp32 does not use tensor cores.
    """
    if itemsize == 4:
        tile = Tile(32, 32, 4, 2)
    elif is_plain:
        tile = (_GATED if is_gated else _DOWN)[height]
    else:
        tile = Tile(64, 128, 4, 3) if height <= 32 else Tile(64 if is_gated else 128, 64, 8 if height == 128 else 4, 3)
    stage_bytes = (height + tile.block_n * (1 + is_gated)) * tile.block_k * itemsize
    return replace(tile, num_stages=max(2, min(tile.num_stages, shared_memory_bytes // stage_bytes)))
