"""Masks of a pass on its logits: what a request's grammar does not allow here cannot be chosen. In plain torch."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mini_infer_engine.core.batch import TokenMasks
from mini_infer_engine.device import to_device


def apply_token_masks(logits: Tensor, masks: TokenMasks, places: Sequence[tuple[int, int]]) -> None:
    """Mask logits [rows, vocab] in place; `places`: of each, its row in the batch, and the guesses before it."""
    lines = {place: line for line, place in enumerate(places)}
    for row, guesses, bits in masks.entries():
        if (line := lines.get((row, guesses))) is not None:
            logits[line].masked_fill_(_forbidden(bits, logits.shape[1], logits.device), -math.inf)


def _forbidden(bits: np.ndarray, vocab_size: int, device: torch.device) -> Tensor:
    """[vocab] bool: the tokens whose bit is not set."""
    allowed = np.unpackbits(bits.view(np.uint8), count=vocab_size, bitorder="little")
    return to_device(allowed == 0, device)
