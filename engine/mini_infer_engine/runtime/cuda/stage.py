"""A stage of a pipeline on a GPU: where its passes, captured or not, find hidden states and leave them.

Graphs read and write one buffer; what moves between devices does so outside of them. It knows no layers.
"""

import torch
from torch import Tensor

from mini_infer_engine.runtime.cuda.device_state import DeviceBatchState
from mini_infer_engine.runtime.stage_traffic import StageTraffic
from mini_infer_engine.runtime.worker import ModelWorker


class CudaStage:
    """Of one stage of several."""

    def __init__(self, worker: ModelWorker, state: DeviceBatchState, most_tokens: int) -> None:
        """`most_tokens`: of a captured pass, with its padding."""
        self.traffic = StageTraffic(worker, state.state.last_tokens)
        self.is_first, self.is_last = self.traffic.is_first, self.traffic.is_last
        width = worker.config.hidden_size
        self.hidden = torch.zeros((most_tokens, width), dtype=worker.dtype, device=worker.device)
        self._num_tokens = 0
        self._made: Tensor | None = None

    def enter(self, num_tokens: int, padded: int) -> None:
        """Before a captured pass of so many tokens, padded to others: what the stage before has left stands ready."""
        self._num_tokens = num_tokens
        if self.is_first:
            return
        self.traffic.receive_into(self.hidden[:num_tokens])
        if padded > num_tokens:
            self.hidden[num_tokens:padded].zero_()  # what passes add to padding would grow with each of them

    def leave(self, hidden: Tensor) -> None:
        """What a pass that is not captured has made of all its tokens."""
        self._made = hidden

    def take(self) -> Tensor:
        """What the pass has made, in memory of its own: [tokens, hidden]."""
        made, self._made = self._made, None
        return self.hidden[: self._num_tokens].clone() if made is None else made
