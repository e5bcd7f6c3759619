"""CUDA graphs: passes whose shapes repeat, recorded once with all their kernels and replayed by one call.

All graphs share memory: what one leaves behind, the next may overwrite. They know shapes, not requests.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from mini_infer_engine.attention.prefill_rows import PrefillRows
from mini_infer_engine.batch import Row
from mini_infer_engine.fused import Wanted
from mini_infer_engine.inputs import to_device
from mini_infer_engine.kernels.gather import gather_decode_inputs
from mini_infer_engine.kernels.sample import sample

if TYPE_CHECKING:
    from mini_infer_engine.graph_runner import GraphRunner

PREFILL_BUCKETS = (32, 64, 128, 256, 512, 1024, 2048)
"""Prompt tokens of a captured prefill; above, the GPU takes longer than the host's launches anyway."""
PREFILL_SEQUENCES = 8
"""Prompts of a captured prefill."""


def decode_buckets(largest: int) -> list[int]:
    """Batch sizes with a graph of their own: padding never adds more than a half, nor more than 31 rows."""
    buckets = [1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, *range(160, largest + 1, 32)]
    return [size for size in buckets if size < largest] + [largest]


class DecodeGraph:
    """Forward and sampling of one batch bucket; both read the slots and everything else by slot."""

    def __init__(self, runner: "GraphRunner", bucket: int) -> None:
        self.slots = runner.decode_slots[:bucket]
        self._runner = runner
        self.forward = torch.cuda.CUDAGraph()
        self.sampling = torch.cuda.CUDAGraph()
        self._run_forward()
        self.tokens = sample(self.logits, self.slots, runner.table.state)  # compiles and sizes workspaces
        with torch.cuda.graph(self.forward, pool=runner.graph_memory):
            self._run_forward()
        with torch.cuda.graph(self.sampling, pool=runner.graph_memory):
            self.tokens = sample(self.logits, self.slots, runner.table.state)

    def _run_forward(self) -> None:
        runner = self._runner
        table, state = runner.table, runner.table.state
        embedding = runner.model.model.embed_tokens.weight
        hidden, positions = gather_decode_inputs(self.slots, state.last_tokens, state.lengths, embedding)
        attend = runner.decode_attention_pass(table.page_tables, self.slots, positions)
        self.logits = runner.fused.logits(runner.fused.forward(hidden, attend))

    def replay(self) -> Tensor:
        """Run both; the chosen tokens [bucket] stay valid until the next replay."""
        self.forward.replay()
        self.sampling.replay()
        return self.tokens


class PrefillGraph:
    """A pass of prompt chunks only, padded to one number of tokens and of sequences."""

    def __init__(self, runner: "GraphRunner", tokens: int) -> None:
        self._runner = runner
        self.tokens_of_bucket = tokens
        self._width = runner.table.page_tables.shape[1]
        parts = self._split(np.zeros(self._length(), dtype=np.int32))
        self._packed = torch.zeros(self._length(), dtype=torch.int32, device=runner.device)
        self._parts = self._packed.split([part.size for part in parts])  # type: ignore[no-untyped-call]  # torch's
        self.load([])
        self.graph = torch.cuda.CUDAGraph()
        self._run()
        with torch.cuda.graph(self.graph, pool=runner.graph_memory):
            self._run()

    def _length(self) -> int:
        return 3 * self.tokens_of_bucket + 2 * (PREFILL_SEQUENCES + 1) + PREFILL_SEQUENCES * (3 + self._width)

    def _split(self, packed: np.ndarray) -> list[np.ndarray]:
        """Token ids, positions, kv index, query starts, key starts, ends, sample rows, slots, page tables."""
        tokens, sequences = self.tokens_of_bucket, PREFILL_SEQUENCES
        sizes = [tokens] * 3 + [sequences + 1] * 2 + [sequences] * 3 + [sequences * self._width]
        return np.split(packed, np.cumsum(sizes)[:-1])

    def load(self, rows: list[Row]) -> None:
        """Lay rows out for the next replay. Padded tokens write to the spare page; padded sequences have none."""
        runner = self._runner
        page_size, spare_page = runner.page_size, runner.pool.spare_page
        packed = np.zeros(self._length(), dtype=np.int32)
        token_ids, positions, kv_index, query_starts, key_starts, ends, sample_rows, slots, tables = self._split(packed)
        kv_index[:] = spare_page * page_size
        slots[:] = runner.table.spare_slot
        tables[:] = spare_page
        ends[:] = 1  # the last layer attends from one token of each, a padded one too
        begin = 0
        for index, row in enumerate(rows):
            assert row.token_ids is not None
            stop, end = begin + row.count, row.start + row.count
            pages = np.array(row.page_table[: -(-end // page_size)], dtype=np.int32)
            places = np.arange(row.start, end, dtype=np.int32)
            token_ids[begin:stop] = row.token_ids
            positions[begin:stop] = places
            kv_index[begin:stop] = pages[places // page_size] * page_size + places % page_size
            tables[index * self._width : index * self._width + len(pages)] = pages
            query_starts[index + 1 :] = stop
            key_starts[index + 1 :] = key_starts[index] + end
            ends[index] = end
            sample_rows[index] = stop - 1
            if row.sampling is not None:
                slots[index] = row.slot
            begin = stop
        self._packed.copy_(to_device(packed, runner.device))

    def _run(self) -> None:
        runner = self._runner
        token_ids, positions, kv_index, query_starts, key_starts, ends, sample_rows, slots, tables = self._parts
        hidden = functional.embedding(token_ids, runner.model.model.embed_tokens.weight)
        page_tables = tables.view(PREFILL_SEQUENCES, self._width)
        longest_key = self._width * runner.page_size
        rows = PrefillRows(page_tables, query_starts, key_starts, ends, self.tokens_of_bucket, longest_key)
        one_each = torch.arange(PREFILL_SEQUENCES + 1, dtype=torch.int32, device=hidden.device)
        last_tokens = PrefillRows(page_tables, one_each, key_starts, ends, 1, longest_key)
        attend = runner.prefill_attention_pass(rows, positions, kv_index)
        attend_sampled = runner.prefill_attention_pass(last_tokens, positions, kv_index, sample_rows)
        stream = runner.fused.forward(hidden, attend, Wanted(sample_rows, attend_sampled))
        self.tokens = sample(runner.fused.logits(stream), slots, runner.table.state)

    def replay(self) -> Tensor:
        """Run what was loaded; a token for each of PREFILL_SEQUENCES, of which those of real sampling rows count."""
        self.graph.replay()
        return self.tokens
