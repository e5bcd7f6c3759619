"""Computes digests of tokens in a page pool at the speed of memory: `kv_transfer.token_digests` on a GPU."""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.launchers import Relaunched
from mini_infer_engine.kernels.sizes import cdiv

_TOKENS, _ROWS, _COLUMNS = 8, 8, 128
"""Tokens, halves of layers, and words of each at a time, that one program adds up: 64 KB."""
_HEADER = 2
"""Numbers before the pages."""
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
_SECOND = tl.constexpr(0x94D049BB133111EB - (1 << 64))
"""The odd numbers of SplitMix64, as signed ones."""


@triton.jit(
    do_not_specialize=[
        *(
            "num_tokens",
            "first_offset",
            "page_words",
            "half_words",
            "first_word",
            "token_stride",
            "head_stride",
            "num_rows",
        ),
        *("num_columns", "first_column", "first_index", "row_indices", "golden", "word_mask"),
    ]
)
def _token_digests(
    words,
    numbers,
    num_tokens,
    first_offset,
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
    PAGE_SIZE: tl.constexpr,
    HEAD_WORDS: tl.constexpr,
    HEADER: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Adds up the products of some rows of some tokens, with one program per (TOKENS tokens, ROWS rows).

    The factor of a word grows by the same number from row to row, so that each word costs one product.
    """
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_token = tokens < num_tokens
    at = first_offset + tokens
    page = tl.load(numbers + HEADER + at // PAGE_SIZE, mask=is_token, other=0)
    offset = at % PAGE_SIZE
    mixed = (tl.load(numbers + 1) + tokens) * golden  # `token_factors`
    mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * _FIRST
    mixed = (mixed ^ ((mixed >> 27) & 0x1FFFFFFFFF)) * _SECOND
    token_factor = tl.where(is_token, (mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)) | 1, 0)
    first_row = (tl.program_id(1) * ROWS).to(tl.int64)
    start = words + (page * page_words + first_word + offset * token_stride + first_row * half_words)[:, None]
    total = tl.zeros((TOKENS, COLUMNS), dtype=tl.int64)
    for begin in range(0, num_columns, COLUMNS):
        columns = (begin + tl.arange(0, COLUMNS)).to(tl.int64)
        in_row = columns // HEAD_WORDS * head_stride + columns % HEAD_WORDS
        factor = (2 * (first_index + first_row * row_indices + first_column + columns) + 1) * golden
        is_word = is_token[:, None] & (columns < num_columns)[None, :]
        for row in range(ROWS):
            place = start + (row * half_words + in_row)[None, :]
            word = tl.load(place, mask=is_word & (first_row + row < num_rows), other=0).to(tl.int64) & word_mask
            total += (word ^ ((word >> 32) & 0xFFFFFFFF)) * factor[None, :]
            factor += 2 * row_indices * golden
    products = tl.sum(total, axis=1) * token_factor
    tl.atomic_add(numbers, tl.sum(products, axis=0), sem="relaxed")  # whole numbers: the order changes nothing


class TokenSums:
    """Digests of some heads of tokens of a pool, in all half layers, by one launch for any number of tokens."""

    def __init__(
        self,
        words: torch.Tensor,
        *,
        page_size: int,
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
    ) -> None:
        """Takes the words of the pool, integers of any width.

        `first_word` is the place of the first of these heads in a half page, `first_column` that in a row of the whole
        model. `Region` explains the others; `golden` is the constant as a signed number.
        """
        width, columns = 8 * words.element_size(), num_heads * head_words
        self._words, self._programs_of_rows = words, cdiv(num_rows, _ROWS)
        self._places = (
            *(page_words, half_words, first_word, token_stride, head_stride, num_rows),
            *(columns, first_column, first_index, row_indices, golden, -1 if width == 64 else (1 << width) - 1),
            *(page_size, head_words, _HEADER, _TOKENS, _ROWS, min(_COLUMNS, triton.next_power_of_2(columns))),
        )
        self._launch = Relaunched(_token_digests, num_warps=4)

    def add(self, numbers: torch.Tensor, num_tokens: int, first_offset: int) -> None:
        """Adds the sum of word * factor * the token's factor, over tokens that follow each other, to the first number.

        `numbers` [2 + pages] int64 are that sum, the number of the first token in its sequence, and the pages of the
        tokens, in whose first it is at `first_offset`.
        """
        grid = cdiv(num_tokens, _TOKENS), self._programs_of_rows, 1
        self._launch(grid, self._words, numbers, num_tokens, first_offset, *self._places)
