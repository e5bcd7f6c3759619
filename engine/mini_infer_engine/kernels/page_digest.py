"""Computes digests of pages at the speed of memory: a multilinear hash of their 64-bit words, modulo 2**64.

Word i is multiplied by an odd constant of its own, (2i + 1) times 2**64 over the golden ratio, and all products are
added (Carter and Wegman 1979). Any change of one word changes the digest, since odd factors are invertible, and so does
any exchange of two. It is no protection against people. `runtime.memory.host_tier` computes the same on a CPU.
"""

import torch
import triton
import triton.language as tl

from mini_infer_engine.kernels.sizes import cdiv

_BLOCK = 2048
_BLOCKS = 4
"""Blocks of words that one program adds up: 64 KB."""


@triton.jit
def _page_digests(words, pages, sums, num_words, first, golden, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Adds the products of one piece of a page, with one program per (page, piece)."""
    page, piece = tl.load(pages + tl.program_id(0)).to(tl.int64), tl.program_id(1)
    row = words + page * num_words
    total = tl.zeros((BLOCK,), dtype=tl.int64)
    for block in range(BLOCKS):
        places = (piece * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        word = tl.load(row + places, mask=places < num_words, other=0)
        total += word * ((2 * (places.to(tl.int64) + first) + 1) * golden)
    tl.store(sums + tl.program_id(0) * tl.num_programs(1) + piece, tl.sum(total, axis=0))


def page_digests(words: torch.Tensor, pages: torch.Tensor, first: int, golden: int) -> torch.Tensor:
    """Returns a digest [n] int64 of each of these pages [n] int64, rows of words [pages, words] int64, all on the GPU.

    The words count as those from `first` on of larger pages, whose digest is the sum of their parts' modulo 2**64.
    `golden` is 2**64 over the golden ratio as a signed number.
    """
    num_words = words.shape[1]
    pieces = cdiv(num_words, _BLOCK * _BLOCKS)
    sums = torch.empty((pages.shape[0], pieces), dtype=torch.int64, device=words.device)
    _page_digests[(pages.shape[0], pieces)](
        words, pages, sums, num_words, first, golden, BLOCK=_BLOCK, BLOCKS=_BLOCKS, num_warps=8
    )
    return sums.sum(dim=1)
