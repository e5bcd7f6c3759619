"""Computes log probabilities of sampled tokens on a GPU, from the raw logits of the rows that request them.

Raw logits are those before bias, masks, penalties and filters. Does not sample.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from mini_infer_engine.core.batch import Row
from mini_infer_engine.device import to_device
from mini_infer_engine.kernels.sampling.top_logprobs import MAX_TOP_LOGPROBS, TOP_WIDTHS, top_logprobs
from mini_infer_engine.sampling.logprobs import (
    LogprobTensors,
    PackedLogprobs,
    most_of,
    named_tokens,
    rows_with_logprobs,
    token_logprobs,
)


@dataclass(frozen=True, slots=True)
class RequestedLogprobs:
    """Rows of one part of a pass that request log probabilities, before their tokens are sampled."""

    rows: list[tuple[int, int]]
    """Pairs (row of the part, number of most likely tokens); -1 means all."""
    logits: Tensor  # [any, vocab], raw
    logit_rows: Tensor  # [requested] int32, rows of `logits`
    slot_rows: Tensor  # [requested] int32, rows of the part's slots
    named: list[Sequence[int]]
    """Tokens that each row reports instead of the most likely ones; empty if no row names any."""

    def compute(self, slots: Tensor, last_tokens: Tensor) -> LogprobTensors | PackedLogprobs:
        """Computes them for slots [rows] int32 of the part, whose tokens have been sampled into last_tokens [slots]
        int64.
        """
        most = most_of([number for _, number in self.rows])
        if 0 <= most <= MAX_TOP_LOGPROBS:
            named = self._named(most) if self.named else None
            return PackedLogprobs(
                top_logprobs(self.logits, self.logit_rows, slots, self.slot_rows, last_tokens, most, named)
            )
        chosen = last_tokens.index_select(0, slots.index_select(0, self.slot_rows))
        return token_logprobs(self.logits.index_select(0, self.logit_rows), chosen, most, self.named)

    def _named(self, most: int) -> Tensor:
        """Returns the named tokens on the device, [requested, most] int32, -1 where a row names none."""
        padded = np.full((len(self.named), most), -1, dtype=np.int32)
        for line, tokens in zip(padded, self.named, strict=True):
            line[: len(tokens)] = tokens
        return to_device(padded, self.logits.device)


class CudaLogprobs:
    """The slots of one runner whose requests want log probabilities, and the computation of these."""

    def __init__(self, most_rows: int, device: torch.device) -> None:
        """Prepares for parts of a pass with up to `most_rows` rows."""
        self._slots: set[int] = set()
        self._first_rows = torch.arange(most_rows, dtype=torch.int32, device=device)
        self._uploaded: tuple[list[int], Tensor] = ([], self._first_rows[:0])
        """Rows of the last part and their copy on the device; most often they are those of the next part too."""

    def kernels(self, logits: Tensor, slots: Tensor, last_tokens: Tensor) -> Iterator[Callable[[], object]]:
        """Yields work that runs every variant on one row [1, vocab] of a slot [1], so that no request waits for a
        compiler.
        """
        row = self._first_rows[:1]
        for top in TOP_WIDTHS:
            unnamed = torch.full((1, top), -1, dtype=torch.int32, device=logits.device)
            for named in (None, unnamed):
                yield partial(top_logprobs, logits, row, slots, row, last_tokens, top, named)

    def begin(self, row: Row) -> None:
        """Updates the record of slots that request log probabilities, for the request in the row's slot."""
        if row.sampling is not None and row.sampling.logprobs is not None:
            self._slots.add(row.slot)
        else:
            self._slots.discard(row.slot)

    def requested(self, rows: list[Row], logits: Tensor, *, are_masked: bool) -> RequestedLogprobs | None:
        """Returns the log probabilities that rows of a part request, or None. `are_masked`: masks will change the
        logits in place.

        Suppressed tokens change them, too. In both cases the raw logits of the rows that need them are copied.
        """
        if not self.concerns(rows):
            return None
        requested = rows_with_logprobs(rows)
        if not requested:
            return None
        slot_rows = logit_rows = self._on_device([row for row, _ in requested], logits.device)
        if are_masked or any(row.suppressed_token_ids for row in rows):
            logits, logit_rows = logits.index_select(0, slot_rows), self._first(len(requested))
        return RequestedLogprobs(requested, logits, logit_rows, slot_rows, named_tokens(rows))

    def _first(self, count: int) -> Tensor:
        """Returns [count] int32: 0, 1, ..."""
        if count > len(self._first_rows):
            self._first_rows = torch.arange(2 * count, dtype=torch.int32, device=self._first_rows.device)
        return self._first_rows[:count]

    def concerns(self, rows: Sequence[Row]) -> bool:
        """Returns True if one of these rows may request log probabilities."""
        return bool(self._slots) and not self._slots.isdisjoint([row.slot for row in rows])

    def _on_device(self, rows: list[int], device: torch.device) -> Tensor:
        if rows != self._uploaded[0]:
            self._uploaded = (rows, to_device(np.array(rows, dtype=np.int32), device))
        return self._uploaded[1]
