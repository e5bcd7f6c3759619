"""Masks of a pass on its logits: what a request's grammar does not allow here cannot be chosen. In plain torch."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mini_infer_engine.core.batch import TokenMasks
from mini_infer_engine.device import to_device


def apply_token_masks(logits: Tensor, masks: TokenMasks, rows: Sequence[int]) -> None:
    """Mask logits [rows, vocab] in place; `rows` are their indices in the batch."""
    places = {row: place for place, row in enumerate(rows)}
    for row, bits in zip(masks.rows, masks.bits, strict=True):
        if row in places:
            logits[places[row]].masked_fill_(_forbidden(bits, logits.shape[1], logits.device), -math.inf)


def _forbidden(bits: np.ndarray, vocab_size: int, device: torch.device) -> Tensor:
    """[vocab] bool: the tokens whose bit is not set."""
    allowed = np.unpackbits(bits.view(np.uint8), count=vocab_size, bitorder="little")
    return to_device(allowed == 0, device)
