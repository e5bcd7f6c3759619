"""Chooses launch configs of the attention kernels by sizes.

Knows nothing of devices but their number of SMs and shared memory, and launches nothing.
"""

from dataclasses import dataclass, replace

import torch

from mini_infer_engine.kernels.sizes import next_power_of_2

MANY_HEAD_ROWS = 65
"""Rows times KV heads from which decode attention uses small programs, several per SM, which then read faster."""
_MAX_PDL_ROWS = 16
"""The largest number of rows for which decode attention uses programmatic dependent launch.

A step of 8 rows is 3 to 5 % shorter if attention begins while the GEMM before runs (H200, three models). A step of 32
rows is 4 to 23 % longer: the programs of attention then take resources that the GEMM needs.
"""

_HOPPER_BLOCK_TOKENS, _HOPPER_BLOCK_ELEMENTS, _LEAST_BLOCK_TOKENS = 128, 16_384, 32
"""The largest block of keys of hopper_decode_attention in tokens and in elements, and the smallest in tokens.

Two blocks of keys fit on an SM beside their values. (On an H100 blocks of 64, with two programs per SM, are up to 10 %
faster with 8 rows of 512 tokens and 10 % slower from 4,096 on.)
"""
_HOPPER_SOME_PER_SM, _HOPPER_MANY_PER_SM = 1.5, 3.0
"""Rows times KV heads per SM from which hopper_decode_attention uses half the largest block in three stages, and a
quarter of it in two stages.

Several of its programs then share an SM, and one of a short sequence does not read a block of 128. On an H200, with 8
KV heads, 64 rows take 0.54 to 1.00 of the time with 48 to 4,096 tokens, 256 rows 0.48 to 0.96 with 48 to 1,500, 512
rows 0.45, 0.70 and 0.95 with 48, 300 and 900; 32 rows, with half the keys, 0.67 to 0.99 with 48 to 4,096.
"""
_HOPPER_GROUP = 16
"""The largest number of query heads of a KV head that fit a tile of hopper_decode_attention."""
_HOPPER_HEAD_DIMS = (64, 128, 256)

_QUANTIZED_PROGRAMS_PER_SM = 4
"""Programs per SM, of two warps each, over pages with one byte an element.

A block of keys then takes as long as one with twice the bytes (32 rows of 8,192 tokens took 136 us on an H200, in bf16
130), so that twice as many must be in flight.
"""

_TILE_QUERIES = 128
"""Queries of a FlashAttention-3 tile, and keys of its blocks."""
_MIN_TILES_PER_HEAD = 50
"""Tiles of one head below which the Hopper kernel leaves SMs idle, because it does not split keys."""
_LONG_PROMPT_TOKENS = 512
"""New tokens from which the Hopper kernel is faster with fewer tiles, too. After a long context both are equal then."""
_MIN_CHUNK_TOKENS = 64
"""Mean new tokens per sequence for the Hopper kernel: FlashAttention-2 fills a tile with several heads, it does not."""
_FEW_SEQUENCES = 8
"""The number of sequences for which every captured pass has room: a count up to this predicts nothing."""
_SHORT_CONTEXT_TOKENS = 1024
"""The context up to which small tiles, several per SM, hide each other's start-up: up to twice as fast."""
_MIN_ROWS_OF_WIDE_PAGES = 128
"""Mean number of (query, head) pairs per KV head and sequence from which pages are widened for FlashAttention-3.

By calculation for an H200 the break-even is at 170: an element of a page is read and written, 3 bytes at 3.5 TB/s, and
its product with each pair runs at 680 TFLOPS instead of 250. The limit is lower because a captured pass counts padding.
"""
_WIDE_SEQUENCES = 2
"""The number of sequences of the longest context whose wide pages fit scratch memory."""
_MOST_WIDE_BYTES = 512 << 20
"""The largest size of that scratch memory: 131,072 tokens of 8 KV heads with 128 elements each."""

_MOST_ROW_BYTES = 1024
"""Bytes of a head up to which prompts have tiles of 32 rows and more: heads of 512 in fp32 are wider."""

