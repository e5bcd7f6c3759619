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
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm
from triton import AsyncCompileMode

from mini_infer_engine.config.model_config import ModelConfig
from mini_infer_engine.config.settings import EngineSettings
from mini_infer_engine.core.batch import Batch, Row, continued_slots
from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.kernels.attention.decode_attention import decode_attention
from mini_infer_engine.kernels.attention.decode_plan import plan_decode
from mini_infer_engine.kernels.attention.prefill_attention import prefill_attention, prefill_shape
from mini_infer_engine.kernels.attention.prefill_rows import PrefillRows
from mini_infer_engine.kernels.attention.rope_kv import rope_kv
from mini_infer_engine.kernels.gemm.gemm_rules import K_SPLITS
from mini_infer_engine.kernels.mechanisms import Mechanism
from mini_infer_engine.kernels.norm.rms_norm import add_rms_norm
from mini_infer_engine.kernels.policy import KernelPolicy, kernel_policy
from mini_infer_engine.kernels.sampling.penalise import count_sampled, penalised
from mini_infer_engine.kernels.sampling.sample import sample
from mini_infer_engine.kernels.workspace import Workspace
from mini_infer_engine.ops.triton_ops import Attend, AttentionLayer, FusedDecoder, LogitsSelection, ResidualState
from mini_infer_engine.runtime.cuda_graphs import (
    DecodeGraph,
    PrefillGraph,
    decode_buckets,
    decodes_beside,
    is_launch_bound,
    prefill_buckets,
)
from mini_infer_engine.runtime.device_state import DeviceBatchState, page_table_width, refuses_suppressed
from mini_infer_engine.runtime.inputs import PassInputs, build_inputs
from mini_infer_engine.runtime.runner import PassHandle, TorchRunner, weight_bytes

log = logging.getLogger(__name__)

_COMPILERS = 16
"""At a time. Batches that want the same kernel wait for one of them: else each compiles it, 130 kernels for 39."""


