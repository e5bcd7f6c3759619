"""The runner for an NVIDIA GPU: `TorchRunner`'s passes by fused kernels and, where shapes repeat, by CUDA graphs.

Decode is two graphs a batch bucket, embedding to logits and sampling, over batch state that lives on the device. Small
prefills are graphs too; everything else runs the same kernels eagerly. It decides nothing about what is in a batch.
"""

import logging
import sys
import time
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from mini_infer_engine.batch import Batch, Row
from mini_infer_engine.fused import Attend, FusedDecoder
from mini_infer_engine.inputs import PassInputs, build_inputs, to_device
from mini_infer_engine.kernels.decode_attention import decode_attention, splits_for
from mini_infer_engine.kernels.gather import gather_decode_inputs
from mini_infer_engine.kernels.prefill_attention import prefill_attention
from mini_infer_engine.kernels.sample import sample
from mini_infer_engine.models.config import ModelConfig
from mini_infer_engine.runner import PassHandle, TorchRunner
from mini_infer_engine.settings import EngineSettings
from mini_infer_engine.slots import SlotTable, page_table_width, slot_tensor

log = logging.getLogger(__name__)

PREFILL_BUCKETS = (32, 64, 128, 256, 512, 1024, 2048)
"""Prompt tokens of a captured prefill; above, the GPU takes longer than the host's launches anyway."""
PREFILL_SEQUENCES = 8
"""Prompts of a captured prefill."""

PrefillAttention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int, int, int], Tensor]
"""(q, layer pages, page tables, query starts, key starts, ends, longest query, longest key, layer)."""


class DecodeGraph:
    """Forward and sampling of one batch bucket; both read the slots and everything else by slot."""

    def __init__(self, runner: "GraphRunner", bucket: int) -> None:
        self.slots = runner.decode_slots[:bucket]
        self._sizes = (runner, bucket)
        self.forward = torch.cuda.CUDAGraph()
        self.sampling = torch.cuda.CUDAGraph()
        self._run_forward()
        self.tokens = sample(self.logits, self.slots, runner.table.state)  # compiles and sizes workspaces
        with torch.cuda.graph(self.forward, pool=runner.graph_memory):
            self._run_forward()
        with torch.cuda.graph(self.sampling, pool=runner.graph_memory):
            self.tokens = sample(self.logits, self.slots, runner.table.state)

    def _run_forward(self) -> None:
        runner, bucket = self._sizes
        table, state = runner.table, runner.table.state
        embedding = runner.model.model.embed_tokens.weight
        hidden, positions, kv_index = gather_decode_inputs(
            self.slots, state.last_tokens, state.lengths, table.page_tables, embedding, runner.page_size
        )
        attend = runner.decode_attention_pass(table.page_tables, self.slots, positions, bucket)
        self.logits = runner.fused.logits(runner.fused.forward(hidden, positions, kv_index, attend))

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
        attend = runner.prefill_attention_pass(
            page_tables, query_starts, key_starts, ends, self.tokens_of_bucket, self._width * runner.page_size
        )
        hidden = runner.fused.forward(hidden, positions, kv_index, attend)
        logits = runner.fused.logits(hidden.index_select(0, sample_rows))
        self.tokens = sample(logits, slots, runner.table.state)

    def replay(self) -> Tensor:
        """Run what was loaded; a token for each of PREFILL_SEQUENCES, of which those of real sampling rows count."""
        self.graph.replay()
        return self.tokens


