"""The runner for an NVIDIA GPU: `TorchRunner`'s passes by fused kernels and, where shapes repeat, by CUDA graphs.

Decode is two graphs a batch bucket, embedding to logits and sampling, over batch state that lives on the device. Small
prefills are graphs too; everything else runs the same kernels eagerly. It decides nothing about what is in a batch.
"""

import itertools
import logging
import sys
import time
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from mini_infer_engine.attention.prefill_rows import PrefillRows
from mini_infer_engine.batch import Batch, Row
from mini_infer_engine.fused import Attend, FusedDecoder, Stream, Wanted
from mini_infer_engine.graphs import DecodeGraph, PrefillGraph, decode_buckets, is_launch_bound, prefill_buckets
from mini_infer_engine.inputs import PassInputs, build_inputs
from mini_infer_engine.kernels.decode_attention import decode_attention, splits_for
from mini_infer_engine.kernels.prefill_attention import prefill_attention
from mini_infer_engine.kernels.sample import sample
from mini_infer_engine.models.config import ModelConfig
from mini_infer_engine.runner import PassHandle, TorchRunner
from mini_infer_engine.settings import EngineSettings
from mini_infer_engine.slots import SlotTable, page_table_width, slot_tensor

log = logging.getLogger(__name__)


class GraphRunner(TorchRunner):
    """See the module. `settings.enforce_eager` keeps the kernels and leaves the graphs."""

    default_page_size = 128  # what the attention kernels read in one go

    def __init__(self, settings: EngineSettings, config: ModelConfig, directory: Path | None = None) -> None:
        """As `TorchRunner`; then captures the graphs, largest first, so that all share the largest one's memory."""
        self._settings = settings
        self._prefill_attention: Callable[..., Tensor] = prefill_attention
        if settings.attention_backend == "flash":
            from mini_infer_engine.attention import flash

            self._prefill_attention = flash.flash_prefill_attention
            self.page_size_step = self.default_page_size = flash.PAGE_SIZE_STEP
        self.decode_graphs: dict[int, DecodeGraph] = {}
        self.prefill_graphs: dict[int, PrefillGraph] = {}
        super().__init__(settings, config, directory)
        self._loaded_slots: tuple[int, list[int]] = (0, [])
        if not settings.enforce_eager:
            self._capture()

    def _use_pool(self, num_pages: int) -> None:
        super()._use_pool(num_pages)
        longest = self._settings.max_model_len or self.config.max_position_embeddings
        self.fused = FusedDecoder(self.model, self.pool)
        self.table = SlotTable(
            self._settings.max_num_seqs,
            page_table_width(longest, self.page_size),
            self.pool.spare_page,
            self.device,
        )

    def _drop_pool(self) -> None:
        super()._drop_pool()
        del self.fused, self.table

    def _capture(self) -> None:
        started = time.perf_counter()
        largest = self._settings.max_num_seqs
        self._buckets = decode_buckets(largest)
        self._is_launch_bound = is_launch_bound(self._weight_bytes)
        self.decode_slots = torch.full(
            (self._buckets[-1],), self.table.spare_slot, dtype=torch.int32, device=self.device
        )
        self.graph_memory = torch.cuda.graph_pool_handle()
        prefills = prefill_buckets(self._weight_bytes, self._settings.max_num_batched_tokens or 1 << 30)
        with (
            torch.inference_mode(),
            tqdm(
                total=len(prefills) + len(self._buckets), desc="Capturing CUDA graphs", disable=not sys.stderr.isatty()
            ) as progress,
        ):
            self._compile_eager_kernels()
            for tokens in reversed(prefills):
                self.prefill_graphs[tokens] = PrefillGraph(self, tokens)
                progress.update()
            self.prefill_graphs = dict(sorted(self.prefill_graphs.items()))
            for bucket in reversed(self._buckets):
                self.decode_graphs[bucket] = DecodeGraph(self, bucket)
                progress.update()
        torch.cuda.synchronize()
        log.info("captured %d CUDA graphs in %.1f s", progress.total, time.perf_counter() - started)

    def _compile_eager_kernels(self) -> None:
        """The attention variants that only eager passes use, so that no request waits for a compiler."""
        config, device = self.config, self.device
        q = torch.zeros((1, config.num_heads, config.head_dim), dtype=self.dtype, device=device)
        ends = torch.ones(1, dtype=torch.int32, device=device)
        starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
        for longest_query, longest_key in itertools.product((1, 1 << 14), (1 << 10, 1 << 14)):
            rows = PrefillRows(self.table.page_tables[-1:], starts, starts, ends, longest_query, longest_key)
            for window in set(config.sliding_windows):
                pages = self.fused.layer_pools[0]
                self._prefill_attention(q, pages, rows, scale=1.0, sliding_window=window)
        if self._prefill_attention is prefill_attention:
            prefill_attention(q, self.fused.layer_pools[0], rows, scale=1.0, on_hopper=True)

    def launch(self, batch: Batch) -> PassHandle:
        """See `Runner.launch`."""
        rows, decodes = batch.rows, batch.num_decodes
        prefills = rows[decodes:]
        with torch.inference_mode():
            self.pool.copy(batch.copies)
            self.table.forget_pages(prefills)
            prefill_graph = self._prefill_graph(prefills) if prefills else None
            if not prefills and self.decode_graphs:
                tokens = self._decode(rows)
            elif prefill_graph is not None and (not decodes or self._is_launch_bound):
                # All graphs share memory: the next may overwrite what one leaves behind, so decode's tokens are copied.
                parts = [self._decode(rows[:decodes]).clone()] if decodes else []
                prefill_graph.load(prefills)
                chosen = prefill_graph.replay()[: len(prefills)]
                wanted = [index for index, row in enumerate(prefills) if row.sampling is not None]
                if len(wanted) < len(prefills):
                    chosen = chosen[wanted] if wanted else chosen[:0]
                tokens = torch.cat([*parts, chosen]) if parts else chosen
            else:
                self.table.begin([row for row in prefills if row.sampling is not None])
                tokens = self._eager(batch)
            return self._handle(rows, tokens)

    def _handle(self, rows: list[Row], tokens: Tensor) -> PassHandle:
        sampling = [index for index, row in enumerate(rows) if row.sampling is not None]
        on_host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        on_host.copy_(tokens, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
        done.record()
        return PassHandle(sampling, len(rows), on_host, done)

    def _decode(self, rows: list[Row]) -> Tensor:
        """Decode rows by graph: tokens [rows]."""
        bucket = self._buckets[bisect_left(self._buckets, len(rows))]
        self.table.send_pages(rows, self.page_size)
        slots = [row.slot for row in rows]
        if (bucket, slots) != self._loaded_slots:
            pinned = slot_tensor(slots, bucket, self.table.spare_slot)
            self.decode_slots[:bucket].copy_(pinned, non_blocking=True)
            self._loaded_slots = (bucket, slots)
        return self.decode_graphs[bucket].replay()[: len(rows)]

    def _prefill_graph(self, rows: list[Row]) -> PrefillGraph | None:
        """The smallest captured prefill that holds these rows."""
        tokens = sum(row.count for row in rows)
        for graph in self.prefill_graphs.values():
            if graph.num_tokens >= tokens and graph.num_sequences >= len(rows):
                return graph
        return None

    @property
    def _weight_bytes(self) -> int:
        return sum(parameter.numel() * parameter.itemsize for parameter in self.model.parameters())

    def _eager(self, batch: Batch) -> Tensor:
        """Any batch, kernel by kernel: the tokens of its sampling rows."""
        inputs = build_inputs(batch, self.page_size, self.pool.spare_page, self.device)
        wanted = Wanted(inputs.sample_rows, self._attention(inputs, inputs.sample_starts, longest_query=1))
        stream = self._stream(inputs, wanted)
        if not inputs.sample_rows.shape[0]:
            return inputs.sample_rows
        return sample(self.fused.logits(stream), inputs.sample_slots.to(torch.int32), self.table.state)

    def logits(self, batch: Batch) -> Tensor:
        """See `TorchRunner.logits`."""
        with torch.inference_mode():
            inputs = build_inputs(batch, self.page_size, self.pool.spare_page, self.device)
            return self.fused.logits(self._stream(inputs))

    def _stream(self, inputs: PassInputs, wanted: Wanted | None = None) -> Stream:
        """The residual stream of all tokens, or of those wanted, after the last layer."""
        token_ids, state = inputs.token_ids, self.table.state
        if inputs.pending_slots.shape[0]:
            pending = state.last_tokens.index_select(0, inputs.pending_slots)
            token_ids = token_ids.index_copy(0, inputs.pending_tokens, pending)
        hidden = functional.embedding(token_ids, self.model.model.embed_tokens.weight)
        kv_index = inputs.write_pages * self.page_size + inputs.write_offsets
        attend = self._attention(inputs, inputs.query_starts, max(inputs.counts))
        return self.fused.forward(hidden, inputs.positions, kv_index, attend, wanted)

    def _attention(self, inputs: PassInputs, query_starts: Tensor, longest_query: int) -> Attend:
        """Attention of a mixed pass, one new token a decoding row first; `query_starts` [rows + 1] are the others'."""
        decodes = inputs.num_decodes
        tables = inputs.page_tables.to(torch.int32)
        passes: list[tuple[slice, Attend]] = []
        if decodes:
            own_rows = torch.arange(decodes, dtype=torch.int32, device=self.device)
            attend = self.decode_attention_pass(tables, own_rows, inputs.positions[:decodes], decodes)
            passes.append((slice(0, decodes), attend))
        if len(inputs.counts) > decodes:
            ends = inputs.ends[decodes:].to(torch.int32)
            starts = (query_starts[decodes:] - decodes).to(torch.int32)
            key_starts = functional.pad(ends.cumsum(0), (1, 0)).to(torch.int32)
            longest_key = max(start + count for start, count in zip(inputs.starts, inputs.counts, strict=True))
            prefills = PrefillRows(tables[decodes:], starts, key_starts, ends, longest_query, longest_key)
            passes.append((slice(decodes, None), self.prefill_attention_pass(prefills)))

        def attend_all(q: Tensor, pages: Tensor, layer: int) -> Tensor:
            if len(passes) == 1:
                return passes[0][1](q, pages, layer)
            mixed = q.new_empty((q.shape[0], q.shape[1] * q.shape[2]))
            for rows, attend in passes:
                attend(q[rows], pages, layer, mixed[rows])
            return mixed

        return attend_all

    def decode_attention_pass(self, tables: Tensor, slots: Tensor, positions: Tensor, rows: int) -> Attend:
        """Attention of one token a row; `tables` is read at row `slots`."""
        config = self.config
        scale = config.head_dim**-0.5
        splits = splits_for(rows, config.num_kv_heads, tables.shape[1] * self.page_size)

        def attend(q: Tensor, pages: Tensor, layer: int, out: Tensor | None = None) -> Tensor:
            window = config.sliding_windows[layer]
            return decode_attention(
                q, pages, tables, slots, positions, scale=scale, splits=splits, sliding_window=window, out=out
            )

        return attend

    def prefill_attention_pass(self, rows: PrefillRows) -> Attend:
        """Attention of prompt chunks."""
        scale, windows, run = self.config.head_dim**-0.5, self.config.sliding_windows, self._prefill_attention

        def attend(q: Tensor, pages: Tensor, layer: int, out: Tensor | None = None) -> Tensor:
            return run(q, pages, rows, scale=scale, sliding_window=windows[layer], out=out)

        return attend
