"""Applies a pass's masks to its logits, so that tokens that a request's grammar forbids cannot be chosen. In plain
torch.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mini_infer_engine.core.batch import TokenMasks
from mini_infer_engine.device import to_device


def apply_token_masks(logits: Tensor, masks: TokenMasks, places: Sequence[tuple[int, int]]) -> None:
    """Masks logits [rows, vocab] in place; `places` has each line's row in the batch and the draft tokens before."""
    lines = {place: line for line, place in enumerate(places)}
    for row, guesses, bits in masks.entries():
        if (line := lines.get((row, guesses))) is not None:
            logits[line].masked_fill_(_forbidden(bits, logits.shape[1], logits.device), -math.inf)


def _forbidden(bits: np.ndarray, vocab_size: int, device: torch.device) -> Tensor:
    """Returns the tokens whose bit is not set, [vocab] bool."""
    allowed = np.unpackbits(bits.view(np.uint8), count=vocab_size, bitorder="little")
    return to_device(allowed == 0, device)