class GraphRunner(TorchRunner):
    """See the module. `settings.enforce_eager` keeps the kernels and leaves the graphs."""

    default_page_size = 128  # what the attention kernels read in one go

    def __init__(self, settings: EngineSettings, config: ModelConfig, directory: Path | None = None) -> None:
        """As `TorchRunner`; then captures the graphs, largest first, so that all share the largest one's memory."""
        self._settings = settings
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
        self._prefill_attention = self._choose_prefill_attention()

    def _capture(self) -> None:
        started = time.perf_counter()
        largest = self._settings.max_num_seqs
        self._buckets = decode_buckets(largest)
        self.decode_slots = torch.full(
            (self._buckets[-1],), self.table.spare_slot, dtype=torch.int32, device=self.device
        )
        self.graph_memory = torch.cuda.graph_pool_handle()
        budget = self._settings.max_num_batched_tokens or 1 << 30
        prefills = [tokens for tokens in PREFILL_BUCKETS if tokens <= budget]
        with (
            torch.inference_mode(),
            tqdm(
                total=len(prefills) + len(self._buckets), desc="Capturing CUDA graphs", disable=not sys.stderr.isatty()
            ) as progress,
        ):
            for tokens in reversed(prefills):
                self.prefill_graphs[tokens] = PrefillGraph(self, tokens)
                progress.update()
            for bucket in reversed(self._buckets):
                self.decode_graphs[bucket] = DecodeGraph(self, bucket)
                progress.update()
        torch.cuda.synchronize()
        log.info("captured %d CUDA graphs in %.1f s", progress.total, time.perf_counter() - started)

    def launch(self, batch: Batch) -> PassHandle:
        """See `Runner.launch`."""
        rows, decodes = batch.rows, batch.num_decodes
        prefills = rows[decodes:]
        with torch.inference_mode():
            self.pool.copy(batch.copies)
            self.table.forget_pages(prefills)
            self.table.begin([row for row in prefills if row.sampling is not None])
            prefill_graph = self._prefill_graph(prefills) if prefills else None
            if not prefills and self.decode_graphs:
                tokens = self._decode(rows)
            elif prefill_graph is not None and (not decodes or self._replays_beat_one_pass):
                # All graphs share memory: the next may overwrite what one leaves behind, so decode's tokens are copied.
                parts = [self._decode(rows[:decodes]).clone()] if decodes else []
                prefill_graph.load(prefills)
                chosen = prefill_graph.replay()[: len(prefills)]
                wanted = [index for index, row in enumerate(prefills) if row.sampling is not None]
                if len(wanted) < len(prefills):
                    chosen = chosen[wanted] if wanted else chosen[:0]
                tokens = torch.cat([*parts, chosen]) if parts else chosen
            else:
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
        if len(rows) > PREFILL_SEQUENCES:
            return None
        return next((graph for size, graph in sorted(self.prefill_graphs.items()) if size >= tokens), None)

    @property
    def _replays_beat_one_pass(self) -> bool:
        """Whether reading the weights twice takes less than launching one mixed pass kernel by kernel."""
        return bool(self.decode_graphs) and self._weight_bytes < 6_000_000_000

    @property
    def _weight_bytes(self) -> int:
        return sum(parameter.numel() * parameter.itemsize for parameter in self.model.parameters())

    def _eager(self, batch: Batch) -> Tensor:
        """Any batch, kernel by kernel: the tokens of its sampling rows."""
        inputs, hidden = self._forward(batch)
        if not inputs.sample_rows.shape[0]:
            return inputs.sample_rows
        logits = self.fused.logits(hidden.index_select(0, inputs.sample_rows))
        return sample(logits, inputs.sample_slots.to(torch.int32), self.table.state)

    def logits(self, batch: Batch) -> Tensor:
        """See `TorchRunner.logits`."""
        with torch.inference_mode():
            return self.fused.logits(self._forward(batch)[1])

    def _forward(self, batch: Batch) -> tuple[PassInputs, Tensor]:
        """Inputs on the device and the residual stream of all tokens after the last layer."""
        inputs = build_inputs(batch, self.page_size, self.pool.spare_page, self.device)
        token_ids, state = inputs.token_ids, self.table.state
        if inputs.pending_slots.shape[0]:
            pending = state.last_tokens.index_select(0, inputs.pending_slots)
            token_ids = token_ids.index_copy(0, inputs.pending_tokens, pending)
        hidden = functional.embedding(token_ids, self.model.model.embed_tokens.weight)
        kv_index = inputs.write_pages * self.page_size + inputs.write_offsets
        decodes = inputs.num_decodes
        tables = inputs.page_tables.to(torch.int32)
        passes: list[tuple[slice, Attend]] = []
        if decodes:
            own_rows = torch.arange(decodes, dtype=torch.int32, device=self.device)
            attend = self.decode_attention_pass(tables, own_rows, inputs.positions[:decodes], decodes)
            passes.append((slice(0, decodes), attend))
        if len(batch.rows) > decodes:
            ends = inputs.ends[decodes:].to(torch.int32)
            query_starts = (inputs.query_starts[decodes:] - decodes).to(torch.int32)
            key_starts = functional.pad(ends.cumsum(0), (1, 0)).to(torch.int32)
            counts, starts = inputs.counts[decodes:], inputs.starts[decodes:]
            longest_key = max(start + count for start, count in zip(starts, counts, strict=True))
            attend = self.prefill_attention_pass(
                tables[decodes:], query_starts, key_starts, ends, max(counts), longest_key
            )
            passes.append((slice(decodes, None), attend))

        def attend_all(q: Tensor, pages: Tensor, layer: int) -> Tensor:
            outputs = [attend(q[rows], pages, layer) for rows, attend in passes]
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

        return inputs, self.fused.forward(hidden, inputs.positions, kv_index, attend_all)

    def decode_attention_pass(self, tables: Tensor, slots: Tensor, positions: Tensor, rows: int) -> Attend:
        """Attention of one token a row; `tables` is read at row `slots`."""
        config = self.config
        scale = config.head_dim**-0.5
        splits = splits_for(rows, config.num_kv_heads, tables.shape[1] * self.page_size)

        def attend(q: Tensor, pages: Tensor, layer: int) -> Tensor:
            window = config.sliding_windows[layer]
            return decode_attention(
                q, pages, tables, slots, positions, scale=scale, splits=splits, sliding_window=window
            )

        return attend

    def prefill_attention_pass(
        self,
        tables: Tensor,
        query_starts: Tensor,
        key_starts: Tensor,
        ends: Tensor,
        longest_query: int,
        longest_key: int,
    ) -> Attend:
        """Attention of chunks; all integer tensors int32."""
        run = self._prefill_attention

        def attend(q: Tensor, pages: Tensor, layer: int) -> Tensor:
            return run(q, pages, tables, query_starts, key_starts, ends, longest_query, longest_key, layer)

        return attend

    def _choose_prefill_attention(self) -> PrefillAttention:
        """flash-attn where the backend is that, else our kernel."""
        windows = self.config.sliding_windows
        scale = self.config.head_dim**-0.5
        if self.backend.page_size_step == 256:
            from flash_attn import flash_attn_varlen_func

            def flash(
                q: Tensor,
                pages: Tensor,
                tables: Tensor,
                query_starts: Tensor,
                key_starts: Tensor,
                ends: Tensor,
                longest_query: int,
                longest_key: int,
                layer: int,
            ) -> Tensor:
                window = windows[layer]
                out: Tensor = flash_attn_varlen_func(
                    q,
                    pages[:, 0],
                    pages[:, 1],
                    cu_seqlens_q=query_starts,
                    cu_seqlens_k=key_starts,
                    max_seqlen_q=longest_query,
                    max_seqlen_k=longest_key,
                    causal=True,
                    window_size=(-1 if window is None else window - 1, 0),
                    block_table=tables,
                )
                return out.flatten(1)

            return flash

        def ours(
            q: Tensor,
            pages: Tensor,
            tables: Tensor,
            query_starts: Tensor,
            key_starts: Tensor,
            ends: Tensor,
            longest_query: int,
            longest_key: int,
            layer: int,
        ) -> Tensor:
            return prefill_attention(
                q,
                pages,
                tables,
                query_starts,
                ends,
                longest_query=longest_query,
                scale=scale,
                sliding_window=windows[layer],
            )

        return ours


def decode_buckets(largest: int) -> list[int]:
    """Batch sizes with a graph of their own: padding never adds more than a quarter, nor more than 32 rows."""
    buckets = [1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, *range(160, largest + 1, 32)]
    return [size for size in buckets if size < largest] + [largest]