MOST_CHECKED_SEQUENCES = 128
"""Sequences of a pass up to which check attention replaces three kernels: as many as may speculate at once.

For a 7B shape on an H200 a check of five guesses takes 3,753 us instead of 3,876 at batch 1, 4,310 instead of 4,493 at
8, 6,473 instead of 6,454 at 32 and 18,997 instead of 19,281 at 128.
"""
_MOST_CHECK_ROWS = 64
"""The largest number of (query, head) pairs in a tile of check attention: a merge of more does not fit registers."""
_SMALL_CHECK_ROWS = 32
"""Rows of a tile up to which two programs fit on an SM."""


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """The launch config of decode attention: how many programs split the keys, and how each of them reads."""

    target_programs: int
    """Programs over all KV heads, if there are fewer rows; 0: one program for each row and KV head."""
    block_tokens: int = 64
    """Keys read at a time; splits consist of whole blocks."""
    warps: int = 4
    stages: int = 2
    programs_per_row: float = 1.5
    """The least number of programs for each row and KV head.

    Long sequences of a large batch are split, because the last ones to begin would otherwise end late.
    """
    pdl: bool = False
    """True for programmatic dependent launch."""
    hopper: bool = False
    """True for hopper_decode_attention, which always uses programmatic dependent launch."""


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """The sizes of attention from the prompt chunks of a pass."""

    dtype: torch.dtype
    pages_dtype: torch.dtype
    tokens: int
    """New tokens, which attend; a captured pass counts its padding, too."""
    sequences: int
    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    sliding_window: int | None
    longest_key: int
    """Tokens of the longest sequence with its new ones, or an upper bound."""
    caps_scores: bool = False
    """True if scores are soft-capped."""
    pages: int = 0
    """Pages of all sequences, or an upper bound."""
    wide_pages: int = 0
    """Pages in 16 bits for which there is scratch memory."""

    @property
    def widened(self) -> "PrefillShape":
        """The shape over pages that have been widened to the queries' dtype."""
        return replace(self, pages_dtype=self.dtype)


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """The launch config of the FlashAttention-2 kernel."""

    rows: int
    """(Query, head) pairs in a tile."""
    keys: int
    """Keys read at a time."""
    warps: int
    stages: int
    programs: int
    """The number of programs that split the keys if there are fewer tiles."""


@dataclass(frozen=True, slots=True)
class HopperPrefillConfig:
    """The launch config of the FlashAttention-3 kernel for Hopper."""

    programs: int
    """The number of persistent programs, at most one per SM."""
    widens: bool = False
    """True if the kernel reads one-byte pages that have been widened to 16 bits before."""


def decode_config(
    rows: int,
    kv_heads: int,
    sm_count: int,
    *,
    split_kv: bool,
    pdl: bool,
    quantized: bool = False,
    hopper_block: int | None = None,
) -> DecodeConfig:
    """Returns the config for this many rows of one new token.

    pdl: the device and the policy allow programmatic dependent launch. quantized: a block of keys has half the bytes,
    so that one more of them is in flight. hopper_block: the result of `hopper_decode_block` if hopper_decode_attention
    may be used, else None.
    """
    are_few = rows * kv_heads < MANY_HEAD_ROWS
    if pdl and hopper_block is not None:
        one_an_sm = sm_count if split_kv else 0
        row_programs = (1.5 if are_few else 1.25) if split_kv else 1.0
        block, stages = _hopper_blocks(rows * kv_heads / sm_count, hopper_block)
        return DecodeConfig(one_an_sm, block, stages=stages, programs_per_row=row_programs, pdl=True, hopper=True)
    pdl = pdl and are_few and rows <= _MAX_PDL_ROWS
    programs_per_sm = _QUANTIZED_PROGRAMS_PER_SM if quantized and not are_few else 2
    target_programs = programs_per_sm * sm_count if split_kv else 0
    if are_few:
        stages = 3 if quantized else 2
        return DecodeConfig(target_programs, stages=stages, programs_per_row=1.5 if split_kv else 1.0, pdl=pdl)
    stages = 4 if quantized else 3
    return DecodeConfig(
        target_programs, block_tokens=32, warps=2, stages=stages, programs_per_row=1.25 if split_kv else 1.0, pdl=pdl
    )


