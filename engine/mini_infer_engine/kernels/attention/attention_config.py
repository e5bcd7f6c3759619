"""Launch configs of the attention kernels, and the rules by which sizes decide them.

Does not know devices beyond their number of SMs, and launches nothing.
"""

from dataclasses import dataclass, replace

import torch

from mini_infer_engine.kernels.sizes import next_power_of_2

MANY_HEAD_ROWS = 65
"""Rows times KV heads from which decode attention's small programs, several an SM, read better."""
_MAX_PDL_ROWS = 16
"""A step of 8 rows is 3 to 5 % shorter where attention begins while the GEMM before runs (H200, three models); of 32
rows it is 4 to 23 % longer: its programs then take room that the GEMM needs."""

_HOPPER_BLOCK_TOKENS, _HOPPER_BLOCK_ELEMENTS, _LEAST_BLOCK_TOKENS = 128, 16_384, 32
"""Of hopper_decode_attention's blocks of keys, of which two fit an SM beside their values. (On an H100 blocks of 64,
two programs an SM, are up to 10 % better with 8 rows of 512 tokens and 10 % worse from 4,096 on.)"""
_HOPPER_SOME_PER_SM, _HOPPER_MANY_PER_SM = 1.5, 3.0
"""Rows times KV heads an SM from which its programs have blocks of half the keys in three stages, and of a quarter in
two: several of them share an SM, and one of a short sequence does not begin a block of 128. On an H200, with 8 KV
heads, 64 rows take 0.54 to 1.00 of the time with 48 to 4,096 tokens, 256 rows 0.48 to 0.96 with 48 to 1,500, 512 rows
0.45, 0.70 and 0.95 with 48, 300 and 900; 32 rows, with half the keys, 0.67 to 0.99 with 48 to 4,096."""
_HOPPER_GROUP = 16
"""Query heads of a KV head that its tile has room for."""
_HOPPER_HEAD_DIMS = (64, 128, 256)

_QUANTIZED_PROGRAMS_PER_SM = 4
"""Of two warps each, over pages of one byte an element: a block of keys then takes as long as one of twice the bytes
(32 rows of 8,192 tokens took 136 us on an H200, in bf16 130), so that twice as many have to be under way."""

_TILE_QUERIES = 128
"""Queries of a FlashAttention-3 tile, and keys of its blocks."""
_MIN_TILES_PER_HEAD = 50
"""Tiles of one head: with fewer, the kernel for Hopper leaves SMs idle, for it does not split keys."""
_LONG_PROMPT_TOKENS = 512
"""New tokens from which it is faster with fewer tiles, too. Behind a long context the two are equal then."""
_MIN_CHUNK_TOKENS = 64
"""New tokens a sequence on average: FlashAttention-2 fills a tile with several heads' queries, this kernel does not."""
_FEW_SEQUENCES = 8
"""Every captured pass has room for so many: a count up to this says nothing of how many there will be."""
_SHORT_CONTEXT_TOKENS = 1024
"""Up to this context small tiles, several an SM, hide each other's beginnings: up to twice as fast."""
_MIN_ROWS_OF_WIDE_PAGES = 128
"""(Query, head) pairs of a KV head and sequence, on average, from which pages are widened for FlashAttention-3. By
calculation for an H200 it is even at 170: an element of a page is read and written, 3 bytes at 3.5 TB/s, and its
product with each pair goes at 680 TFLOPS instead of 250. Fewer are asked for, since a captured pass counts padding."""
_WIDE_SEQUENCES = 2
"""Sequences of the longest context whose wide pages scratch memory holds."""
_MOST_WIDE_BYTES = 512 << 20
"""Of that scratch memory: 131,072 tokens of 8 KV heads with 128 elements each."""

