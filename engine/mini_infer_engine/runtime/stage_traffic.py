"""Moves data between pipeline stages in each pass: hidden states to the next stage, sampled tokens to the first one.

Executors call it at the same points of every pass; what moves, and how much of it, follows from the batch alone. It
knows neither layers nor sampling.
"""

from collections import deque

import numpy as np
import torch
from torch import Tensor

from mini_infer_engine.core.batch import Batch, Row
from mini_infer_engine.device import to_device
from mini_infer_engine.runtime.worker import ModelWorker

_MOST_RETURNING = 2
"""Most passes, for each stage, whose tokens the first stage leaves unreceived as long as no row needs them."""


class StageTraffic:
    """The traffic of one stage of several."""

    def __init__(self, worker: ModelWorker, last_tokens: Tensor) -> None:
        """Wraps `last_tokens` [slots] int64: the last stage's sampled tokens, and the first stage's received copy of
        them.
        """
        self._link, self._stage = worker.link, worker.config.stage
        self._last_tokens = last_tokens
        self._width, self._dtype, self._device = worker.config.hidden_size, worker.dtype, worker.device
        self._returning: deque[list[int]] = deque()
        """Slots of each pass whose tokens the first stage has not received yet, in order of launch."""
        self.is_first, self.is_last = self._stage.is_first, self._stage.is_last

    def begin(self, batch: Batch) -> None:
        """Begins a pass. The first stage receives the tokens that its decode rows continue from.

        It does not do so sooner: on a GPU a waiting receive occupies a multiprocessor that other work could use.
        """
        decoding = {row.slot for row in batch.rows[: batch.num_decodes]}
        needed = 0
        for number, returning in enumerate(self._returning, start=1):
            if not decoding.isdisjoint(returning):
                needed = number
        needed = max(needed, len(self._returning) - _MOST_RETURNING * self._stage.size)
        for _ in range(needed):
            slots = self._returning.popleft()
            tokens = self._link.receive_tokens(torch.empty(len(slots), dtype=torch.int64, device=self._device))
            self._last_tokens.index_copy_(0, self._indices(slots), tokens)

    def receive(self, num_tokens: int) -> Tensor:
        """Returns the previous stage's hidden states of a pass, [tokens, hidden], which the caller may overwrite."""
        return self.receive_into(torch.empty((num_tokens, self._width), dtype=self._dtype, device=self._device))

    def receive_into(self, hidden: Tensor) -> Tensor:
        """Receives the previous stage's hidden states into the given memory [tokens, hidden], dense."""
        return self._link.receive_hidden(hidden)

    def hand_on(self, rows: list[Row], hidden: Tensor) -> None:
        """Sends the hidden states [tokens, hidden] of a pass to the next stage. They must be dense and not used
        elsewhere.
        """
        self._link.send_hidden(hidden)
        slots = _sampling_slots(rows)
        if self.is_first and slots:
            self._returning.append(slots)

    def return_tokens(self, rows: list[Row]) -> None:
        """Sends the tokens that the last stage has sampled to the first stage."""
        if slots := _sampling_slots(rows):
            self._link.send_tokens(self._last_tokens.index_select(0, self._indices(slots)))

    def _indices(self, slots: list[int]) -> Tensor:
        return to_device(np.array(slots, dtype=np.int64), self._device)


def _sampling_slots(rows: list[Row]) -> list[int]:
    return [row.slot for row in rows if row.sampling is not None]
