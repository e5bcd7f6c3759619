"""Computes digests of tokens in a page pool at the speed of memory: `kv_transfer.token_digests` on a GPU."""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.sizes import cdiv

_ROWS, _COLUMNS = 8, 256
"""Halves of layers, and words of each at a time, that one program adds up: 16 KB."""


@triton.jit(
    do_not_specialize=[
        *("page_words", "half_words", "first_word", "token_stride", "head_stride", "num_rows", "num_columns"),
        *("first_column", "first_index", "row_indices", "golden", "word_mask"),
    ]
)
def _token_digests(
    words,
    pages,
    offsets,
    sums,
    page_words,
    half_words,
    first_word,
    token_stride,
    head_stride,
    num_rows,
    num_columns,
    first_column,
    first_index,
    row_indices,
    golden,
    word_mask,
    HEAD_WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Adds up the products of some rows of one token, with one program per (token, ROWS rows)."""
    token = tl.program_id(0)
    page, offset = tl.load(pages + token).to(tl.int64), tl.load(offsets + token).to(tl.int64)
    rows = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    start = words + page * page_words + first_word + offset * token_stride
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.int64)
    for begin in range(0, num_columns, COLUMNS):
        columns = (begin + tl.arange(0, COLUMNS))[None, :]
        places = rows * half_words + columns // HEAD_WORDS * head_stride + columns % HEAD_WORDS
        is_word = (rows < num_rows) & (columns < num_columns)
        word = tl.load(start + places, mask=is_word, other=0).to(tl.int64) & word_mask
        word = word ^ ((word >> 32) & 0xFFFFFFFF)
        index = first_index + rows * row_indices + first_column + columns
        total += word * ((2 * index + 1) * golden)
    tl.store(sums + token * tl.num_programs(1) + tl.program_id(1), tl.sum(tl.sum(total, axis=1), axis=0))


def token_digests(
    words: torch.Tensor,
    pages: torch.Tensor,
    offsets: torch.Tensor,
    *,
    page_words: int,
    half_words: int,
    first_word: int,
    token_stride: int,
    head_stride: int,
    head_words: int,
    num_rows: int,
    num_heads: int,
    first_column: int,
    first_index: int,
    row_indices: int,
    golden: int,
) -> torch.Tensor:
    """Returns the sum [tokens] int64 of word * factor over some heads of each token, in all `num_rows` half layers.

    `words` are those of the pool, integers of any width; tokens are at pages and offsets [tokens] int64. `first_word`
    is the place of the first of these heads in a half page, `first_column` that in a row of the whole model. `Region`
    explains the others; `golden` is the constant as a signed number.
    """
    chunks = cdiv(num_rows, _ROWS)
    sums = torch.empty((pages.shape[0], chunks), dtype=torch.int64, device=words.device)
    width = 8 * words.element_size()
    _token_digests[(pages.shape[0], chunks)](
        words,
        pages,
        offsets,
        sums,
        page_words,
        half_words,
        first_word,
        token_stride,
        head_stride,
        num_rows,
        num_heads * head_words,
        first_column,
        first_index,
        row_indices,
        golden,
        -1 if width == 64 else (1 << width) - 1,
        HEAD_WORDS=head_words,
        ROWS=_ROWS,
        COLUMNS=min(_COLUMNS, triton.next_power_of_2(num_heads * head_words)),
        num_warps=4,
    )
    return sums.sum(dim=1)
