"""Computes a draft model's keys and values of known tokens: by CUDA graphs for few tokens, otherwise kernel by kernel.

Most often passes without drafts have made a few tokens of each row: launched kernel by kernel, reading these takes the
host as long as many passes of a small model. It samples nothing and decides nothing.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from mini_infer_engine.core.batch import Batch, Row
from mini_infer_engine.device import to_device
from mini_infer_engine.kernels.attention.prefill_rows import PrefillRows
from mini_infer_engine.models.causal_model import CausalModel
from mini_infer_engine.ops.base import Ops
from mini_infer_engine.runtime.attention.triton_attention import TritonAttentionPass
from mini_infer_engine.runtime.attention.triton_backends import TritonBackend
from mini_infer_engine.runtime.cuda.device_state import DeviceBatchState
from mini_infer_engine.runtime.cuda.graphs import GraphMemory, record
from mini_infer_engine.runtime.cuda.hidden_states import CudaHiddenStates
from mini_infer_engine.runtime.hidden_states import entry_rows
from mini_infer_engine.runtime.inputs.batch_tensors import build_inputs
from mini_infer_engine.runtime.inputs.host_staging import PinnedStaging

READ_BUCKETS = (32, 64, 128, 256, 512, 1024, 2048)
"""Sizes of captured readings in tokens; above, the device takes longer than the host's launches."""


def update_history(history: Tensor, rows: Sequence[Row]) -> None:
    """Writes the tokens of these rows to their places in history [slots, positions] int32."""
    width = history.shape[1]
    places = [np.arange(row.position, row.position + row.count) + row.slot * width for row in rows]
    tokens = [np.asarray(row.token_ids, dtype=np.int64) for row in rows]
    updates = to_device(np.stack((np.concatenate(places), np.concatenate(tokens))), history.device)
    history.view(-1).index_copy_(0, updates[0], updates[1].to(torch.int32))


class DraftReading:
    """The reading of one draft, whose pages have the ids in `state`'s page tables, those of the model it drafts for."""

    def __init__(
        self,
        model: CausalModel,
        attention: TritonBackend,
        ops: Ops,
        state: DeviceBatchState,
        history: Tensor,
        null_page: int,
        *,
        max_rows: int,
        most_tokens: int,
        states: CudaHiddenStates | None = None,
    ) -> None:
        """Prepares readings of at most `max_rows` rows and `most_tokens` tokens; `kernels.sampling.speculate` defines
        history. `states` are the target's hidden states if the draft reads them.
        """
        self._states = states
        self._model, self._attention, self._ops, self._state = model, attention, ops, state
        self._history, self._null_page, self._max_rows = history, null_page, max_rows
        most = min(most_tokens, attention.most_captured_tokens)
        self.buckets = [tokens for tokens in READ_BUCKETS if tokens <= most]
        self._graphs: dict[int, _ReadingGraph] = {}

    def runs(self) -> list[Callable[[], None]]:
        """Returns all that `capture` records, to be run kernel by kernel over padding, which compiles the kernels."""
        return [partial(self._graph(tokens).run) for tokens in self.buckets]

    def capture(self, memory: GraphMemory, *, only_largest: bool) -> None:
        """Records the readings into the graph pool `memory`, largest first."""
        for tokens in self.buckets[-1:] if only_largest else reversed(self.buckets):
            self._graphs[tokens] = self._graph(tokens)
            self._graphs[tokens].capture(memory)

    def read(self, rows: Sequence[Row]) -> None:
        """Writes these tokens to the history, and has the draft compute their keys and values."""
        if self._states is not None:
            if first_tokens := [_first_token(row) for row in rows if row.start == 0]:
                update_history(self._history, first_tokens)  # such a draft has no entries of them
            rows = entry_rows(rows)
            if not rows:
                return
        tokens = sum(row.count for row in rows)
        for bucket in self.buckets:
            graph = self._graphs.get(bucket)
            if graph is not None and tokens <= bucket and len(rows) <= graph.num_rows:
                known = [_last_token(row) for row in rows if row.slot != self._state.padding_slot]
                self._state.send_pages(known, self._attention.page_size)
                graph.replay(rows)
                return
        update_history(self._history, rows)
        device = self._state.device
        inputs = build_inputs(Batch(list(rows), 0), self._attention.page_size, self._null_page, device)
        kv_index = inputs.write_pages[0] * self._attention.page_size + inputs.write_offsets
        self._compute(inputs.token_ids, self._attention.plan(inputs, every_token=False), kv_index)

    def _graph(self, tokens: int) -> "_ReadingGraph":
        num_rows = min(tokens, self._max_rows)
        return _ReadingGraph(self._state, self._attention, self._history, tokens, num_rows, self._compute)

    def _compute(self, token_ids: Tensor, attention: TritonAttentionPass, kv_index: Tensor) -> None:
        model = self._model
        # A token that its table has not cannot be guessed, but may stand in a prompt.
        known = token_ids.clamp(max=model.config.vocab_size - 1)
        if self._states is None:
            hidden = model.embed(self._ops, known)
        else:
            hidden = self._states.embed(self._ops, known, kv_index)
        model(self._ops, hidden, attention)


