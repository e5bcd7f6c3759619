"""CUDA graphs: passes whose shapes repeat, recorded once with all their kernels and replayed by one call.

All graphs share memory: what one leaves behind, the next may overwrite. They know shapes, not requests.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from mini_infer_engine.core.batch import Row, continued_slots
from mini_infer_engine.kernels.attention.prefill_rows import PrefillRows
from mini_infer_engine.kernels.embed_decode import gather_decode_inputs
from mini_infer_engine.kernels.sampling.sample import sample
from mini_infer_engine.kernels.sampling.state_update import STATE_FIELDS, update_slots
from mini_infer_engine.ops.triton_ops import Attend, AttentionLayer, LogitsSelection
from mini_infer_engine.runtime.staging import PinnedStaging

if TYPE_CHECKING:
    from mini_infer_engine.runtime.graph_runner import GraphRunner

_LAUNCH_BOUND_BYTES = 6_000_000_000
_LAUNCH_BOUND_BUCKETS = (32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 2560, 3072, 3584, 4096)
_BUCKETS = (32, 64, 128, 192, 256, 320, 384, 448, 512, 576, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)


def is_launch_bound(weight_bytes: int) -> bool:
    """Whether the GPU reads these weights twice in less time than the host takes to launch a pass kernel by kernel."""
    return weight_bytes < _LAUNCH_BOUND_BYTES


def prefill_buckets(largest: int, *, launch_bound: bool) -> list[int]:
    """Tokens of captured passes with prompts; above, the GPU takes longer than the host's launches anyway."""
    buckets = _LAUNCH_BOUND_BUCKETS if launch_bound else _BUCKETS
    return [tokens for tokens in buckets if tokens <= largest]


