"""What a stage of a pipeline gets and hands on with each pass: hidden states between stages, tokens to the first one.

Executors call it at the same points of every pass; what moves, and how much of it, follows from the batch alone. It
knows neither layers nor sampling.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mini_infer_engine.core.batch import Batch, Row
from mini_infer_engine.device import to_device
from mini_infer_engine.runtime.worker import ModelWorker

_MOST_RETURNING = 2
"""For each stage, passes whose tokens the first stage may still have to take in, though no row needs them."""


@dataclass(slots=True)
class _Returning:
    """Tokens of a pass on their way from the last stage to the first."""

    slots: set[int]
    on_device: Tensor  # [samples] int64, the same slots in the order of the tokens
    tokens: Tensor  # [samples] int64
    wait: Callable[[], object]


class StageTraffic:
    """Of one stage of several."""

    def __init__(self, worker: ModelWorker, last_tokens: Tensor) -> None:
        """`last_tokens` [slots] int64: on the last stage what was sampled, on the first what has come from there."""
        self._link, self._stage = worker.link, worker.config.stage
        self._last_tokens = last_tokens
        self._width, self._dtype, self._device = worker.config.hidden_size, worker.dtype, worker.device
        self._returning: deque[_Returning] = deque()
        self.is_first, self.is_last = self._stage.is_first, self._stage.is_last

    def begin(self, batch: Batch) -> None:
        """Before a pass. The first stage takes in the tokens that its decode rows go on from."""
        decoding = {row.slot for row in batch.rows[: batch.num_decodes]}
        needed = 0
        for number, returning in enumerate(self._returning, start=1):
            if not decoding.isdisjoint(returning.slots):
                needed = number
        needed = max(needed, len(self._returning) - _MOST_RETURNING * self._stage.size)
        for _ in range(needed):
            one = self._returning.popleft()
            one.wait()
            self._last_tokens.index_copy_(0, one.on_device, one.tokens)

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
            tokens = torch.empty(len(slots), dtype=torch.int64, device=self._device)
            wait = self._link.receive_tokens(tokens)
            self._returning.append(_Returning(set(slots), self._indices(slots), tokens, wait))

    def return_tokens(self, rows: list[Row]) -> None:
        """The last stage has sampled the pass: the first one learns of it."""
        if slots := _sampling_slots(rows):
            self._link.send_tokens(self._last_tokens.index_select(0, self._indices(slots)))

    def _indices(self, slots: list[int]) -> Tensor:
        return to_device(np.array(slots, dtype=np.int64), self._device)


def _sampling_slots(rows: list[Row]) -> list[int]:
    return [row.slot for row in rows if row.sampling is not None]
