"""Executes passes on an NVIDIA GPU: our kernels over batch state on the device, by CUDA graphs where shapes repeat.

A pass is a forward, which leaves logits, and sampling, which reads them. Decode rows and small prompts are replayed;
everything else runs the same kernels one by one. It decides nothing about what is in a batch.
"""

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from mini_infer_engine.communication.collectives import NoCollectives
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.config.options.speculation import speculation_of
from mini_infer_engine.core.batch import Batch, Row, TokenMasks, Transfers
from mini_infer_engine.core.kv_tiers.tier_memory import LayerwiseLoad
from mini_infer_engine.core.request import Request
from mini_infer_engine.core.speculation.pass_times import GuessCosts
from mini_infer_engine.device import to_device
from mini_infer_engine.kernels.context import KernelContext
from mini_infer_engine.kernels.copy_pages import copy_pages
from mini_infer_engine.kernels.embed_decode import gather_places
from mini_infer_engine.ops.base import AttentionPass, ResidualState
from mini_infer_engine.ops.triton_ops import TritonOps
from mini_infer_engine.runtime.attention.triton_backends import triton_backend
from mini_infer_engine.runtime.cuda.captured_graphs import CapturedGraphs, prefill_shapes
from mini_infer_engine.runtime.cuda.device_state import DeviceBatchState, page_table_width, refuses_suppressed
from mini_infer_engine.runtime.cuda.graphs import CapturedModel, PrefillGraph, decode_buckets, prefill_sequences
from mini_infer_engine.runtime.cuda.hidden_states import CudaHiddenStates
from mini_infer_engine.runtime.cuda.kernel_warmup import Work, rare_kernels, run_in_threads, warmup_batches
from mini_infer_engine.runtime.cuda.sampling import CudaPassHandle, CudaSampling
from mini_infer_engine.runtime.cuda.speculation import CudaSpeculation
from mini_infer_engine.runtime.cuda.stage import CudaStage
from mini_infer_engine.runtime.embeddings import Embeddings, needs_embeddings
from mini_infer_engine.runtime.eviction.compactor import Compactor, needs_queries
from mini_infer_engine.runtime.image_encoder import image_encoder_of
from mini_infer_engine.runtime.inputs.batch_tensors import PassInputs, build_inputs
from mini_infer_engine.runtime.inputs.layer_progress import LayerCounters, LoadedAttention, MarkedAttention
from mini_infer_engine.runtime.memory.hidden_pages import decode_index
from mini_infer_engine.runtime.memory.kv_pool import KVPool
from mini_infer_engine.runtime.prompt_logprobs import PromptLogprobs
from mini_infer_engine.runtime.recurrent.pass_tables import pass_tables
from mini_infer_engine.runtime.recurrent.triton_pass import TritonRecurrentPass
from mini_infer_engine.runtime.worker import ModelWorker

log = logging.getLogger(__name__)

_COPIES_AT_ONCE = 2
"""Least copies that share one launch: a launch for each takes a tenth of a millisecond of the host's time for ten
beams.
"""

Forward = Callable[[], None]


