"""Records CUDA graphs of forward passes whose shapes repeat, each with all its kernels, to be replayed by one call.

Every graph ends at logits, which it leaves in memory that all share; what one leaves in its own memory, the next may
overwrite. They know shapes and slots, not requests, and not how logits become tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from mini_infer_engine.core.batch import Row, continued_slots
from mini_infer_engine.core.kv_tiers.tier_memory import LayerwiseLoad
from mini_infer_engine.kernels.attention.prefill_rows import PrefillRows
from mini_infer_engine.kernels.context import KernelContext
from mini_infer_engine.kernels.embed_decode import gather_places
from mini_infer_engine.kernels.sampling.state_update import STATE_FIELDS, update_slots
from mini_infer_engine.models.causal_model import CausalModel
from mini_infer_engine.ops.base import AttentionPass, Ops, ResidualState
from mini_infer_engine.runtime.attention.triton_attention import TritonAttentionPass, decodes_before_prefill
from mini_infer_engine.runtime.attention.triton_backends import TritonBackend
from mini_infer_engine.runtime.cuda.decode_inputs import decode_inputs
from mini_infer_engine.runtime.cuda.device_state import DeviceBatchState
from mini_infer_engine.runtime.cuda.hidden_states import CudaHiddenStates
from mini_infer_engine.runtime.cuda.stage import CudaStage
from mini_infer_engine.runtime.inputs.host_staging import PinnedStaging
from mini_infer_engine.runtime.inputs.layer_progress import LayerCounters, LoadedAttention, MarkedAttention
from mini_infer_engine.runtime.memory.hidden_pages import decode_index
from mini_infer_engine.runtime.memory.state_pool import StatePool
from mini_infer_engine.runtime.recurrent.pass_tables import PaddedTables, blank_steps, decode_tables
from mini_infer_engine.runtime.recurrent.triton_pass import TritonRecurrentPass

_LAUNCH_BOUND_BYTES = 6_000_000_000
_LAUNCH_BOUND_BUCKETS = (32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 2560, 3072, 3584, 4096)
_BUCKETS = (32, 64, 128, 192, 256, 320, 384, 448, 512, 576, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)

_RECURRENT_BUCKETS = (2560, 3072, 4096)


def is_launch_bound(weight_bytes: int) -> bool:
    """Returns True if the GPU reads these weights twice in less time than the host takes to launch a pass kernel by
    kernel.
    """
    return weight_bytes < _LAUNCH_BOUND_BYTES


def prefill_buckets(largest: int, *, launch_bound: bool, is_recurrent: bool = False) -> list[int]:
    """Returns the sizes of captured passes with prompts in tokens; above, the GPU takes longer than the host's
    launches, of which recurrent layers have twice as many as others.
    """
    buckets = _LAUNCH_BOUND_BUCKETS if launch_bound else (*_BUCKETS, *(_RECURRENT_BUCKETS if is_recurrent else ()))
    return [tokens for tokens in buckets if tokens <= largest]


def prefill_sequences(tokens: int) -> int:
    """Returns the most prompts of a captured prefill of so many tokens."""
    return max(8, tokens // 64)


def decodes_beside(tokens: int, largest: int, *, launch_bound: bool) -> int:
    """Returns the decode rows for which a captured pass with prompts has room.

    For small models it is 0: two graphs one after the other take hardly longer than one, and fit any number of rows.
    """
    return 0 if launch_bound else min(largest, max(16, tokens // 4))


def decode_buckets(largest: int) -> list[int]:
    """Returns batch sizes with a graph of their own: padding never adds more than a half, nor more than 31 rows."""
    buckets = [1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, *range(160, largest + 1, 32)]
    return [size for size in buckets if size < largest] + [largest]


@dataclass(frozen=True, slots=True)
class CapturedModel:
    """The model, buffers and state of recorded passes; none of them may move while graphs exist."""

    model: CausalModel
    ops: Ops
    kernels: KernelContext
    attention: TritonBackend
    state: DeviceBatchState
    slots: Tensor  # [rows] int32, of decode rows
    logits: Tensor  # [rows, vocab], where every pass leaves what it has computed
    null_page: int
    stage: CudaStage | None
    """In a pipeline, the stage whose buffer has hidden states before and after a pass."""
    layers: LayerCounters | None = None
    """Counters by which passes with prompts report the progress of their layers."""
    loads: LayerwiseLoad | None = None
    """The loads that passes with prompts wait for in each layer; None if all their pages are there."""
    states: CudaHiddenStates | None = None
    """The hidden states that passes store for a draft."""
    recurrent: StatePool | None = None
    """The recurrent states of a model that has some."""

    @property
    def begins(self) -> bool:
        """True if passes begin with tokens, not with another stage's hidden states."""
        return self.stage is None or self.stage.is_first

    @property
    def samples(self) -> bool:
        """True if passes end with logits."""
        return self.stage is None or self.stage.is_last

    def loaded(self, attention: AttentionPass) -> AttentionPass:
        """Returns the attention of a pass with prompts, which waits for its layers if they are being loaded."""
        return attention if self.loads is None else LoadedAttention(attention, [self.loads])

    def reporting(self, attention: AttentionPass) -> AttentionPass:
        """Returns the attention of a pass with prompts, which reports its layers if there are counters."""
        return attention if self.layers is None else MarkedAttention(attention, self.layers.mark)

    def receive(self, num_tokens: int, padded: int) -> None:
        """Receives the previous stage's hidden states before a replay for so many tokens, with its padding."""
        if self.stage is not None:
            self.stage.enter(num_tokens, padded)

    def entering(self, num_tokens: int) -> Tensor:
        """Returns the residual state from the previous stage's hidden states."""
        assert self.stage is not None
        return self.model.enter(self.ops, self.stage.hidden[:num_tokens])

    def leave(self, state: ResidualState) -> None:
        """Stores a pass's hidden states for the next stage. They may be there already, since verbs add in place."""
        assert self.stage is not None
        place = self.stage.hidden[: state.residual.shape[0]]
        if place.data_ptr() != state.residual.data_ptr():
            place.copy_(state.residual)


