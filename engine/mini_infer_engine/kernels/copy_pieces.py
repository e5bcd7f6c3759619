"""Copies scattered pieces of memory, of this GPU or mapped from a peer, by one launch.

A few persistent programs share the work, so that concurrent kernels keep their streaming multiprocessors. It knows
addresses and sizes, not their content.
"""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.sizes import cdiv

PROGRAMS = 32
"""The number of persistent programs, each of which moves one tile at a time.

On an H200 16 copy 280 to 400 GB/s, as much as NVLink carries, and 32 copy 530 to 720. Beside large GEMMs, which leave
them few SMs, 32 copy twice as much as 16 and slow the GEMMs less in all.
"""
_TILE_BYTES = 16 << 10
SMALL_ROWS = 16
"""Pieces in a tile if one piece does not fill half of it."""
_WARPS = 8


@triton.jit
def _copy_pieces(pieces, count, words, WORD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Copies tiles of ROWS pieces by BLOCK words of WORD bits, in a loop of a few persistent programs.

    `pieces` [count, 2] int64: source and target address.
    """
    blocks = tl.cdiv(words, BLOCK)
    tiles = tl.cdiv(count, ROWS) * blocks
    alignment: tl.constexpr = 16 if WORD == 32 else 1
    kind = tl.pointer_type(tl.int32 if WORD == 32 else tl.int8)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        at = tile % blocks * BLOCK + tl.arange(0, BLOCK)
        if ROWS == 1:
            line = pieces + tile // blocks * 2
            source = tl.multiple_of(tl.load(line).to(kind), alignment)
            target = tl.multiple_of(tl.load(line + 1).to(kind), alignment)
            mask = at < words
            tl.store(target + at, tl.load(source + at, mask=mask), mask=mask)
        else:
            rows = tile // blocks * ROWS + tl.arange(0, ROWS)
            line = pieces + rows * 2
            is_there = rows < count
            source = tl.multiple_of(tl.load(line, mask=is_there, other=0).to(kind), [alignment])
            target = tl.multiple_of(tl.load(line + 1, mask=is_there, other=0).to(kind), [alignment])
            mask = is_there[:, None] & (at < words)[None, :]
            values = tl.load(source[:, None] + at[None, :], mask=mask)
            tl.store(target[:, None] + at[None, :], values, mask=mask)


def warm_up(device: torch.device) -> None:
    """Compiles and loads the kernels for aligned pieces of all sizes."""
    memory = torch.zeros(4 * _TILE_BYTES, dtype=torch.uint8, device=device)
    begin = memory.data_ptr()
    pieces = torch.tensor([[begin, begin + 2 * _TILE_BYTES]], dtype=torch.int64, device=device)
    for size in (_TILE_BYTES, _TILE_BYTES + 16, 64, 16):  # Triton compiles multiples of 16 words apart
        copy_pieces(pieces, size, is_aligned=True)


def copy_pieces(pieces: torch.Tensor, size: int, *, is_aligned: bool, programs: int = PROGRAMS) -> None:
    """Copies `size` bytes of each of pieces [pieces, 2] int64, on the device: from an address, to an address.

    `is_aligned`: all addresses and the size are multiples of 16. No target overlaps another piece.
    """
    word_bytes = 4 if is_aligned else 1
    rows = SMALL_ROWS if is_aligned and 2 * size <= _TILE_BYTES else 1
    count, words, block = pieces.shape[0], size // word_bytes, _TILE_BYTES // rows // word_bytes
    tiles = cdiv(count, rows) * cdiv(words, block)
    _copy_pieces[(min(tiles, programs),)](
        pieces, count, words, WORD=8 * word_bytes, ROWS=rows, BLOCK=block, num_warps=_WARPS
    )