class GraphRunner(TorchRunner):
    """See the module. `settings.enforce_eager` keeps the kernels and leaves the graphs."""

    default_page_size = 128  # what the attention kernels read in one go

    def __init__(self, settings: EngineSettings, config: ModelConfig, directory: Path | None = None) -> None:
        """As `TorchRunner`; then captures the graphs, largest first, so that all share the largest one's memory."""
        self._settings = settings
        self._prefill_attention: Callable[..., Tensor] = self._paged_prefill_attention
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

    @cached_property
    def workspace(self) -> Workspace:
        """Scratch memory of this runner's kernels; first asked for before threads compile kernels."""
        return Workspace(self.device)

    @cached_property
    def policy(self) -> KernelPolicy:
        """Which kernels this runner's passes have."""
        return kernel_policy(self.device, self._settings.disable)

    def _paged_prefill_attention(
        self, q: Tensor, pages: Tensor, rows: PrefillRows, *, sliding_window: int | None, **options: Any
    ) -> Tensor:
        config = self.policy.prefill_config(prefill_shape(q, pages, rows, sliding_window))
        return prefill_attention(
            q, pages, rows, config=config, workspace=self.workspace, sliding_window=sliding_window, **options
        )

    def _use_pool(self, num_pages: int) -> None:
        super()._use_pool(num_pages)
        longest = self._settings.max_model_len or self.config.max_position_embeddings
        self.fused = FusedDecoder(self.model, self.pool, self.policy, self.workspace)
        self.table = DeviceBatchState(
            self._settings.max_num_seqs,
            page_table_width(longest, self.page_size),
            self.pool.null_page,
            self.device,
        )

    def _drop_pool(self) -> None:
        super()._drop_pool()
        del self.fused, self.table

    def _capture(self) -> None:
        started = time.perf_counter()
        largest = self._settings.max_num_seqs
        self._buckets = decode_buckets(largest)
        separate_decodes = self.policy.uses(Mechanism.SEPARATE_DECODE_GRAPHS)
        launch_bound = separate_decodes and is_launch_bound(weight_bytes(self.model))
        self.decode_slots = torch.full(
            (self._buckets[-1],), self.table.padding_slot, dtype=torch.int32, device=self.device
        )
        self.graph_memory = torch.cuda.graph_pool_handle()
        most_tokens = self._settings.max_num_batched_tokens or 1 << 30
        graphs_of_prefills = self.policy.uses(Mechanism.PREFILL_GRAPHS)
        prefills = prefill_buckets(most_tokens, launch_bound=launch_bound) if graphs_of_prefills else []
        with (
            torch.inference_mode(),
            tqdm(
                total=len(prefills) + len(self._buckets), desc="Capturing CUDA graphs", disable=not sys.stderr.isatty()
            ) as progress,
        ):
            for tokens in reversed(prefills):
                self.prefill_graphs[tokens] = PrefillGraph(
                    self, tokens, decodes_beside(tokens, largest, launch_bound=launch_bound)
                )
                progress.update()
            self.prefill_graphs = dict(sorted(self.prefill_graphs.items()))
            for bucket in reversed(self._buckets):
                self.decode_graphs[bucket] = DecodeGraph(self, bucket)
                progress.update()
        torch.cuda.synchronize()
        log.info("captured %d CUDA graphs in %.1f s", progress.total, time.perf_counter() - started)

    def _compile_kernels(self, most_tokens: int) -> None:
        """Every kernel in its variants, several at a time: one by one they would be most of a cold start."""
        asks = SamplingParams()
        largest = min(self._settings.max_num_seqs, most_tokens)
        # Where products or decode attention change their kernel with the number of rows.
        decodes = [size for size in (1, 9, 17, 33, 65, 129, 257) if size <= largest]
        batches = [Batch([Row(slot, 0, 1, [0], [0], asks) for slot in range(rows)], rows) for rows in decodes]
        for tokens in {min(tokens, most_tokens) for tokens in (16, 32, 64, 512, 4096)}:
            pages = list(range(-(-tokens // self.page_size)))
            batches.append(Batch([Row(0, 0, tokens, [0] * tokens, pages, asks)], 0))

        def run(batch: Batch) -> None:
            torch.cuda.set_device(self.device)
            with torch.inference_mode():
                self._eager(batch)

        works: list[Callable[[], None]] = [self._compile_rare_kernels, *(partial(run, batch) for batch in batches)]
        with (
            ThreadPoolExecutor(_COMPILERS) as compilers,
            AsyncCompileMode(compilers),
            ThreadPoolExecutor(len(works)) as threads,
        ):
            # All on one stream: what kernels leave to each other in the workspace stays theirs.
            for future in [threads.submit(copy_context().run, work) for work in works]:
                future.result()

    def _compile_rare_kernels(self) -> None:
        """Page updates, plain sampling, sums of products, attention of passes that no graph holds.

        No request waits for a compiler.
        """
        torch.cuda.set_device(self.device)
        self.table.compile_updates()
        logits = torch.zeros((1, self.config.vocab_size), dtype=self.dtype, device=self.device)
        spare = torch.full((1,), self.table.padding_slot, dtype=torch.int32, device=self.device)
        sample(
            logits,
            spare,
            self.table.state,
            workspace=self.workspace,
            programs=self.policy.sample_programs,
            filtered=False,
        )
        self._sample_penalised(logits, spare)
        config, device = self.config, self.device
        summands = torch.zeros((max(K_SPLITS), 1, config.hidden_size), dtype=self.dtype, device=device)
        for splits in K_SPLITS:
            add_rms_norm(summands[0].clone(), summands[:splits], self.model.model.norm.weight, config.rms_norm_eps)
        if self._prefill_attention != self._paged_prefill_attention:
            return  # flash-attn is compiled already
        token = torch.zeros((1, config.num_heads, config.head_dim), dtype=self.dtype, device=device)
        ends = torch.ones(1, dtype=torch.int32, device=device)
        starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
        pages = self.fused.attention_layers[0].pages
        # One token attends. It is told to be many where that decides the variant: whether programs share a sequence.
        for tokens, longest_key in itertools.product((1, 1 << 16), (1 << 10, 1 << 14)):
            q, out = token.expand(tokens, -1, -1), torch.empty_like(token).flatten(1).expand(tokens, -1)
            rows = PrefillRows(self.table.page_tables[-1:], starts, ends, 1, longest_key)
            for window in set(config.sliding_windows):
                shape = prefill_shape(q, pages, rows, window)
                prefill_attention(
                    q,
                    pages,
                    rows,
                    scale=1.0,
                    config=self.policy.flash_attention_2_config(shape),
                    workspace=self.workspace,
                    sliding_window=window,
                    out=out,
                )
        if hopper := self.policy.hopper_prefill_config(prefill_shape(token, pages, rows)):
            prefill_attention(token, pages, rows, scale=1.0, config=hopper, workspace=self.workspace)

    def refuses(self, request: Request) -> str | None:
        """See `Runner.refuses`."""
        return refuses_suppressed(request.sampling, self.config.eos_token_ids)

    def launch(self, batch: Batch) -> PassHandle:
        """See `Runner.launch`."""
        rows, decodes = batch.rows, batch.num_decodes
        prefills = rows[decodes:]
        with torch.inference_mode():
            self.pool.copy(batch.copies)
            self.table.forget_pages(prefills)
            for row in prefills:
                self.penalties.begin(row)
            if not prefills and self.decode_graphs:
                self._decode(rows)
            elif not self._are_penalised(rows) and (graph := self._prefill_graph(decodes, prefills)):
                graph.replay(rows[:decodes], prefills)
            elif (graph := self._prefill_graph(0, prefills)) and not graph.num_decodes:
                if decodes:
                    self._decode(rows[:decodes])
                graph.replay([], prefills)
                self._choose_again(graph, prefills)
            else:
                self._eager(batch)
            return self._handle(rows)

    def _are_penalised(self, rows: list[Row]) -> bool:
        """Whether some of these rows' samples ask for penalties."""
        return self.penalties.concern(row.slot for row in rows if row.sampling is not None)

    def _choose_again(self, graph: PrefillGraph, prefills: list[Row]) -> None:
        """For penalised rows of a pass that `graph` has just run: it chooses without penalties."""
        rows = [row for row in prefills if self._are_penalised([row])]
        if rows:
            self.table.begin(rows)  # as if it had not chosen
            spare, again = self.table.padding_slot, {row.slot for row in rows}
            slots = [row.slot if row.slot in again else spare for row in prefills]
            on_device = self.table.padded(slots, graph.num_sequences).to(self.device, non_blocking=True)
            self._sample_penalised(graph.logits, on_device)

    def _handle(self, rows: list[Row]) -> PassHandle:
        """The sampling kernel writes its tokens to the host: no copy stands between this pass and the next."""
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
        done.record()
        return PassHandle(self.table.places_on_host(rows), len(rows), self.table.state.on_host, done)

    def _decode(self, rows: list[Row]) -> None:
        """Decode rows by graph."""
        slots = continued_slots(rows)
        bucket = self._buckets[bisect_left(self._buckets, len(rows))]
        self.table.send_pages(rows, self.page_size)
        if (bucket, slots) != self._loaded_slots:
            self.decode_slots[:bucket].copy_(self.table.padded(slots, bucket), non_blocking=True)
            self._loaded_slots = (bucket, slots)
        graph = self.decode_graphs[bucket]
        graph.forward.replay()
        if self.penalties.concern(slots):
            self._sample_penalised(graph.logits, graph.slots)
        else:
            graph.sampling[self.table.has_filters(slots)].replay()

    def _sample_penalised(self, logits: Tensor, slots: Tensor) -> None:
        """As `sample`, kernel by kernel: the logits that it makes in fp32 would be memory that every graph keeps."""
        sample(
            penalised(logits, slots, self.penalties),
            slots,
            self.table.state,
            workspace=self.workspace,
            programs=self.policy.sample_programs,
        )
        count_sampled(slots, self.table.state, self.penalties)

    def _prefill_graph(self, decodes: int, prefills: list[Row]) -> PrefillGraph | None:
        """The smallest captured pass with room for so many decode rows and these prompts."""
        tokens = decodes + sum(row.count for row in prefills)
        graphs = self.prefill_graphs.values()
        return next((graph for graph in graphs if graph.holds(tokens, decodes, len(prefills))), None)

    def _eager(self, batch: Batch) -> None:
        """Any batch, kernel by kernel."""
        self.table.begin([row for row in batch.rows[batch.num_decodes :] if row.sampling is not None])
        inputs = build_inputs(batch, self.page_size, self.pool.null_page, self.device)
        attend, attend_sampled = self._attention(inputs)
        stream = self._stream(inputs, attend, LogitsSelection(inputs.sample_rows, attend_sampled))
        if not inputs.sample_rows.shape[0]:
            return
        logits, slots = self.fused.logits(stream), inputs.sample_slots.to(torch.int32)
        if self._are_penalised(batch.rows):
            self._sample_penalised(logits, slots)
        else:
            sample(logits, slots, self.table.state, workspace=self.workspace, programs=self.policy.sample_programs)

    def logits(self, batch: Batch) -> Tensor:
        """See `TorchRunner.logits`."""
        with torch.inference_mode():
            inputs = build_inputs(batch, self.page_size, self.pool.null_page, self.device)
            return self.fused.logits(self._stream(inputs, self._attention(inputs)[0]))

    def _stream(self, inputs: PassInputs, attend: Attend, wanted: LogitsSelection | None = None) -> ResidualState:
        """The residual stream of all tokens, or of those wanted, after the last layer."""
        token_ids, state = inputs.token_ids, self.table.state
        if inputs.pending_slots.shape[0]:
            pending = state.last_tokens.index_select(0, inputs.pending_slots)
            token_ids = token_ids.index_copy(0, inputs.pending_tokens, pending)
        hidden = functional.embedding(token_ids, self.model.model.embed_tokens.weight)
        return self.fused.forward(hidden, attend, wanted)

    def _attention(self, inputs: PassInputs) -> tuple[Attend, Attend]:
        """Attention of a mixed pass, one new token a decoding row first: of all tokens, and of the sampled ones."""
        decodes = inputs.num_decodes
        tables = inputs.page_tables.to(torch.int32)
        decode = prefill = prefill_sampled = None
        if decodes:
            own_rows = torch.arange(decodes, dtype=torch.int32, device=self.device)
            decode = self.decode_attention_pass(tables, own_rows, inputs.positions[:decodes])
        if len(inputs.counts) > decodes:
            ends = inputs.ends[decodes:].to(torch.int32)
            longest_key = max(start + count for start, count in zip(inputs.starts, inputs.counts, strict=True))
            # 32 bits as in the graphs, whose kernel then serves here too and need not be compiled in a request's time.
            positions = inputs.positions[decodes:].to(torch.int32)
            kv_index = (inputs.write_pages * self.page_size + inputs.write_offsets)[decodes:].to(torch.int32)

            def attention(query_starts: Tensor, longest_query: int, chosen: Tensor | None = None) -> Attend:
                starts = (query_starts[decodes:] - decodes).to(torch.int32)
                rows = PrefillRows(tables[decodes:], starts, ends, longest_query, longest_key)
                return self.prefill_attention_pass(rows, positions, kv_index, chosen)

            prefill = attention(inputs.query_starts, max(inputs.counts))
            prefill_sampled = attention(inputs.sample_starts, 1, inputs.sample_rows[decodes:] - decodes)
        everything = _side_by_side(decode, prefill, decodes, inputs.num_tokens)
        return everything, _side_by_side(decode, prefill_sampled, decodes, inputs.sample_rows.shape[0])

    def decode_attention_pass(self, tables: Tensor, slots: Tensor, positions: Tensor) -> Attend:
        """Attention of one token a row; `tables` is read at row `slots`."""
        scale, kv_heads = self.config.head_dim**-0.5, self.config.num_kv_heads
        group = self.config.num_heads // kv_heads
        most_tokens = self.table.page_tables.shape[1] * self.page_size  # not this pass's: no variant is compiled late
        windows = set(self.config.sliding_windows)
        decode_config = self.policy.decode_config(positions.shape[0], kv_heads)
        plans = {
            window: plan_decode(slots, positions, kv_heads, most_tokens, window, config=decode_config, group=group)
            for window in windows
        }

        def attend(qkv: Tensor, layer: AttentionLayer, out: Tensor | None = None) -> Tensor:
            plan = plans[layer.sliding_window]
            return decode_attention(
                qkv, layer.rotation, layer.pages, tables, plan, scale=scale, workspace=self.workspace, out=out
            )

        return attend

    def prefill_attention_pass(
        self, rows: PrefillRows, positions: Tensor, kv_index: Tensor, chosen: Tensor | None = None
    ) -> Attend:
        """Attention of prompt chunks; of `chosen` tokens alone where given, which `rows` then describes."""
        scale, run = self.config.head_dim**-0.5, self._prefill_attention

        def attend(qkv: Tensor, layer: AttentionLayer, out: Tensor | None = None) -> Tensor:
            q = rope_kv(qkv, layer.rotation, positions, kv_index, layer.pages)
            if chosen is not None:
                q = q.index_select(0, chosen)
            return run(q, layer.pages, rows, scale=scale, sliding_window=layer.sliding_window, out=out)

        return attend


def _side_by_side(decode: Attend | None, prefill: Attend | None, decodes: int, tokens: int) -> Attend:
    """Attention whose first `decodes` tokens are `decode`'s and whose others `prefill`'s; it returns `tokens`."""
    if decode is None or prefill is None:
        attend = decode or prefill
        assert attend is not None, "a pass has rows"
        return attend

    def attend_both(qkv: Tensor, layer: AttentionLayer) -> Tensor:
        kv_heads, head_dim = layer.pages.shape[-2:]
        mixed = qkv.new_empty((tokens, qkv.shape[1] - 2 * kv_heads * head_dim))
        decode(qkv[:decodes], layer, mixed[:decodes])
        prefill(qkv[decodes:], layer, mixed[decodes:])
        return mixed

    return attend_both
