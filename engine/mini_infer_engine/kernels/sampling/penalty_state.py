"""What the penalty kernels read and write of all slots; the owner of the slots provides it."""

from typing import Protocol

import torch

MAX_COUNT = (1 << 15) - 3
"""A token's count is not raised from here on: 16,382 times in one output."""


class PenaltyState(Protocol):
    """Tensors on the device."""

    counts: torch.Tensor  # [slots, vocab] int16: twice the times that the output has the token, plus one: in the prompt
    strengths: torch.Tensor  # [slots, 3] fp32: repetition, presence, frequency
