"""Applies requests' changes of logits before penalties and filters: biases, allowed tokens, banned continuations.

Rows without any of these cost nothing. The meaning is vLLM's (`logit_bias`, `allowed_token_ids`, `bad_words`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mini_infer_engine.core.batch import Row
from mini_infer_engine.device import to_device


@dataclass(frozen=True, slots=True)
class LogitChanges:
    """The changes of the sampling rows of one pass, on its device."""

    bias: tuple[Tensor, Tensor, Tensor] | None
    """Tensors (row, token, value to add): int64, int64, fp32."""
    allowed: tuple[Tensor, Tensor] | None
    """Pairs (row, token) of rows that have a list of allowed tokens; int64."""
    restricted_rows: Tensor | None
    """Rows that have a list of allowed tokens; int64."""
    banned: tuple[Tensor, Tensor, Tensor] | None
    """Tensors (row, token before or -1 for any, token that may not follow); int64."""

    def apply(self, logits: Tensor, last_tokens: Tensor) -> Tensor:
        """Returns new logits [rows, vocab] fp32; `last_tokens` [rows] int64 are the rows' newest tokens."""
        changed = logits.to(torch.float32, copy=True)
        if self.bias is not None:
            rows, tokens, values = self.bias
            changed.index_put_((rows, tokens), values, accumulate=True)
        if self.allowed is not None and self.restricted_rows is not None:
            kept = changed[self.allowed]
            changed.index_fill_(0, self.restricted_rows, -math.inf)
            changed[self.allowed] = kept
        if self.banned is not None:
            rows, before, tokens = self.banned
            follows = (before < 0) | (last_tokens[rows] == before)
            lowered = torch.where(follows, -math.inf, changed[rows, tokens])
            # Several bans may name one token, met and unmet: the lowest counts.
            changed.view(-1).scatter_reduce_(0, rows * changed.shape[1] + tokens, lowered, "amin")
        return changed


def build_logit_changes(rows: Sequence[Row], device: torch.device) -> LogitChanges | None:
    """Returns the changes of these sampling rows, without waiting for the device, or None if there are none."""
    sampled = [(index, row, row.sampling) for index, row in enumerate(rows) if row.sampling is not None]
    bias = [(index, token, value) for index, _, params in sampled for token, value in params.logit_bias.items()]
    restricted = [
        (index, params.allowed_token_ids) for index, _, params in sampled if params.allowed_token_ids is not None
    ]
    banned = [
        (index, -1 if before is None else before, token) for index, row, _ in sampled for before, token in row.banned
    ]
    if not (bias or restricted or banned):
        return None

    def integers(values: Sequence[int]) -> Tensor:
        return to_device(np.array(values, dtype=np.int64), device)

    bias_tensors = allowed_tensors = banned_tensors = None
    if bias:
        bias_rows, bias_tokens, values = zip(*bias, strict=True)
        amounts = to_device(np.array(values, dtype=np.float32), device)
        bias_tensors = integers(bias_rows), integers(bias_tokens), amounts
    if restricted:
        pairs = [(index, token) for index, tokens in restricted for token in tokens]
        allowed_rows, allowed_tokens = zip(*pairs, strict=True)
        allowed_tensors = integers(allowed_rows), integers(allowed_tokens)
    if banned:
        banned_rows, before, tokens = zip(*banned, strict=True)
        banned_tensors = integers(banned_rows), integers(before), integers(tokens)
    rows_restricted = integers([index for index, _ in restricted]) if restricted else None
    return LogitChanges(bias_tensors, allowed_tensors, rows_restricted, banned_tensors)
