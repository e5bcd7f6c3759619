"""Attention sinks (Xiao et al. 2023, arXiv 2309.17453) as learned logits: gpt-oss has one for each head, whose share
of the softmax reads no value.
"""

import triton
import triton.language as tl


@triton.jit
def add_sinks(acc, l_i, m_i, sinks, scale, UNIT: tl.constexpr):
    """Adds a logit to the online softmax of each row: returns acc [rows, dims], l_i [rows] and m_i [rows].

    `sinks` [rows] are natural logits; m_i times `scale` is in base two. Each probability in acc and l_i is multiplied
    by UNIT. A sink of minus infinity changes nothing: of a row's splits one alone adds its sink.
    """
    log2e: tl.constexpr = 1.4426950408889634
    logits = sinks * (log2e / scale)
    m_new = tl.maximum(m_i, logits)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2((m_i - shift) * scale)
    return acc * alpha[:, None], l_i * alpha + UNIT * tl.exp2((logits - shift) * scale), m_new