class _ReadingGraph:
    """A captured reading of up to `num_tokens` tokens of up to `num_rows` rows, with any borders between the rows."""

    def __init__(
        self,
        state: DeviceBatchState,
        attention: TritonBackend,
        history: Tensor,
        num_tokens: int,
        num_rows: int,
        compute: Callable[[Tensor, TritonAttentionPass, Tensor], None],
    ) -> None:
        self._state, self._attention, self._history, self._compute = state, attention, history, compute
        self.num_tokens, self.num_rows = num_tokens, num_rows
        # Of each token its id, position, cache index and slot; of each row its slot, cached tokens with its new ones,
        # and which of the tokens is its first.
        self._sizes = [num_tokens] * 4 + [num_rows] * 2 + [num_rows + 1]
        self._packed = torch.zeros(sum(self._sizes), dtype=torch.int32, device=state.device)
        self._staging = PinnedStaging(self._packed)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._load([])

    def capture(self, memory: GraphMemory) -> None:
        """Records it into the graph pool `memory`."""
        self._graph = record(self.run, memory)

    def replay(self, rows: Sequence[Row]) -> None:
        """Reads these rows. The device must have their page tables."""
        assert self._graph is not None, "capture comes before the first reading"
        self._load(rows)
        self._graph.replay()

    def _load(self, rows: Sequence[Row]) -> None:
        """Loads the rows. The rest is padding: tokens that are not written, and rows without tokens."""
        array = self._staging.arrays[self._staging.begin()]
        parts = np.split(array, np.cumsum(self._sizes)[:-1])
        token_ids, positions, cache_indexes, token_slots, slots, ends, starts = parts
        array[:] = 0
        token_slots[:] = slots[:] = self._state.padding_slot
        ends[:] = 1
        begin = 0
        for index, row in enumerate(rows):
            stop, end = begin + row.count, row.start + row.count
            token_ids[begin:stop] = np.asarray(row.token_ids)
            positions[begin:stop] = np.arange(row.position, row.position + row.count)
            cache_indexes[begin:stop] = np.arange(row.start, end)
            token_slots[begin:stop] = slots[index] = row.slot
            ends[index] = end
            starts[index + 1] = begin = stop
        starts[len(rows) + 1 :] = begin
        self._staging.send()

    def run(self) -> None:
        """Runs the reading that is recorded."""
        state, page_size = self._state, self._attention.page_size
        packed = self._packed.split(self._sizes)  # type: ignore[no-untyped-call]  # torch's
        token_ids, positions, cache_indexes, token_slots, slots, ends, starts = packed
        own, tables = token_slots.long(), state.page_tables[0]  # with a draft model all layers share one table
        self._history.view(-1).index_copy_(0, own * self._history.shape[1] + positions, token_ids)
        pages = tables.view(-1).index_select(0, own * tables.shape[1] + cache_indexes // page_size)
        at = pages * page_size + cache_indexes % page_size
        kv_index = torch.where(token_slots == state.padding_slot, -1, at).to(torch.int32)
        longest_key = tables.shape[1] * page_size
        nothing = own[:0]
        own_tables = tables.index_select(0, slots)
        chunks = [PrefillRows(own_tables, starts, ends, self.num_tokens, longest_key)]
        kv_indexes = kv_index.unsqueeze(0)
        attend = self._attention.prefill(chunks, positions, kv_indexes)
        keys_and_values = self._attention.prefill(chunks, positions, kv_indexes, nothing)
        self._compute(token_ids, TritonAttentionPass(attend, keys_and_values, nothing, positions), kv_index)


def _first_token(row: Row) -> Row:
    """Returns a chunk of the row's first token."""
    assert row.token_ids is not None, "the host knows what a draft reads"
    return replace(row, count=1, token_ids=row.token_ids[:1])


def _last_token(row: Row) -> Row:
    """Returns a decode row of the row's last token."""
    return replace(row, start=row.start + row.count - 1, count=1)
