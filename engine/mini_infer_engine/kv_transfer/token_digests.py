"""Defines the digest of tokens in a page pool, which is the same on both sides of a transfer whatever their pages,
ranks and dtypes.

A digest is the sum modulo 2**64, over all words of all tokens, of word * factor(word's place) * factor(token). A place
counts layers, halves, heads and words of a head in the whole model, and a token counts from the sequence's begin. So
the digests of pages, layers and ranks add up, and any change of one word changes the sum, for all factors are odd
(Carter and Wegman 1979). Each word is mixed with its upper half first: otherwise two changes of highest bits would
cancel out. It finds faults, not forgeries. Pure numbers; `pool_digests` reads memory.
"""

import math
from dataclasses import dataclass

import numpy as np

from mini_infer_engine.kv_transfer.layout import KVLayout

GOLDEN = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio, which is odd."""
MODULUS = 1 << 64
STATE_TOKEN = 1 << 40
"""The token number of a recurrent state: no sequence has so many tokens."""


@dataclass(frozen=True, slots=True)
class Region:
    """Equal words of each token and head in a half page: their elements, or their scales in a quantised pool."""

    word_bytes: int
    first_word: int
    """The place of the region in a half page, in words."""
    token_stride: int
    """Words from a token to the next."""
    head_stride: int
    """Words from a head to the next."""
    head_words: int
    """Words of a token and head, which follow each other."""
    first_index: int
    """The index of the region's first word in the whole model, which decides its factor."""
    row_indices: int
    """The indices of a half of a layer."""


def word_bytes_of(layout: KVLayout) -> int:
    """Returns the bytes of the words of which the digest of elements is made: the most that divide a head, up to 8."""
    return math.gcd(8, layout.head_bytes)


def regions(pool: KVLayout, total_heads: int, word_bytes: int) -> list[Region]:
    """Returns the regions of a pool's half pages, whose elements are divided into words of `word_bytes`."""
    head_words = pool.head_bytes // word_bytes
    row_indices = total_heads * head_words
    elements = Region(word_bytes, 0, pool.num_heads * head_words, head_words, head_words, 0, row_indices)
    if not pool.scale_bytes:
        return [elements]
    first_word, first_index = pool.page_size * pool.row_bytes // pool.scale_bytes, row_indices * num_rows(pool)
    return [elements, Region(pool.scale_bytes, first_word, 1, pool.page_size, 1, first_index, total_heads)]


def num_rows(layout: KVLayout) -> int:
    """Returns the halves of all layers."""
    return layout.num_layers * layout.halves


def token_factors(tokens: np.ndarray) -> np.ndarray:  # [tokens] int64 -> [tokens] uint64
    """Returns an odd factor for each token: SplitMix64's hash of its number (Steele, Lea and Flood 2014)."""
    with np.errstate(over="ignore"):
        mixed = tokens.astype(np.uint64) * np.uint64(GOLDEN)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)


def place_factors(region: Region, rows: int, first_head: int, num_heads: int) -> np.ndarray:  # [rows, words] uint64
    """Returns odd factors of the words of some heads, numbered as in the whole model, in each half of each layer."""
    with np.errstate(over="ignore"):
        columns = first_head * region.head_words + np.arange(num_heads * region.head_words, dtype=np.uint64)
        indices = np.arange(rows, dtype=np.uint64)[:, None] * np.uint64(region.row_indices) + columns.astype(np.uint64)
        return (2 * (indices + np.uint64(region.first_index)) + np.uint64(1)) * np.uint64(GOLDEN)


def mix_words(words: np.ndarray, out: np.ndarray) -> None:  # uint64 each
    """Adds the upper half of each word to its lower one by exclusive or, which is invertible."""
    np.right_shift(words, np.uint64(32), out=out)
    np.bitwise_xor(words, out, out=out)
