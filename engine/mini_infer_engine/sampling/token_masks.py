"""Masks of a pass on its logits: what a request's grammar does not allow here cannot be chosen. In plain torch."""

import math

import numpy as np
import torch
from torch import Tensor

from mini_infer_engine.core.batch import TokenMasks
from mini_infer_engine.device import to_device


def apply_token_masks(logits: Tensor, masks: TokenMasks, rows: list[int]) -> Tensor:
    """New logits [rows, vocab]; `rows` are the indices in the batch of the rows of `logits`, ascending."""
    places = {row: place for place, row in enumerate(rows)}
    chosen = [(places[row], bits) for row, bits in zip(masks.rows, masks.bits, strict=True) if row in places]
    if not chosen:
        return logits
    index = to_device(np.array([place for place, _ in chosen], dtype=np.int64), logits.device)
    bits = to_device(np.stack([bits for _, bits in chosen]).view(np.int32), logits.device)
    masked = logits.index_select(0, index).masked_fill(~unpacked(bits, logits.shape[1]), -math.inf)
    return logits.index_copy(0, index, masked)


def unpacked(bits: Tensor, vocab_size: int) -> Tensor:
    """[rows, vocab] bool of [rows, words] int32."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    return ((bits[:, :, None] >> shifts) & 1).bool().flatten(1)[:, :vocab_size]
