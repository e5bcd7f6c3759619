"""SmoothQuant (Xiao et al. 2022, arXiv 2211.10438): columns of activations are divided, those of weights multiplied.

A product stays what it was, for the norm before it takes the divisors into its weights; but both operands round to 8
bits with less error. Products that follow no norm are left as they are, as in the paper. Pure arithmetic on tensors.
"""

import torch
from torch import Tensor

ALPHA = 0.5
"""How much of the difficulty moves from activations to weights: the paper's, for most models."""
_LEAST = 1e-5


def smoothing_divisors(activation_maxima: Tensor, weight_maxima: Tensor) -> Tensor:
    """[columns] fp32, from the largest absolute values of each; 1 where a column has none."""
    divisors = activation_maxima.float().pow(ALPHA) / weight_maxima.float().pow(1 - ALPHA)
    usual = (activation_maxima > 0) & (weight_maxima > 0)
    return torch.where(usual, divisors, 1.0).clamp_(min=_LEAST)


def smoothed(
    norm_weight: Tensor, weight: Tensor, activation_maxima: Tensor, weight_maxima: Tensor
) -> tuple[Tensor, Tensor]:
    """The norm's weights [columns] in their dtype, and the product's [rows, columns] in fp32, of the same product.

    `weight_maxima`: of the columns of all of the product's rows, of which `weight` may be a rank's share. What the
    norm's weights round to in their dtype, the product's make up for.
    """
    wide = norm_weight.float()
    divided = (wide / smoothing_divisors(activation_maxima, weight_maxima)).to(norm_weight.dtype)
    exact = torch.where(divided != 0, wide / divided.float(), 1.0)
    return divided, weight.float() * exact
