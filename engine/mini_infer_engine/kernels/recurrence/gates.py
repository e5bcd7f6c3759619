"""Computes the decays, time steps and normed queries and keys of linear recurrences, within kernels."""

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
def normalised_rows(x, axis: tl.constexpr):
    """Returns queries or keys of length 1 along the axis, which is 0 for one of them."""
    squares = tl.sum(x * x, axis=axis, keep_dims=True)
    return x * tl.rsqrt(squares + 1e-6)