MOST_CHECKED_SEQUENCES = 128
"""Sequences of a pass, up to which check attention is used instead of three kernels: as many as guess at once.

Of a 7B shape on an H200 a check of five guesses takes 3,753 us instead of 3,876 at batch 1, 4,310 instead of 4,493 at
8, 6,473 instead of 6,454 at 32 and 18,997 instead of 19,281 at 128.
"""
_MOST_CHECK_ROWS = 64
"""(Query, head) pairs of a tile of check attention: of more, the merge of splits does not fit in registers."""
_SMALL_CHECK_ROWS = 32
"""Up to these two programs fit on an SM."""


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Launch config of decode attention: how many programs split the keys, and how each of them reads."""

    target_programs: int
    """Over all KV heads, where there are fewer rows; 0: one program for each row and KV head."""
    block_tokens: int = 64
    """Keys read at a time; splits are of whole blocks."""
    warps: int = 4
    stages: int = 2
    programs_per_row: float = 1.5
    """At least, for each KV head: in a large batch long sequences are split, or the last to begin would be late."""
    pdl: bool = False
    """Launched by programmatic dependent launch."""
    hopper: bool = False
    """Computed by hopper_decode_attention, which is always launched that way."""


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """Sizes of attention from the prompt chunks of a pass."""

    dtype: torch.dtype
    pages_dtype: torch.dtype
    tokens: int
    """New ones, from which is attended; a captured pass counts its padding, too."""
    sequences: int
    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    sliding_window: int | None
    longest_key: int
    """Tokens of the longest sequence with its new ones, or more."""
    caps_scores: bool = False
    """Whether scores are soft-capped."""
    pages: int = 0
    """Of all sequences, or more."""
    wide_pages: int = 0
    """In 16 bits, for which there is scratch memory."""

    @property
    def widened(self) -> "PrefillShape":
        """The same over pages that have been widened to the queries' dtype."""
        return replace(self, pages_dtype=self.dtype)


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Launch config of the FlashAttention-2 kernel."""

    rows: int
    """(query, head) pairs of a tile."""
    keys: int
    """Keys read at a time."""
    warps: int
    stages: int
    programs: int
    """Where tiles are fewer, so many programs split their keys."""


@dataclass(frozen=True, slots=True)
class HopperPrefillConfig:
    """Launch config of the FlashAttention-3 kernel for Hopper."""

    programs: int
    """Persistent: at most one an SM."""
    widens: bool = False
    """Whether it reads one-byte pages that have been widened to 16 bits before."""


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
    """For so many rows of one new token; pdl: whether the device and the policy allow programmatic dependent launch.

    quantized: a block of keys has half the bytes, so that one more of them is under way. hopper_block: what
    `hopper_decode_block` says where hopper_decode_attention may be used.
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
    """Keys of a block of hopper_decode_attention, and its stages."""
    if programs_per_sm >= _HOPPER_MANY_PER_SM:
        return max(_LEAST_BLOCK_TOKENS, largest // 4), 2
    if programs_per_sm >= _HOPPER_SOME_PER_SM:
        return max(_LEAST_BLOCK_TOKENS, largest // 2), 3
    return largest, 2


def hopper_decode_block(shape: PrefillShape) -> int | None:
    """Keys of the largest block of hopper_decode_attention; None: it cannot compute this.

    It has pages of 16 bits an element and of whole blocks, heads of a power of two, up to 16 of them a KV head, and no
    soft cap.
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
    """For a few new tokens of each sequence, in tiles of so many rows; None: attention of prompt chunks is for these.

    row_bytes: of a head's key, padded.
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
    """Of absorbed latent attention: a block of latents is as large as one of keys and values of several heads, so that
    two programs fit on an SM.
    """
    few = rows <= _MAX_PDL_ROWS
    target_programs = 2 * sm_count if split_kv else 0
    return DecodeConfig(target_programs, 32, programs_per_row=1.5 if split_kv else 1.0, pdl=pdl and few)


def prefill_config(shape: PrefillShape, sm_count: int, shared_memory_bytes: int) -> PrefillConfig:
    """The largest tiles of (query, head) pairs that fit and are worth it.

    fp32 does without tensor cores, which would want large tiles.
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
    for config in configs[first:-1]:
        tile_rows = config.rows + 2 * (config.stages - 1) * config.keys  # queries', keys', values'
        if tile_rows * row_bytes <= shared_memory_bytes:
            return config
    return configs[-1]


def supports_hopper_fa3(shape: PrefillShape) -> bool:
    """Whether the FlashAttention-3 kernel can compute this: 16-bit pages of whole blocks, no window that masks, no
    soft cap.
    """
    masks = shape.sliding_window is not None and shape.sliding_window < shape.longest_key
    halves = shape.pages_dtype in (torch.bfloat16, torch.float16)
    fits = shape.head_dim in (64, 128) and shape.page_size % _TILE_QUERIES == 0
    return halves and fits and not masks and not shape.caps_scores


def hopper_fa3_is_faster(tokens: int, sequences: int, q_heads: int) -> bool:
    """Whether it has the work that it needs. A captured pass counts padded tokens and sequences: it knows no others."""
    are_long = sequences <= _FEW_SEQUENCES or tokens >= _MIN_CHUNK_TOKENS * sequences
    return are_long and (tokens >= _LONG_PROMPT_TOKENS or tokens * q_heads >= _MIN_TILES_PER_HEAD * _TILE_QUERIES)


def fits_wide_pages(shape: PrefillShape) -> bool:
    """Whether the pages are of one byte an element, and in 16 bits FlashAttention-3 reads them and they fit."""
    fits = shape.wide_pages > 0 and shape.pages <= shape.wide_pages
    return fits and shape.pages_dtype.itemsize == 1 and supports_hopper_fa3(shape.widened)


def widening_pays(shape: PrefillShape) -> bool:
    """Whether the queries are so many that widening the pages takes less time than it saves."""
    rows_of_kv_head = shape.tokens * (shape.q_heads // shape.kv_heads)
    return rows_of_kv_head >= _MIN_ROWS_OF_WIDE_PAGES * shape.sequences


def wide_pages(longest_sequence: int, page_size: int, page_bytes: int) -> int:
    """Pages in 16 bits, of `page_bytes` in a layer, that scratch memory is to hold; longest_sequence in tokens."""
    return min(_WIDE_SEQUENCES * -(-longest_sequence // page_size), _MOST_WIDE_BYTES // page_bytes)
