"""Provides the buffer of a pipeline stage on a GPU where passes, captured or not, find hidden states and leave them.

Graphs read and write one buffer; transfers between devices happen outside of them. It knows no layers.
"""

import torch
from torch import Tensor

from mini_infer_engine.runtime.cuda.device_state import DeviceBatchState
from mini_infer_engine.runtime.stage_traffic import StageTraffic
from mini_infer_engine.runtime.worker import ModelWorker


class CudaStage:
    """The hidden states of one stage of several."""

    def __init__(self, worker: ModelWorker, state: DeviceBatchState, most_tokens: int) -> None:
        """Allocates the buffer; `most_tokens` is the largest captured pass, with its padding."""
        self.traffic = StageTraffic(worker, state.state.last_tokens)
        self.is_first, self.is_last = self.traffic.is_first, self.traffic.is_last
        width = worker.config.hidden_size
        self.hidden = torch.zeros((most_tokens, width), dtype=worker.dtype, device=worker.device)
        self._num_tokens = 0
        self._made: Tensor | None = None

    def enter(self, num_tokens: int, padded: int) -> None:
        """Receives the previous stage's hidden states before a captured pass, and clears the pass's padding."""
        self._num_tokens = num_tokens
        if self.is_first:
            return
        self.traffic.receive_into(self.hidden[:num_tokens])
        if padded > num_tokens:
            self.hidden[num_tokens:padded].zero_()  # what passes add to padding would grow with each of them

    def leave(self, hidden: Tensor) -> None:
        """Stores the hidden states of all tokens of a pass that is not captured."""
        self._made = hidden

    def take(self) -> Tensor:
        """Returns the pass's hidden states [tokens, hidden], in memory of their own."""
        made, self._made = self._made, None
        return self.hidden[: self._num_tokens].clone() if made is None else made
