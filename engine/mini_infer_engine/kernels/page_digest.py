"""Computes digests of pages at the speed of memory: a multilinear hash of their 64-bit words, modulo 2**64.

Word i is multiplied by an odd constant of its own, (2i + 1) times 2**64 over the golden ratio, and all products are
added (Carter and Wegman 1979). Any change of one word changes the digest, since odd factors are invertible, and so does
any exchange of two. It is no protection against people. `runtime.memory.page_digests` computes the same on a CPU.
"""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.launchers import Relaunched
from mini_infer_engine.kernels.sizes import cdiv

_BLOCK = 2048
_BLOCKS = 4
"""Blocks of words that one program adds up: 64 KB."""


@triton.jit(do_not_specialize=["is_compared"])
def _page_digests(
    words, numbers, known, is_compared, num_words, first, golden, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    """Adds the products of one piece of a page to the page's sum, with one program per (page, piece)."""
    place, count, piece = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    row = words + tl.load(numbers + count + place) * num_words
    total = tl.zeros((BLOCK,), dtype=tl.int64)
    for block in range(BLOCKS):
        places = (piece * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        word = tl.load(row + places, mask=places < num_words, other=0)
        total += word * ((2 * (places.to(tl.int64) + first) + 1) * golden)
    subtracts = (piece == 0) & (is_compared != 0)
    known_row = tl.load(numbers + 2 * count + place, mask=subtracts, other=0)
    difference = tl.sum(total, axis=0) - tl.load(known + known_row, mask=subtracts, other=0)
    tl.atomic_add(numbers + place, difference, sem="relaxed")  # whole numbers: the order changes nothing


class PageSums:
    """Digests of rows of words [rows, words] int64 on the GPU, by one launch for any number of them."""

    def __init__(self, words: torch.Tensor, first: int, golden: int) -> None:
        """The words count as those from `first` on of larger pages, whose digest is the sum of their parts' modulo
        2**64. `golden` is 2**64 over the golden ratio as a signed number.
        """
        self._words, self._numbers_of_words = words, (words.shape[1], first, golden, _BLOCK, _BLOCKS)
        self._pieces = cdiv(words.shape[1], _BLOCK * _BLOCKS)
        self._launch = Relaunched(_page_digests, num_warps=8)

    def add(self, numbers: torch.Tensor, known: torch.Tensor | None = None) -> None:
        """Adds the digest of each of n rows to numbers[0], given their indices in numbers[1]; `numbers` [2 or 3, n] are
        int64 on the GPU. With `known` [any] int64, subtracts the digest that it has at numbers[2].
        """
        is_compared = known is not None
        target = numbers if known is None else known
        self._launch(
            (numbers.shape[1], self._pieces, 1), self._words, numbers, target, int(is_compared), *self._numbers_of_words
        )