class CudaExecutor:
    """The `executor.Executor` of NVIDIA GPUs. `settings.enforce_eager` keeps the kernels and omits the graphs."""

    default_page_size: int = 128  # what the attention kernels read in one go
    page_size_step: int = 16

    def __init__(self, worker: ModelWorker, pool: KVPool, settings: EngineSettings) -> None:
        self.worker, self.pool, self.settings = worker, pool, settings
        model, device = worker.model, worker.device
        longest = settings.max_model_len or worker.config.max_position_embeddings
        width = page_table_width(longest, pool.spec.page_size)
        self.kernels = KernelContext.of(device, settings.disable)
        self.ops = TritonOps(self.kernels, worker.collectives, overlaps_sums=True)
        """Ops of passes that are launched kernel by kernel."""
        self.state = DeviceBatchState(settings.max_num_seqs, width, pool.null_page, device, len(pool.kv_cache.groups))
        longest = width * pool.spec.page_size
        vision = worker.config.vision
        self.attention = triton_backend(
            model.attention_layers,
            pool,
            longest,
            self.kernels,
            self.prefill_kernel(),
            sees_later_keys=vision is not None and vision.is_bidirectional,
        )
        self.compactor = Compactor(pool)
        is_recurrent = pool.states is not None
        shapes = prefill_shapes(settings, self.kernels.policy, worker, self.attention, is_recurrent=is_recurrent)
        buckets = decode_buckets(settings.max_num_seqs)
        most_rows = max((decodes + prefill_sequences(tokens) for tokens, decodes in shapes.items()), default=0)
        self.sampling = CudaSampling(
            self.state, worker.config.vocab_size, worker.dtype, buckets, most_rows, self.kernels
        )
        config = speculation_of(settings)
        self.states = CudaHiddenStates.of(None if worker.draft is None else worker.draft.model, pool)
        """The hidden states that passes store for a draft; None if it reads none."""
        self.speculation: CudaSpeculation | None = None
        if config is not None:
            self.speculation = CudaSpeculation(
                config,
                worker,
                pool,
                self.state,
                self.attention,
                self.kernels,
                self.sampling,
                states=self.states,
                max_num_batched_tokens=settings.max_num_batched_tokens or longest,
            )
        self.max_speculative_rows = 0 if self.speculation is None else self.speculation.max_rows
        self.guess_costs = GuessCosts()
        self.stage = None
        if worker.link.size > 1:
            self.stage = CudaStage(worker, self.state, max([buckets[-1], *shapes]))
        self.images = image_encoder_of(worker)
        self.layers: LayerCounters | None = None
        """Counters by which passes with prompts report the progress of their layers."""
        captured = CapturedModel(
            model=model,
            ops=TritonOps(self.kernels, worker.collectives),
            kernels=self.kernels,
            attention=self.attention,
            state=self.state,
            slots=self.sampling.slots,
            logits=self.sampling.logits,
            null_page=pool.null_page,
            stage=self.stage,
            states=self.states,
            recurrent=pool.states,
        )
        self.graphs = CapturedGraphs(captured, shapes, self.sampling, self.speculation, worker.config, settings)
        self._deferred: Iterator[Work] = iter(())
        """Work of the start that comes after readiness."""
        self._has_unsampled = False
        """True if the logits of the last pass wait for their masks."""

    @staticmethod
    def prefill_kernel() -> Callable[..., Tensor] | None:
        """Returns the kernel of attention from prompt chunks, or None for our own."""
        return None

    # -- Before the first request

    def compile_kernels(self, most_tokens: int, *, defers: bool = False) -> None:
        """Compiles every kernel in its variants.

        With `defers`, kernels of rare requests are left for `warm_up` unless the others show that Triton's cache is
        cold.
        """
        worker, kernels = self.worker, self.kernels
        batches = warmup_batches(worker.model, kernels.policy, self.pool, self.settings.max_num_seqs, most_tokens)
        common: list[Work] = [partial(self._compile_pass, batch) for batch in batches]
        if self.speculation is not None:
            common += self.speculation.passes()
        # Threads are in no order: what ranks do together comes with the first passes, which are.
        ops, self.ops = self.ops, TritonOps(kernels, NoCollectives(worker.collectives.parallel))
        run_in_threads(common, self._rare_kernels(), worker.device, defers=defers)
        self.ops = ops

    def _compile_pass(self, batch: Batch) -> None:
        """Compiles the kernels of a pass by running it. It samples for the spare slot."""
        self.state.begin(batch.rows[batch.num_decodes :])
        samples = self.stage is None or self.stage.is_last
        state = self._eager(batch, every_token=not samples)[1]
        if samples:
            logits = self.worker.model.logits(self.ops, state)
            slots = torch.full((len(logits),), self.state.padding_slot, dtype=torch.int32, device=logits.device)
            self.sampling.sample(logits, slots, filtered=True)

    def _rare_kernels(self) -> Iterator[Work]:
        return rare_kernels(self.worker, self.pool, self.sampling, self.attention)

    def capture(
        self, *, reports_layers: bool = False, loads: LayerwiseLoad | None = None, defers: bool = False
    ) -> None:
        """Records the graphs.

        With `reports_layers`, passes with prompts report the progress of their layers from now on. With `loads`, they
        are recorded a second time for batches that follow loads. With `defers`, most graphs are left for `warm_up`.
        """
        if reports_layers:
            self.layers = LayerCounters(len(self.worker.model.attention_layers), self.worker.device)
            self.layers.mark(0)  # compiles the kernel
        self.graphs.capture(self.layers, loads, defers=defers)
        if self.speculation is not None and not self.settings.enforce_eager:
            with torch.inference_mode():
                self.guess_costs = self.speculation.measure()
        if defers:
            self._deferred = self._left_for_later()

    def _left_for_later(self) -> Iterator[Work]:
        """Yields what `warm_up` does: graphs that passes lacked, then kernels of rare requests, then other graphs."""
        for rare in self._rare_kernels():
            yield from self.graphs.deferred(only_missed=True)
            yield rare
        yield from self.graphs.deferred()

    def warm_up(self) -> bool:
        """Captures one of the graphs, or loads one of the kernels, that `capture` has deferred.

        The graph that passes lacked last comes first. Returns False if nothing is left.
        """
        if self._has_unsampled:
            return True  # recording would overwrite their logits
        with torch.inference_mode():
            work = next(self._deferred, None)
            if work is None:
                return False
            self.sampling.load([])  # recording runs a graph, whose rows must be padding
            try:
                work()
            except torch.OutOfMemoryError:
                log.warning("the GPU has no memory for more CUDA graphs: passes use larger ones")
                self._deferred = iter(())
        return True

    def graph_bytes(self) -> int:
        """Estimates the memory of `capture`. Use it on a temporary executor only."""
        return self.graphs.estimate_bytes()

    # -- Passes

    def refuses(self, request: Request) -> str | None:
        """Returns an error if the request suppresses more tokens than a slot has room for on the device, or None."""
        return refuses_suppressed(request.sampling, self.worker.config.eos_token_ids)

    def launch(self, batch: Batch) -> CudaPassHandle:
        """Launches a pass: computes logits by graphs or kernel by kernel, then samples unless it waits for masks."""
        stage, prefills = self.stage, batch.rows[batch.num_decodes :]
        self._has_unsampled = batch.waits_for_masks
        # What the host brings is attended to exactly, as a prompt, not as a decode that selects pages; and only passes
        # with prompts follow loads.
        may_go_on = self.pool.bounds is None and not batch.layerwise_loads
        goes_on = [may_go_on and _continues(row) for row in prefills]
        with torch.inference_mode():
            self._transfer(batch.transfers)
            if batch.encoder is not None and self.images is not None:
                self.images.run(batch.encoder)
            if stage is not None and not stage.is_last:
                return self._launch_part(batch, goes_on, stage)
            if self.speculation is not None:
                self.speculation.catch_up(batch.catch_up)
            handle = self.sampling.begin(batch.rows, batch.num_decodes)
            handle.swap_check = self.pool.swap_check
            self.state.begin_pages(prefills, goes_on)
            parts = list(self._guessed(batch, handle) if batch.num_drafts else self._forwards(batch, goes_on, handle))
            for number, (indices, forward) in enumerate(parts, start=1):
                rows = batch.rows if len(indices) == len(batch.rows) else [batch.rows[index] for index in indices]
                self.sampling.load(rows)
                forward()
                if batch.waits_for_masks:
                    handle.deferred.append(self.sampling.defer(rows, indices, is_last=number == len(parts)))
                else:
                    self.sampling.run(rows, indices, handle)
            self._compact(batch.rows)
            if not batch.waits_for_masks:
                if stage is not None:
                    stage.traffic.return_tokens(batch.rows)
                handle.done.record()
        return handle

    def _compact(self, rows: list[Row]) -> None:
        """Compacts the caches of sequences whose pass has been launched, and tells the device what they have now."""
        compacted = [row for row in rows if row.compaction is not None]
        if compacted:
            self.compactor.compact(compacted)
            self.state.compacted(compacted)

    def _launch_part(self, batch: Batch, goes_on: list[bool], stage: CudaStage) -> CudaPassHandle:
        """Launches a pass on a stage that is not the last: another stage samples."""
        stage.traffic.begin(batch)
        handle = CudaPassHandle([], self.state)
        handle.swap_check = self.pool.swap_check
        self.state.begin_pages(batch.rows[batch.num_decodes :], goes_on)
        ((_, forward),) = self._forwards(batch, goes_on, handle)
        self.sampling.load(batch.rows)
        forward()
        self.state.advance(self.sampling.slots[: len(batch.rows)])
        stage.traffic.hand_on(batch.rows, stage.take())
        handle.done.record()
        return handle

    def _transfer(self, transfers: Transfers) -> None:
        """Queues a pass's transfers. Several copies share one launch if none reads what another writes."""
        copies = transfers.copies
        is_chained = not {copy.source for copy in copies}.isdisjoint([copy.target for copy in copies])
        has_more = self.pool.hidden is not None or self.pool.bounds is not None
        if len(copies) < _COPIES_AT_ONCE or is_chained or has_more:
            self.pool.transfer(transfers)
            return
        self.pool.swap(transfers)
        copied = self.pool.copied_tokens
        packet = np.array([(copy.source, copy.target, copied(copy)) for copy in copies], dtype=np.int32)
        copy_pages(self.pool.pages, to_device(packet, self.worker.device))

    def guesses(self, handle: CudaPassHandle) -> Mapping[int, Sequence[int]]:
        """Returns the draft tokens of a pass that waits for masks, by row. Waits for the drafting alone."""
        return {} if handle.guessed is None else handle.guessed.read()

    def sample(self, handle: CudaPassHandle, masks: TokenMasks) -> None:
        """Samples a launched pass within its masks; does nothing on a stage that is not the last."""
        self._has_unsampled = False
        if self.stage is not None and not self.stage.is_last:
            return
        with torch.inference_mode():
            if handle.guessed is not None and self.speculation is not None:
                self.speculation.finish(handle.guessed, masks, handle)
                handle.guessed = None
            for part in handle.deferred:
                self.sampling.run_deferred(part, masks, handle)
            handle.deferred.clear()
            if self.stage is not None:
                self.stage.traffic.return_tokens(handle.rows)
            handle.done.record()

    def _forwards(
        self, batch: Batch, goes_on: list[bool], handle: CudaPassHandle
    ) -> Iterator[tuple[Sequence[int], Forward]]:
        """Yields the parts of a pass, in order: indices of rows, and the function that computes their logits.

        All rows are in one part or, if the graph for the prompts takes no decode rows, those are in a part before it.
        Sequences that continue by one token from the host, as beams do, are decode rows whose slots are rewritten;
        `goes_on` marks them among the rows after the decode rows.
        """
        num_decodes, num_rows = batch.num_decodes, len(batch.rows)
        decodes, prefills = batch.rows[:num_decodes], batch.rows[num_decodes:]
        is_eager = any(row.prompt_targets or row.images for row in prefills) or needs_embeddings(prefills)
        is_eager = is_eager or any(map(needs_queries, batch.rows))
        continued = [index for index, goes in enumerate(goes_on, start=num_decodes) if goes]
        if self.graphs.decode_graphs and not is_eager and len(continued) == len(prefills):
            yield range(num_rows), partial(self.graphs.decode(num_rows).run, batch.rows, prefills)
            return
        graph = None if is_eager else self.graphs.prefill(num_decodes, prefills)
        if graph is None:
            sampling = [index for index, row in enumerate(batch.rows) if row.sampling is not None]
            yield sampling, partial(self._run_eagerly, batch, handle)
        elif graph.num_decodes:
            yield range(num_rows), partial(self._replay, graph, decodes, prefills, batch)
        else:
            first = [*range(num_decodes), *continued]
            if first:
                rows = [batch.rows[index] for index in first]
                yield first, partial(self.graphs.decode(len(rows)).run, rows, rows[num_decodes:])
            second = [index for index, goes in enumerate(goes_on, start=num_decodes) if not goes]
            prompts = [batch.rows[index] for index in second]
            smallest = self.graphs.prefill(0, prompts) if continued else graph
            yield second, partial(self._replay, smallest or graph, [], prompts, batch)

    def _guessed(self, batch: Batch, handle: CudaPassHandle) -> Iterator[tuple[Sequence[int], Forward]]:
        """Runs the rows with drafts, and settles them unless they wait for masks. Yields a part for the rows that
        remain.
        """
        assert self.speculation is not None
        rows = batch.rows
        guessing = [index for index, row in enumerate(rows) if row.num_drafts is not None]
        part = self.speculation.begin(
            [rows[index] for index in guessing], guessing, batch.num_drafts, waits_for_masks=batch.waits_for_masks
        )
        if batch.waits_for_masks:
            handle.guessed = part
        else:
            self.speculation.finish(part, None, handle)
        others = [index for index, row in enumerate(rows) if row.num_drafts is None]
        if not others:
            return
        decodes = [rows[index] for index in others]
        if self.graphs.decode_graphs and not any(map(needs_queries, decodes)):
            yield others, partial(self.graphs.decode(len(others)).run, decodes, [])
        else:
            yield others, partial(self._run_eagerly, Batch(decodes, len(decodes)), handle)

    def _replay(self, graph: PrefillGraph, decodes: list[Row], prefills: list[Row], batch: Batch) -> None:
        """Replays the part of a batch that has its prompts."""
        if self.layers is not None and batch.report_layers is not None:
            batch.report_layers(self.layers.begin())
        if batch.layerwise_loads:
            graph = self._following(graph, batch.layerwise_loads)
        graph.run(decodes, prefills)

    def _following(self, graph: PrefillGraph, loads: Sequence[LayerwiseLoad]) -> PrefillGraph:
        """Returns the graph of the same size that waits for each layer of the loads. Has the stream wait for all of
        them if it has not been captured yet.
        """
        following = self.graphs.following(graph)
        if following is None:
            for load, layer in itertools.product(loads, range(len(self.pool.places))):
                load.wait_for_layer(layer)
        return following or graph

    def _run_eagerly(self, batch: Batch, handle: CudaPassHandle) -> None:
        """Runs any batch kernel by kernel: the logits of the rows that sample, and log probabilities of prompts."""
        self.state.begin([row for row in batch.rows[batch.num_decodes :] if row.sampling is not None])
        reads_prompts = any(row.prompt_targets for row in batch.rows)
        if self.stage is not None and not self.stage.is_last:
            self.stage.leave(self._eager(batch, every_token=True)[1].residual)
            return
        inputs, state = self._eager(batch, every_token=reads_prompts)
        if reads_prompts:
            handle.prompt_logprobs = PromptLogprobs.of(batch.rows, state, partial(self.worker.model.logits, self.ops))
            state = state.select(inputs.sample_rows)
        if needs_embeddings(batch.rows):
            handle.embeddings = Embeddings.of(batch.rows, state, self.worker.model, self.ops, self.worker.pooler)
        if num_samples := inputs.sample_rows.shape[0]:
            self.worker.model.logits(self.ops, state, self.sampling.logits[:num_samples])

    def logits(self, batch: Batch) -> Tensor:
        """Returns the logits of every token of a pass, [tokens, vocab], computed kernel by kernel."""
        with torch.inference_mode():
            if batch.encoder is not None and self.images is not None:
                self.images.run(batch.encoder)
            return self.worker.model.logits(self.ops, self._eager(batch, every_token=True)[1])

    def _eager(self, batch: Batch, *, every_token: bool) -> tuple[PassInputs, ResidualState]:
        """Returns the inputs, and the residual state of all tokens or of those that sample."""
        inputs = build_inputs(batch, self.pool.spec.page_size, self.pool.null_page, self.worker.device)
        token_ids, model = inputs.token_ids, self.worker.model
        if inputs.pending_slots.shape[0]:
            state = self.state.state
            pending = state.last_tokens.index_select(0, inputs.pending_slots)
            token_ids = token_ids.index_copy(0, inputs.pending_tokens, pending)
            # The host's numbers are too high where guesses of a pass in flight are wrong. Decode rows come first and
            # have one token each, so that it has its row's index.
            positions, kv_lengths = gather_places(inputs.pending_slots, state)
            inputs.positions = inputs.positions.index_copy(0, inputs.pending_tokens, positions)
            inputs.kv_lengths = inputs.kv_lengths.index_copy(0, inputs.pending_tokens, kv_lengths)
        if self.images is not None:
            inputs.images = self.images.prepare(batch)
        stores_all = self.states is not None
        attention: AttentionPass = self.attention.plan(inputs, every_token=every_token or stores_all)
        attention = self.compactor.observe(batch.rows, attention)
        if batch.layerwise_loads:
            attention = LoadedAttention(attention, batch.layerwise_loads)
        if self.layers is not None and batch.report_layers is not None:
            batch.report_layers(self.layers.begin())
            attention = MarkedAttention(attention, self.layers.mark)
        if self.pool.states is not None:
            tables = pass_tables(batch.rows, self.pool.states, self.worker.device)
            attention = TritonRecurrentPass(attention, self.pool.states, tables, self.kernels)
        if self.stage is None or self.stage.is_first:
            hidden = model.embed(self.ops, token_ids)
        else:
            hidden = model.enter(self.ops, self.stage.traffic.receive(inputs.num_tokens))
        if (images := inputs.images) is None:
            residual: ResidualState = model(self.ops, hidden, attention)
        else:
            residual = images.forward(model, self.ops, hidden, attention)
        if self.states is not None:
            self.states.store(self.ops, self._kv_index(inputs))
            if not every_token:
                residual = residual.select(inputs.sample_rows)
        return inputs, residual

    def _kv_index(self, inputs: PassInputs) -> Tensor:
        """Returns where the pass's tokens are stored, [tokens] int64: decode rows, which come first, by their lengths
        on the device.
        """
        page_size, decodes = self.pool.spec.page_size, inputs.num_decodes
        kv_index = inputs.write_pages[0] * page_size + inputs.write_offsets
        if not decodes:
            return kv_index
        rows = torch.arange(decodes, device=kv_index.device)
        decoded = decode_index(inputs.page_tables[0], rows, inputs.kv_lengths[:decodes], page_size)
        return torch.cat((decoded, kv_index[decodes:]))


def _continues(row: Row) -> bool:
    """Returns True if a chunk is like a decode row: one token, from whose logits the next is sampled."""
    is_one = row.count == 1 and row.num_samples == 1 and row.sampling is not None
    return is_one and not row.prompt_targets and not row.embeds and not row.images


class FlashPrefillExecutor(CudaExecutor):
    """A `CudaExecutor` that uses flash-attn instead of our kernels for prompt chunks."""

    default_page_size: int = 256  # what flash-attn requires
    page_size_step: int = 256

    @staticmethod
    def prefill_kernel() -> Callable[..., Tensor] | None:
        """Returns flash-attn's kernel."""
        from mini_infer_engine.runtime.attention.flash import flash_prefill_attention

        return flash_prefill_attention
