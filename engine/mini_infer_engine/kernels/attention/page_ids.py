"""Looks up the pages of a block of a sequence's tokens, in Triton."""

import triton
import triton.language as tl


@triton.jit
def page_ids(table, start, last, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the pages of a block's tokens: one page, or one for each token. Tokens after `last` have its page."""
    tokens = start if PAGE_SIZE % BLOCK == 0 else start + tl.arange(0, BLOCK)
    return tl.load(table + tl.minimum(tokens, last) // PAGE_SIZE).to(tl.int64)
