"""Implements SmoothQuant (Xiao et al. 2022, arXiv 2211.10438): divides columns of activations, and multiplies the
weights'.

A product keeps its value, because the norm before it takes the divisors into its weights; but both operands round to 8
bits with less error. Products that follow no norm are left as they are, as in the paper. This module is arithmetic on
tensors alone.
"""

import torch
from torch import Tensor

ALPHA = 0.5
"""The share of the difficulty that moves from activations to weights: the paper's value for most models."""
_LEAST = 1e-5


def smoothing_divisors(activation_maxima: Tensor, weight_maxima: Tensor) -> Tensor:
    """Returns the divisors [columns] fp32 from each column's largest magnitudes; 1 if a column is all zero."""
    divisors = activation_maxima.float().pow(ALPHA) / weight_maxima.float().pow(1 - ALPHA)
    usual = (activation_maxima > 0) & (weight_maxima > 0)
    return torch.where(usual, divisors, 1.0).clamp_(min=_LEAST)


def smoothed(
    norm_weight: Tensor, weight: Tensor, activation_maxima: Tensor, weight_maxima: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the norm's weights [columns] in their dtype, and the weight [rows, columns] in fp32, for an equal
    product.

    `weight_maxima` are those of columns over all of the product's rows, of which `weight` may be a rank's shard. The
    weight makes up for the rounding of the norm's weights to their dtype.
    """
    wide = norm_weight.float()
    divided = (wide / smoothing_divisors(activation_maxima, weight_maxima)).to(norm_weight.dtype)
    exact = torch.where(divided != 0, wide / divided.float(), 1.0)
    return divided, weight.float() * exact
