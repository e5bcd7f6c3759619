"""Computes the decays, time steps and gated norms of linear recurrences, within kernels."""

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """Returns log(1 + exp(x)) in fp32; above 20 it is x, as in torch, and near 0 a series, since 1 would absorb it."""
    x = x.to(tl.float32)
    power = tl.exp(tl.minimum(x, 20.0))
    small = power * (1.0 - power * (0.5 - power / 3.0))
    return tl.where(x > 20.0, x, tl.where(power < 0.01, small, tl.log(1.0 + power)))


@triton.jit
def decay_of(x, a_log, dt_bias):
    """Returns the logarithm of a gated delta net's decay, -exp(A) softplus(x + bias)."""
    return -tl.exp(a_log) * softplus(x.to(tl.float32) + dt_bias)


@triton.jit
def time_step_of(x, dt_bias, least, most):
    """Returns the time step of a Mamba-2 head, softplus(x + bias) within limits."""
    return tl.minimum(tl.maximum(softplus(x.to(tl.float32) + dt_bias), least), most)


@triton.jit
def gated_norm(x, gate, weight, eps, SIZE: tl.constexpr, dtype: tl.constexpr):
    """Returns norm(x) * weight * silu(gate) for rows [rows, SIZE] of heads, rounded where transformers rounds it."""
    x = x.to(dtype).to(tl.float32)
    gate = gate.to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / SIZE + eps)
    normed = (normed.to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype).to(tl.float32)
    return (normed * gate / (1.0 + tl.exp(-gate))).to(dtype)
