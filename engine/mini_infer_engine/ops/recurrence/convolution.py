"""Computes causal depthwise convolutions over tokens, continued from a sequence's last inputs.

The state is what comes before the next token: the last `kernel - 1` inputs of each channel, the latest at the end. The
operation is that of Dao's causal-conv1d (https://github.com/Dao-AILab/causal-conv1d).
"""

import torch
from torch import Tensor
from torch.nn import functional


def convolve_scan(state: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the convolution of one sequence's tokens x [tokens, channels], and the state after them.

    `state` is [channels, kernel - 1], `weight` [channels, 1, kernel].
    """
    extended = torch.cat((state, x.t()), dim=-1)
    out = functional.conv1d(extended, weight, bias, groups=weight.shape[0])
    return out.t(), extended[:, extended.shape[1] - state.shape[1] :]


def convolve_step(states: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the convolution at one token x [sequences, channels] of each sequence, and the states after it.

    `states` is [sequences, channels, kernel - 1].
    """
    extended = torch.cat((states, x.unsqueeze(-1)), dim=-1)
    out = (extended * weight.squeeze(1)).sum(dim=-1)
    return out if bias is None else out + bias, extended[..., 1:]
