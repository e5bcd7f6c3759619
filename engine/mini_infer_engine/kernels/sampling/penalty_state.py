"""Defines the state of all slots that the penalty kernels read and write; the owner of the slots provides it."""

from typing import Protocol

import torch

MAX_COUNT = (1 << 15) - 3
"""The value from which a token's count is not increased any more: 16,382 times in one output."""


class PenaltyState(Protocol):
    """The penalty tensors of all slots, on the device."""

    counts: torch.Tensor  # [slots, vocab] int16: twice the times that the output has the token, plus one: in the prompt
    strengths: torch.Tensor  # [slots, 3] fp32: repetition, presence, frequency
