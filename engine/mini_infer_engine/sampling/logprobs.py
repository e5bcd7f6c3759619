"""Log probabilities of chosen tokens and of the most likely ones, from raw logits: before bias, penalties and filters.

This is vLLM's default (`raw_logprobs`). Tensors stay on the device until they are read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mini_infer_engine.core.batch import Row
from mini_infer_engine.core.request import TokenLogprobs
from mini_infer_engine.device import to_device


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Log probabilities at some rows of logits."""

    token_ids: Tensor  # [rows] int64
    logprobs: Tensor  # [rows] fp32, of token_ids
    ranks: Tensor  # [rows] int64, 1 for the most likely token
    top_token_ids: Tensor  # [rows, most] int64, the most likely first
    top_logprobs: Tensor  # [rows, most] fp32

    def on_host(self) -> "LogprobTensors":
        """Returns a copy in main memory. From a GPU the copies are only queued, and must be waited for."""
        parts = (self.token_ids, self.logprobs, self.ranks, self.top_token_ids, self.top_logprobs)
        if not self.token_ids.is_cuda:
            return self
        pinned = [torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in parts]
        for target, part in zip(pinned, parts, strict=True):
            target.copy_(part, non_blocking=True)
        return LogprobTensors(*pinned)

    def read(self, counts: Sequence[int]) -> list[TokenLogprobs]:
        """Returns plain data; the tensors must be in main memory. `counts` has each row's number of most likely tokens
        (-1: all).
        """
        columns = (self.token_ids, self.logprobs, self.ranks, self.top_token_ids, self.top_logprobs)
        lists = [column.tolist() for column in columns]
        ends = [None if count < 0 else count for count in counts]
        return [
            TokenLogprobs(token, logprob, rank, top_ids[:end], top[:end])
            for token, logprob, rank, top_ids, top, end in zip(*lists, ends, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class PackedLogprobs:
    """Log probabilities as one tensor, which takes only one copy from a GPU."""

    packed: Tensor  # [rows, 3 + 2 most] int32: token, rank, bits of its logprob, top tokens, bits of their logprobs

    def on_host(self) -> "PackedLogprobs":
        """Returns a copy in main memory. From a GPU the copy is only queued, and must be waited for."""
        if not self.packed.is_cuda:
            return self
        pinned = torch.empty(self.packed.shape, dtype=self.packed.dtype, pin_memory=True)
        pinned.copy_(self.packed, non_blocking=True)
        return PackedLogprobs(pinned)

    def read(self, counts: Sequence[int]) -> list[TokenLogprobs]:
        """Returns plain data; the tensor must be in main memory. `counts` has each row's number of likely tokens."""
        integers = self.packed.numpy()
        values = integers.view(np.float32)
        most = (integers.shape[1] - 3) // 2
        columns = (integers[:, 0], values[:, 2], integers[:, 1], integers[:, 3 : 3 + most], values[:, 3 + most :])
        lists = [column.tolist() for column in columns]
        return [
            TokenLogprobs(token, logprob, rank, top_ids[:count], top[:count])
            for token, logprob, rank, top_ids, top, count in zip(*lists, counts, strict=True)
        ]


def token_logprobs(logits: Tensor, token_ids: Tensor, most: int, named: Sequence[Sequence[int]] = ()) -> LogprobTensors:
    """Computes log probabilities of token_ids [rows] int64 and of the `most` most likely tokens (-1: all).

    The logits [rows, vocab] have any float type. `named` has, for each row, at most `most` tokens to report instead of
    the most likely ones; a row without any reports the most likely ones.
    """
    wide = logits.float()
    normaliser = wide.logsumexp(dim=-1, keepdim=True)
    chosen = wide.gather(1, token_ids[:, None])
    ranks = (wide > chosen).sum(dim=-1) + 1
    top = wide.topk(wide.shape[1] if most < 0 else min(most, wide.shape[1]), dim=-1)
    indices, values = top.indices, top.values
    for row, tokens in enumerate(named):
        if tokens:
            indices[row, : len(tokens)] = to_device(np.array(tokens, dtype=np.int64), logits.device)
    if any(named):
        values = wide.gather(1, indices)
    return LogprobTensors(token_ids, (chosen - normaliser).squeeze(1), ranks, indices, values - normaliser)


def most_of(counts: Sequence[int]) -> int:
    """Returns the width that serves all rows: the largest number, or -1 if one is -1, which means all."""
    return -1 if -1 in counts else max(counts)


def rows_with_logprobs(rows: Sequence[Row]) -> list[tuple[int, int]]:
    """Returns (index, number of most likely tokens) of the rows that sample and request log probabilities."""
    return [
        (index, len(row.sampling.logprob_token_ids or ()) or row.sampling.logprobs)
        for index, row in enumerate(rows)
        if row.sampling is not None and row.sampling.logprobs is not None
    ]


def named_tokens(rows: Sequence[Row]) -> list[Sequence[int]]:
    """Returns the tokens named by each row that samples and requests log probabilities; empty if no row names any."""
    named: list[Sequence[int]] = [
        row.sampling.logprob_token_ids or ()
        for row in rows
        if row.sampling is not None and row.sampling.logprobs is not None
    ]
    return named if any(named) else []
