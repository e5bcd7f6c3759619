"""What a stage of a pipeline gets and hands on with each pass: hidden states between stages, tokens to the first one.

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
"""For each stage, passes whose tokens the first stage may still have to take in, though no row needs them."""


class StageTraffic:
    """Of one stage of several."""

    def __init__(self, worker: ModelWorker, last_tokens: Tensor) -> None:
        """`last_tokens` [slots] int64: on the last stage what was sampled, on the first what has come from there."""
        self._link, self._stage = worker.link, worker.config.stage
        self._last_tokens = last_tokens
        self._width, self._dtype, self._device = worker.config.hidden_size, worker.dtype, worker.device
        self._returning: deque[list[int]] = deque()
        """Of the first stage: the slots of each pass whose tokens it has not received yet, in their order."""
        self.is_first, self.is_last = self._stage.is_first, self._stage.is_last

    def begin(self, batch: Batch) -> None:
        """Before a pass. The first stage takes in the tokens that its decode rows go on from.

        Not sooner: on a GPU a receive that waits for its sender keeps a multiprocessor from what is computed meanwhile.
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
        """What the stage before has made of a pass: [tokens, hidden], the caller's to write over."""
        return self.receive_into(torch.empty((num_tokens, self._width), dtype=self._dtype, device=self._device))

    def receive_into(self, hidden: Tensor) -> Tensor:
        """The same in given memory [tokens, hidden], dense."""
        return self._link.receive_hidden(hidden)

    def hand_on(self, rows: list[Row], hidden: Tensor) -> None:
        """The pass is computed as far as this stage goes; hidden [tokens, hidden], dense, is nobody else's."""
        self._link.send_hidden(hidden)
        slots = _sampling_slots(rows)
        if self.is_first and slots:
            self._returning.append(slots)

    def return_tokens(self, rows: list[Row]) -> None:
        """The last stage has sampled the pass: the first one learns of it."""
        if slots := _sampling_slots(rows):
            self._link.send_tokens(self._last_tokens.index_select(0, self._indices(slots)))

    def _indices(self, slots: list[int]) -> Tensor:
        return to_device(np.array(slots, dtype=np.int64), self._device)


def _sampling_slots(rows: list[Row]) -> list[int]:
    return [row.slot for row in rows if row.sampling is not None]
