"""Soft-capping of attention scores (Gemma 2, arXiv 2408.00118), between the product of queries and keys and softmax."""

import triton
import triton.language as tl


@triton.jit
def softcapped(scores, softcap):
    """Returns softcap * tanh(scores / softcap) in fp32, for scores in natural units; exact to an ulp of softcap."""
    log2e: tl.constexpr = 1.4426950408889634
    # An exponential that overflows, or vanishes, makes 1 or -1.
    return softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * log2e / softcap)) + 1.0))
