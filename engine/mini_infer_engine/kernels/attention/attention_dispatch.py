"""Which of two kernels attends from the prompt chunks of a pass. It knows sizes, not devices."""

import torch

_TILE_ROWS = 128
_LEAST_TILES = 50
"""Tiles of one head: with fewer, the kernel for Hopper leaves multiprocessors idle, for it shares none of them."""
_MANY_TOKENS = 512
"""Of a first prompt, for which it is faster with fewer tiles, too. Behind a long context the two are equal then."""
_LEAST_TOKENS_OF_SEQUENCE = 64
"""Of a chunk, on average: the other kernel fills its tiles with several heads' queries, this one with one head's."""
_FEW_SEQUENCES = 8
"""As many as every captured pass has room for: it says nothing of how many there will be."""


def supports_hopper_fa3(
    dtype: torch.dtype, head_dim: int, page_size: int, sliding_window: int | None, longest_key: int
) -> bool:
    """Whether `hopper_prefill_attention` can compute this."""
    cut = sliding_window is not None and sliding_window < longest_key
    halves = dtype in (torch.bfloat16, torch.float16)
    return halves and head_dim in (64, 128) and page_size % _TILE_ROWS == 0 and not cut


def hopper_fa3_is_faster(tokens: int, sequences: int, q_heads: int) -> bool:
    """Whether it has the work that it needs. A captured pass counts padded tokens and sequences: it knows no others."""
    are_long = sequences <= _FEW_SEQUENCES or tokens >= _LEAST_TOKENS_OF_SEQUENCE * sequences
    return are_long and (tokens >= _MANY_TOKENS or tokens * q_heads >= _LEAST_TILES * _TILE_ROWS)