def _hopper_blocks(programs_per_sm: float, largest: int) -> tuple[int, int]:
    """Returns the keys in a block of hopper_decode_attention, and its stages."""
    if programs_per_sm >= _HOPPER_MANY_PER_SM:
        return max(_LEAST_BLOCK_TOKENS, largest // 4), 2
    if programs_per_sm >= _HOPPER_SOME_PER_SM:
        return max(_LEAST_BLOCK_TOKENS, largest // 2), 3
    return largest, 2


def hopper_decode_block(shape: PrefillShape) -> int | None:
    """Returns the keys in the largest block of hopper_decode_attention, or None if it cannot compute this shape.

    It supports pages with 16 bits an element and of whole blocks, head widths of a power of two, up to 16 query heads
    per KV head, and no soft cap.
    """
    halves = shape.dtype in (torch.bfloat16, torch.float16) and shape.pages_dtype == shape.dtype
    fits = shape.head_dim in _HOPPER_HEAD_DIMS and shape.q_heads <= _HOPPER_GROUP * shape.kv_heads
    block = min(_HOPPER_BLOCK_TOKENS, _HOPPER_BLOCK_ELEMENTS // shape.head_dim, shape.page_size)
    whole = block >= _LEAST_BLOCK_TOKENS and block & (block - 1) == 0 and shape.page_size % block == 0
    return block if halves and fits and whole and not shape.caps_scores else None


def check_config(
    sequences: int,
    tile_rows: int,
    kv_heads: int,
    row_bytes: int,
    sm_count: int,
    shared_memory_bytes: int,
    *,
    split_kv: bool,
    pdl: bool,
) -> DecodeConfig | None:
    """Returns the config for a few new tokens of each sequence, in tiles of this many rows; None: as prompt chunks.

    row_bytes: the size of a head's key, padded.
    """
    if sequences > MOST_CHECKED_SEQUENCES or tile_rows > _MOST_CHECK_ROWS:
        return None
    config = decode_config(sequences, kv_heads, sm_count, split_kv=split_kv, pdl=pdl)
    if tile_rows > _SMALL_CHECK_ROWS:
        config = replace(config, target_programs=config.target_programs // 2, block_tokens=64, stages=2)
    if (tile_rows + 2 * config.stages * config.block_tokens) * row_bytes > shared_memory_bytes:
        config = replace(config, block_tokens=32, stages=2)
    fits = (tile_rows + 2 * config.stages * config.block_tokens) * row_bytes <= shared_memory_bytes
    return config if fits else None


def latent_decode_config(rows: int, sm_count: int, *, split_kv: bool, pdl: bool) -> DecodeConfig:
    """Returns the config of absorbed latent attention.

    A block of latents is as large as one of keys and values of several heads, so that two programs fit on an SM.
    """
    few = rows <= _MAX_PDL_ROWS
    target_programs = 2 * sm_count if split_kv else 0
    return DecodeConfig(target_programs, 32, programs_per_row=1.5 if split_kv else 1.0, pdl=pdl and few)


def prefill_config(shape: PrefillShape, sm_count: int, shared_memory_bytes: int) -> PrefillConfig:
    """Returns the largest tiles of (query, head) pairs that fit and pay.

    fp32 does not use tensor cores, which would need large tiles.
    """
    configs = (
        PrefillConfig(128, 128, 8, 3, sm_count),
        PrefillConfig(64, 64, 4, 3, 2 * sm_count),
        PrefillConfig(32, 32, 4, 2, sm_count),
        PrefillConfig(16, 16, 4, 2, sm_count),
    )
    fewer_tiles_than_sms = shape.tokens * (shape.q_heads // shape.kv_heads) * shape.kv_heads < 128 * sm_count
    is_short = shape.longest_key <= _SHORT_CONTEXT_TOKENS or fewer_tiles_than_sms
    first = 2 if shape.dtype == torch.float32 else 1 if is_short else 0
    row_bytes = next_power_of_2(shape.head_dim) * shape.dtype.itemsize
    if row_bytes > _MOST_ROW_BYTES:
        return configs[-1]
    for config in configs[first:-1]:
        tile_rows = config.rows + 2 * (config.stages - 1) * config.keys  # queries', keys', values'
        if tile_rows * row_bytes <= shared_memory_bytes:
            return config
    return configs[-1]


def supports_hopper_fa3(shape: PrefillShape) -> bool:
    """True if the FlashAttention-3 kernel can compute this shape.

    It supports 16-bit pages of whole blocks, no window that masks and no soft cap.
    """
    masks = shape.sliding_window is not None and shape.sliding_window < shape.longest_key
    halves = shape.pages_dtype in (torch.bfloat16, torch.float16)
    fits = shape.head_dim in (64, 128) and shape.page_size % _TILE_QUERIES == 0
    return halves and fits and not masks and not shape.caps_scores


def hopper_fa3_is_faster(tokens: int, sequences: int, q_heads: int) -> bool:
    """True if the FlashAttention-3 kernel has enough work to be faster.

    A captured pass counts padded tokens and sequences, because it knows no others.
    """
    are_long = sequences <= _FEW_SEQUENCES or tokens >= _MIN_CHUNK_TOKENS * sequences
    return are_long and (tokens >= _LONG_PROMPT_TOKENS or tokens * q_heads >= _MIN_TILES_PER_HEAD * _TILE_QUERIES)


def fits_wide_pages(shape: PrefillShape) -> bool:
    """True if the pages have one byte an element, and in 16 bits FlashAttention-3 reads them and they fit."""
    fits = shape.wide_pages > 0 and shape.pages <= shape.wide_pages
    return fits and shape.pages_dtype.itemsize == 1 and supports_hopper_fa3(shape.widened)


def widening_pays(shape: PrefillShape) -> bool:
    """True if there are so many queries that widening the pages takes less time than it saves."""
    rows_of_kv_head = shape.tokens * (shape.q_heads // shape.kv_heads)
    return rows_of_kv_head >= _MIN_ROWS_OF_WIDE_PAGES * shape.sequences


def wide_pages(longest_sequence: int, page_size: int, page_bytes: int) -> int:
    """Returns the number of 16-bit pages in scratch memory, given `page_bytes` in a layer and the longest sequence in
    tokens.
    """
    return min(_WIDE_SEQUENCES * -(-longest_sequence // page_size), _MOST_WIDE_BYTES // page_bytes)
