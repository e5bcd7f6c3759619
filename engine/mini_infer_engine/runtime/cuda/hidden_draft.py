"""Steps of a draft that reads the target's hidden states, as CUDA graphs record them.

The first step computes the entries of the newest tokens again, by the target's hidden states: those of draft tokens
that were accepted were made of the draft's own. It samples nothing.
"""

import torch
from torch import Tensor

from mini_infer_engine.kernels.embed_decode import gather_places
from mini_infer_engine.kernels.sampling.sampling_state import SamplingState
from mini_infer_engine.kernels.sampling.speculate import chunk_inputs
from mini_infer_engine.layers.attention import AttentionBlock
from mini_infer_engine.ops.base import Ops, ResidualState
from mini_infer_engine.runtime.attention.triton_attention import TritonAttentionPass
from mini_infer_engine.runtime.attention.triton_backends import TritonBackend
from mini_infer_engine.runtime.cuda.device_state import DeviceBatchState
from mini_infer_engine.runtime.cuda.hidden_states import CudaHiddenStates


class CudaHiddenDraft:
    """The draft of one executor. Its pages have the ids in `state`'s page tables, those of the target."""

    def __init__(
        self,
        states: CudaHiddenStates,
        attention: TritonBackend,
        ops: Ops,
        state: DeviceBatchState,
        history: Tensor,
        most_drafts: int,
    ) -> None:
        """Takes the draft's `attention`; `kernels.sampling.speculate` defines history."""
        self._states, self._attention, self._ops, self._state = states, attention, ops, state
        self._model, self._history = states.draft, history
        self._first_tokens = most_drafts + 2

    def first_step(self, slots: Tensor) -> ResidualState:
        """Returns the state of the newest token of each of these slots [rows], and computes those before it again."""
        count, tables = self._first_tokens, self._state.page_tables
        inputs = chunk_inputs(
            slots,
            self._state.state,
            self._history,
            tables,
            page_size=self._attention.page_size,
            offset=1 - count,
            cache_offset=-count,  # entries stand one place before their tokens
            count=count,
            vocabulary=self._model.config.vocab_size,
        )
        attend = self._attention.check(tables, slots, inputs, count)
        newest = torch.arange(1, len(slots) + 1, dtype=torch.int64, device=slots.device) * count - 1

        def attend_newest(qkv: Tensor, layer: AttentionBlock) -> Tensor:
            return attend(qkv, layer).index_select(0, newest)

        hidden = self._states.embed(self._ops, inputs.token_ids, inputs.kv_index[0])
        attention = TritonAttentionPass(attend, attend_newest, newest, inputs.positions)
        residual: ResidualState = self._model(self._ops, hidden, attention)
        return residual

    def next_step(self, slots: Tensor, own_rows: Tensor, virtual: SamplingState, hidden: Tensor) -> ResidualState:
        """Returns the state of the draft token that was sampled last, by the draft's own hidden states [rows, width].

        own_rows [rows] are the places in `virtual` of the slots' draft tokens.
        """
        rows = len(slots)
        positions, kv_lengths = gather_places(own_rows, virtual)
        entries = kv_lengths - 1
        attend = self._attention.decode(self._state.page_tables, slots, positions, entries)
        embeddings = self._model.embed(self._ops, virtual.last_tokens[:rows])
        x = self._model.combine(self._ops, embeddings, hidden)
        residual: ResidualState = self._model(self._ops, x, TritonAttentionPass(attend, attend, None, positions))
        return residual

    def own_hidden(self, state: ResidualState) -> Tensor:
        """Returns the hidden states [rows, width] for the next step."""
        return self._model.own_hidden(self._ops, state)