class GraphMemory:
    """The memory that graphs share, and the stream on which they are recorded."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        """The stream on which graphs are recorded; nothing runs on it."""
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it untyped


def record(run: Callable[[], None], memory: GraphMemory) -> torch.cuda.CUDAGraph:
    """Runs once, which compiles kernels and sizes workspaces, then records a run into `memory`.

    Unlike `torch.cuda.graph`, it neither waits for the device nor gives cached memory back to the driver, since passes
    may run. Other threads may use the device meanwhile.
    """
    graph = torch.cuda.CUDAGraph()
    run()
    current, stream = torch.cuda.current_stream(), memory.stream
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=memory.pool, capture_error_mode="thread_local")
        try:
            run()
        finally:
            graph.capture_end()
    current.wait_stream(stream)
    return graph


class DecodeGraph:
    """A captured decode of one new token for each of `bucket` slots; the device has their tokens, positions and
    indexes.
    """

    def __init__(self, parts: CapturedModel, bucket: int, memory: GraphMemory) -> None:
        self._parts, self._bucket = parts, bucket
        self._steps = blank_steps(bucket, parts.state.device)
        self.graph = record(self._run, memory)

    def _run(self) -> None:
        parts = self._parts
        model, state = parts.model, parts.state.state
        slots = parts.slots[: self._bucket]
        if parts.begins:
            hidden, positions, kv_lengths = decode_inputs(slots, state, model.embeddings)
            hidden = model.scale_embeddings(parts.ops.sum_embeddings(hidden))
        else:
            hidden = parts.entering(self._bucket)
            positions, kv_lengths = gather_places(slots, state)
        attend = parts.attention.decode(parts.state.page_tables, slots, positions, kv_lengths)
        planned: AttentionPass = TritonAttentionPass(attend, attend, None, positions)
        if parts.recurrent is not None:
            tables = decode_tables(slots, self._steps, parts.state.padding_slot)
            planned = TritonRecurrentPass(planned, parts.recurrent, tables, parts.kernels)
        residual = model(parts.ops, hidden, planned)
        if not parts.samples:
            parts.leave(residual)
            return
        if parts.states is not None:
            parts.states.store_decoded(parts.ops, parts.state.page_tables[0], slots, kv_lengths)
        model.logits(parts.ops, residual, parts.logits[: self._bucket])

    def run(self, rows: list[Row], continued: list[Row]) -> None:
        """Computes the logits of these rows, whose slots are those at the front of `parts.slots`.

        The host brings the tokens of the `continued` rows: their slots are rewritten before.
        """
        parts = self._parts
        parts.state.begin(continued)
        parts.receive(len(rows), self._bucket)
        parts.state.send_pages(rows, parts.attention.page_size)
        if parts.recurrent is not None:
            parts.recurrent.resume(continued)
        self.graph.replay()
        if parts.recurrent is not None:
            parts.recurrent.keep_checkpoints(rows)


class PrefillGraph:
    """A captured pass of prompt chunks after decode rows, padded to one number of tokens; the border between them may
    move.
    """

    def __init__(self, parts: CapturedModel, tokens: int, decodes: int, memory: GraphMemory) -> None:
        """Records a pass with at most `decodes` decode rows, which count as tokens."""
        self._parts = parts
        self.num_tokens, self.num_sequences, self.num_decodes = tokens, prefill_sequences(tokens), decodes
        self._num_groups, _, self._width = parts.state.page_tables.shape
        self._most_pages = parts.attention.most_pages(tokens, self.num_sequences)
        sequences, samples = self.num_sequences, decodes + self.num_sequences
        # Slot packet (int64, hence first), token ids, positions, kv index of each KV group, query starts, ends, sample
        # starts, sample rows, page tables of each KV group, decode slots.
        groups = self._num_groups
        sizes = [2 * STATE_FIELDS * sequences, tokens, tokens, groups * tokens, sequences + 1, sequences]
        self._sizes = [*sizes, sequences + 1, samples, groups * sequences * self._width, decodes]
        self._packed = torch.zeros(sum(self._sizes), dtype=torch.int32, device=parts.state.device)
        self._blank = self._blank_array()
        self._staging = PinnedStaging(self._packed)
        self._host_parts = [self._split(array) for array in self._staging.arrays]
        self._host_groups = [self._split_groups(parts) for parts in self._host_parts]
        pool = parts.recurrent
        self._recurrent: PaddedTables | None = None
        if pool is not None:
            self._recurrent = PaddedTables(tokens, samples, sequences, pool, parts.state.device)
        self.load([], [])
        self.graph = record(self._run, memory)

    def fits(self, tokens: int, decodes: int, prefills: list[Row]) -> bool:
        """Returns True if there is room for `tokens`, so many decode rows, and these prompts with their pages."""
        if tokens > self.num_tokens or decodes > self.num_decodes or len(prefills) > self.num_sequences:
            return False
        page_size = self._parts.attention.page_size
        return sum(-(-(row.start + row.count) // page_size) for row in prefills) <= self._most_pages

    def run(self, decodes: list[Row], prefills: list[Row]) -> None:
        """Computes the logits of each row's last token, decode rows first."""
        self._parts.receive(len(decodes) + sum(row.count for row in prefills), self.num_tokens)
        self.load(decodes, prefills)
        if self._recurrent is not None:
            self._recurrent.load([*decodes, *prefills])
        self.graph.replay()

    def _split(self, packed: np.ndarray) -> list[np.ndarray]:
        return np.split(packed, np.cumsum(self._sizes)[:-1])

    def _split_groups(self, parts: list[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns the kv index [tokens] and the page tables [sequences, width] of each KV group."""
        kv_index, tables = parts[3].reshape(self._num_groups, -1), parts[8]
        return list(zip(kv_index, tables.reshape(self._num_groups, -1, self._width), strict=True))

    def _blank_array(self) -> np.ndarray:
        """Returns an array of padding alone: tokens that are not written, and sequences without tokens."""
        state = self._parts.state
        packed = np.zeros(sum(self._sizes), dtype=np.int32)
        packet, _, _, kv_index, _, ends, _, _, tables, decode_slots = self._split(packed)
        packet[:] = np.frombuffer(state.pack_null_update() * self.num_sequences, dtype=np.int32)
        kv_index[:] = -1  # so for decode rows, whose attention rotates and writes for itself
        ends[:] = 1  # the last layer attends from one token of each, a padded one too
        tables[:] = self._parts.null_page
        decode_slots[:] = state.padding_slot
        return packed

    def load(self, decodes: list[Row], prefills: list[Row]) -> None:
        """Lays rows out for the next replay, and packs the changes of the slots that begin."""
        page_size, state = self._parts.attention.page_size, self._parts.state
        buffer = self._staging.begin()
        self._staging.arrays[buffer][:] = self._blank
        packet, token_ids, positions, _, query_starts, ends, sample_starts, *rest = self._host_parts[buffer]
        sample_rows, _, decode_slots = rest
        groups = self._host_groups[buffer]
        begun = state.pack_updates([row for row in prefills if row.sampling is not None])
        packet[: len(begun) // packet.itemsize] = np.frombuffer(begun, dtype=np.int32)
        begin = len(decodes)
        if decodes:
            state.send_pages(decodes, page_size)
            decode_slots[:begin] = continued_slots(decodes)
            sample_rows[:begin] = np.arange(begin)
        sample_starts[:] = np.arange(begin, begin + len(sample_starts))
        query_starts[:] = begin
        for index, row in enumerate(prefills):
            assert row.token_ids is not None
            stop, end = begin + row.count, row.start + row.count
            cache_indexes = np.arange(row.start, end, dtype=np.int32)
            token_ids[begin:stop] = np.asarray(row.token_ids)
            positions[begin:stop] = cache_indexes + row.position_offset
            places, offsets = cache_indexes // page_size, cache_indexes % page_size
            for (kv_index, table), page_ids in zip(groups, row.page_tables, strict=True):
                pages = np.array(page_ids[: -(-end // page_size)], dtype=np.int32)
                kv_index[begin:stop] = pages[places] * page_size + offsets
                table[index, : len(pages)] = pages
            query_starts[index + 1 :] = stop
            ends[index] = end
            sample_rows[len(decodes) + index] = stop - 1
            begin = stop
        self._staging.send()

    def _run(self) -> None:
        parts = self._parts
        model, attention, state = parts.model, parts.attention, parts.state
        packed = self._packed.split(self._sizes)  # type: ignore[no-untyped-call]  # torch's
        packet, token_ids, positions, kv_index, query_starts, ends, sample_starts, sample_rows, *rest = packed
        tables, decode_slots = rest
        update_slots(packet.view(torch.int64).view(-1, STATE_FIELDS), state.state)
        page_tables = tables.view(self._num_groups, self.num_sequences, self._width)
        kv_index = kv_index.view(self._num_groups, self.num_tokens)
        longest_key = self._width * attention.page_size
        pages = min(self._most_pages, self.num_sequences * self._width)
        chunks = PrefillRows.of_groups(page_tables, query_starts, ends, self.num_tokens, longest_key, pages)
        last_tokens = PrefillRows.of_groups(page_tables, sample_starts, ends, 1, longest_key)
        attend = attention.prefill(chunks, positions, kv_index)
        selected = attention.prefill(last_tokens, positions, kv_index, sample_rows)
        stored_at = kv_index[0]
        if self.num_decodes:
            token_ids = self._with_decodes(token_ids, decode_slots)
            # The device's, since the host may not know how many guesses were right.
            places = gather_places(decode_slots, state.state, state.padding_slot)
            decode = attention.decode(state.page_tables, decode_slots, *places)
            if parts.states is not None:
                stored_at = self._with_decode_index(stored_at, decode_slots, places[1])
            attend, selected = (decodes_before_prefill(one, decode, self.num_decodes) for one in (attend, selected))
            if model.reads_positions:
                positions = self._positions(positions, decode_slots, places[0])
        hidden = model.embed(parts.ops, token_ids) if parts.begins else parts.entering(self.num_tokens)
        planned: AttentionPass = TritonAttentionPass(attend, attend, None, positions)
        if parts.samples:
            logits_indices = sample_rows if parts.states is None else None
            planned = parts.reporting(TritonAttentionPass(attend, selected, logits_indices, positions))
        planned = parts.loaded(planned)
        if parts.recurrent is not None and self._recurrent is not None:
            planned = TritonRecurrentPass(planned, parts.recurrent, self._recurrent.tables, parts.kernels)
        residual = model(parts.ops, hidden, planned)
        if not parts.samples:
            parts.leave(residual)
            return
        if parts.states is not None:
            parts.states.store(parts.ops, stored_at)
            residual = residual.select(sample_rows)
        model.logits(parts.ops, residual, parts.logits[: sample_rows.shape[0]])

    def _with_decode_index(self, kv_index: Tensor, decode_slots: Tensor, kv_lengths: Tensor) -> Tensor:
        """Returns kv_index [tokens] with that of the decode rows in front; kv_lengths are -1 in rows without one."""
        state, page_size = self._parts.state, self._parts.attention.page_size
        decoded = decode_index(state.page_tables[0], decode_slots, kv_lengths, page_size).to(kv_index.dtype)
        merged = torch.where(kv_lengths < 0, kv_index[: self.num_decodes], decoded)
        return torch.cat((merged, kv_index[self.num_decodes :]))

    def _positions(self, positions: Tensor, decode_slots: Tensor, decoded: Tensor) -> Tensor:
        """Returns positions [tokens] with those of the decode rows in front."""
        first = positions[: self.num_decodes]
        merged = torch.where(decode_slots == self._parts.state.padding_slot, first, decoded.to(positions.dtype))
        return torch.cat((merged, positions[self.num_decodes :]))

    def _with_decodes(self, token_ids: Tensor, decode_slots: Tensor) -> Tensor:
        """Returns token_ids [tokens] with those that the decode rows' slots sampled last in front."""
        state, first = self._parts.state, token_ids[: self.num_decodes]
        newest = state.state.last_tokens.index_select(0, decode_slots).to(token_ids.dtype)
        decoded = torch.where(decode_slots == state.padding_slot, first, newest)
        return torch.cat((decoded, token_ids[self.num_decodes :]))
