"""Applies grammar masks to logits: a token whose bit is not set gets minus infinity, in place.

A program processes one masked row and block of tokens. It reads a thirty-second of a word for each token, and writes
only masked logits.
"""

import triton
import triton.language as tl
from torch import Tensor

from mini_infer_engine.kernels.sizes import cdiv

_BLOCK_TOKENS = 2048


@triton.jit
def _apply_token_masks(logits, packed, logits_stride, packed_stride, vocab_size, num_words, BLOCK: tl.constexpr):
    """Masks with one program per (mask, block of the vocabulary)."""
    mask = packed + tl.program_id(0).to(tl.int64) * packed_stride
    row = tl.load(mask).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(mask + 1 + tokens // 32, mask=tokens // 32 < num_words, other=0)
    is_masked = ((words >> (tokens % 32)) & 1) == 0
    places = logits + row * logits_stride + tokens
    tl.store(places, float("-inf"), mask=is_masked & (tokens < vocab_size))


def apply_token_masks(logits: Tensor, packed: Tensor) -> None:
    """Masks some rows of logits [rows, vocab] of any float type.

    `packed` [masks, 1 + words] int32: the row of `logits`, then the words; bit t % 32 of word t // 32 allows token t.
    Tokens beyond the last word are masked.
    """
    vocab_size = logits.shape[1]
    strides, num_words = (logits.stride(0), packed.stride(0)), packed.shape[1] - 1
    grid = (packed.shape[0], cdiv(vocab_size, _BLOCK_TOKENS))
    _apply_token_masks[grid](logits, packed, *strides, vocab_size, num_words, BLOCK=_BLOCK_TOKENS, num_warps=4)
