"""The activations between an expert's two products: SwiGLU and GEGLU (Shazeer, arXiv:2002.05202), and gpt-oss's, which
is clamped (gpt-oss model card, arXiv 2508.10925).
"""

import triton
import triton.language as tl

SWIGLU_ALPHA: tl.constexpr = tl.constexpr(1.702)


@triton.jit
def gated(gate, up, dtype: tl.constexpr, LIMIT: tl.constexpr, GELU: tl.constexpr):
    """Returns silu(gate) * up in fp32, with silu(gate) rounded to `dtype`; if LIMIT is above 0, clamped as in
    `layers.moe.swiglu_oai`. GELU: the approximation of gelu by tanh instead of silu.
    """
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        result = gate / (1.0 + tl.exp(-(gate * SWIGLU_ALPHA))) * (up + 1.0)
    elif GELU:
        twice = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 1 + tanh(x) is 2 sigmoid(2 x)
        result = (gate / (1.0 + tl.exp(-twice))).to(dtype).to(tl.float32) * up
    else:
        result = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up
    return result