def prefill_sequences(tokens: int) -> int:
    """Prompts of a captured prefill."""
    return max(8, tokens // 64)


def decodes_beside(tokens: int, largest: int, *, launch_bound: bool) -> int:
    """Decode rows for which a captured pass with prompts has room.

    Small models have none: two graphs one after the other take hardly longer than one, and fit any number of rows.
    """
    return 0 if launch_bound else min(largest, max(16, tokens // 4))


def decode_buckets(largest: int) -> list[int]:
    """Batch sizes with a graph of their own: padding never adds more than a half, nor more than 31 rows."""
    buckets = [1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, *range(160, largest + 1, 32)]
    return [size for size in buckets if size < largest] + [largest]


class DecodeGraph:
    """Forward and sampling of one batch bucket; all read the slots and everything else by slot.

    `sampling` by whether some row has logits that may not be chosen.
    """

    def __init__(self, runner: "GraphRunner", bucket: int) -> None:
        self.slots = runner.decode_slots[:bucket]
        self._runner = runner
        self.forward = torch.cuda.CUDAGraph()
        self.sampling = {filtered: torch.cuda.CUDAGraph() for filtered in (False, True)}
        self._run_forward()
        for filtered in self.sampling:
            sample(
                self.logits,
                self.slots,
                runner.table.state,
                workspace=runner.workspace,
                programs=runner.policy.sample_programs,
                filtered=filtered,
            )  # compiles and sizes workspaces
        with torch.cuda.graph(self.forward, pool=runner.graph_memory):
            self._run_forward()
        for filtered, graph in self.sampling.items():
            with torch.cuda.graph(graph, pool=runner.graph_memory):
                sample(
                    self.logits,
                    self.slots,
                    runner.table.state,
                    workspace=runner.workspace,
                    programs=runner.policy.sample_programs,
                    filtered=filtered,
                )

    def _run_forward(self) -> None:
        runner = self._runner
        table, state = runner.table, runner.table.state
        embedding = runner.model.model.embed_tokens.weight
        hidden, positions = gather_decode_inputs(self.slots, state.last_tokens, state.lengths, embedding)
        attend = runner.decode_attention_pass(table.page_tables, self.slots, positions)
        self.logits = runner.fused.logits(runner.fused.forward(hidden, attend))


class PrefillGraph:
    """A pass of prompt chunks behind decode rows, padded to one number of tokens; the border between them may move."""

    def __init__(self, runner: "GraphRunner", tokens: int, decodes: int) -> None:
        """`decodes`: decode rows at most, which count as tokens."""
        self._runner = runner
        self.num_tokens, self.num_sequences, self.num_decodes = tokens, prefill_sequences(tokens), decodes
        self._width = runner.table.page_tables.shape[1]
        sequences, samples = self.num_sequences, decodes + self.num_sequences
        # Slot packet (int64, hence first), token ids, positions, kv index, query starts, ends, sample starts, sample
        # rows, slots, page tables, decode slots, decode positions.
        sizes = [2 * STATE_FIELDS * sequences, *[tokens] * 3, sequences + 1, sequences, sequences + 1, *[samples] * 2]
        self._sizes = [*sizes, sequences * self._width, decodes, decodes]
        self._packed = torch.zeros(sum(self._sizes), dtype=torch.int32, device=runner.device)
        self._blank = self._blank_array()
        self._upload = PinnedStaging(self._packed)
        self._host_parts = [self._split(array) for array in self._upload.arrays]
        self.load([], [])
        self.graph = torch.cuda.CUDAGraph()
        self._run()
        with torch.cuda.graph(self.graph, pool=runner.graph_memory):
            self._run()

    def holds(self, tokens: int, decodes: int, prefills: int) -> bool:
        """Whether there is room for `tokens` of so many decode rows and prompts."""
        return tokens <= self.num_tokens and decodes <= self.num_decodes and prefills <= self.num_sequences

    def _split(self, packed: np.ndarray) -> list[np.ndarray]:
        return np.split(packed, np.cumsum(self._sizes)[:-1])

    def _blank_array(self) -> np.ndarray:
        """Padding alone: tokens that nobody writes, and sequences that have none."""
        table, null_page = self._runner.table, self._runner.pool.null_page
        packed = np.zeros(sum(self._sizes), dtype=np.int32)
        packet, _, _, kv_index, _, ends, _, _, slots, tables, decode_slots, decode_positions = self._split(packed)
        packet[:] = np.frombuffer(table.pack_null_update() * self.num_sequences, dtype=np.int32)
        kv_index[:] = -1  # so for decode rows, whose attention rotates and writes for itself
        ends[:] = 1  # the last layer attends from one token of each, a padded one too
        slots[:] = decode_slots[:] = table.padding_slot
        tables[:] = null_page
        decode_positions[:] = -1
        return packed

    def load(self, decodes: list[Row], prefills: list[Row]) -> None:
        """Lay rows out for the next replay, and pack what changes for the slots that begin."""
        page_size = self._runner.page_size
        turn = self._upload.begin()
        self._upload.arrays[turn][:] = self._blank
        packet, token_ids, positions, kv_index, query_starts, ends, sample_starts, *rest = self._host_parts[turn]
        sample_rows, slots, tables, decode_slots, decode_positions = rest
        begun = self._runner.table.pack_updates([row for row in prefills if row.sampling is not None])
        packet[: len(begun) // packet.itemsize] = np.frombuffer(begun, dtype=np.int32)
        begin = len(decodes)
        if decodes:
            self._runner.table.send_pages(decodes, page_size)
            slots[:begin] = decode_slots[:begin] = continued_slots(decodes)
            decode_positions[:begin] = [row.start for row in decodes]
            sample_rows[:begin] = np.arange(begin)
        sample_starts[:] = np.arange(begin, begin + len(sample_starts))
        query_starts[:] = begin
        for index, row in enumerate(prefills):
            assert row.token_ids is not None
            stop, end = begin + row.count, row.start + row.count
            pages = np.array(row.page_table[: -(-end // page_size)], dtype=np.int32)
            places = np.arange(row.start, end, dtype=np.int32)
            token_ids[begin:stop] = np.asarray(row.token_ids)
            positions[begin:stop] = places
            kv_index[begin:stop] = pages[places // page_size] * page_size + places % page_size
            tables[index * self._width : index * self._width + len(pages)] = pages
            query_starts[index + 1 :] = stop
            ends[index] = end
            sample_rows[len(decodes) + index] = stop - 1
            if row.sampling is not None:
                slots[len(decodes) + index] = row.slot
            begin = stop
        self._upload.send()

    def _run(self) -> None:
        runner = self._runner
        parts = self._packed.split(self._sizes)  # type: ignore[no-untyped-call]  # torch's
        packet, token_ids, positions, kv_index, query_starts, ends, sample_starts, sample_rows, slots, *rest = parts
        tables, decode_slots, decode_positions = rest
        update_slots(packet.view(torch.int64).view(-1, STATE_FIELDS), runner.table.state)
        page_tables = tables.view(self.num_sequences, self._width)
        longest_key = self._width * runner.page_size
        rows = PrefillRows(page_tables, query_starts, ends, self.num_tokens, longest_key)
        last_tokens = PrefillRows(page_tables, sample_starts, ends, 1, longest_key)
        attend = runner.prefill_attention_pass(rows, positions, kv_index)
        attend_sampled = runner.prefill_attention_pass(last_tokens, positions, kv_index, sample_rows)
        if self.num_decodes:
            token_ids = self._with_decodes(token_ids, decode_slots)
            decode = runner.decode_attention_pass(runner.table.page_tables, decode_slots, decode_positions)
            attend, attend_sampled = (
                _with_decode_rows(prefill, decode, self.num_decodes) for prefill in (attend, attend_sampled)
            )
        hidden = functional.embedding(token_ids, runner.model.model.embed_tokens.weight)
        stream = runner.fused.forward(hidden, attend, LogitsSelection(sample_rows, attend_sampled))
        logits = runner.fused.logits(stream)
        if not self.num_decodes:
            self.logits = logits  # stays: penalised rows choose again. With decode rows that would be a gigabyte in all
        sample(logits, slots, runner.table.state, workspace=runner.workspace, programs=runner.policy.sample_programs)

    def _with_decodes(self, token_ids: Tensor, decode_slots: Tensor) -> Tensor:
        """The same [tokens], the first of them those that the decode rows' slots sampled last."""
        table, first = self._runner.table, token_ids[: self.num_decodes]
        newest = table.state.last_tokens.index_select(0, decode_slots).to(token_ids.dtype)
        return torch.cat(
            (torch.where(decode_slots == table.padding_slot, first, newest), token_ids[self.num_decodes :])
        )

    def replay(self, decodes: list[Row], prefills: list[Row]) -> None:
        """Run the pass with these rows."""
        self.load(decodes, prefills)
        self.graph.replay()


def _with_decode_rows(prefill: Attend, decode: Attend, num_decodes: int) -> Attend:
    """Attention of decode rows, `num_decodes` at most, before that of prompts.

    Decode rows are last to be written: prompts' kernels may leave anything in rows that are not theirs.
    """

    def attend(qkv: Tensor, layer: AttentionLayer) -> Tensor:
        mixed = prefill(qkv, layer)
        decode(qkv[:num_decodes], layer, mixed[:num_decodes])
        return mixed

    return attend
