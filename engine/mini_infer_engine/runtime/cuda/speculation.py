"""Drafts, verifies and settles tokens on a GPU by CUDA graphs of their own, without the host in between.

Positions, KV lengths, draft tokens and acceptance stay on the device; the host receives them with the tokens. A draft
model has pages of its own under the ids of the model's pages. Every position is sampled as if it were decoded alone, in
a slot of its own that exists as long as the pass.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mini_infer_engine.config.options.speculation import SpeculationConfig
from mini_infer_engine.core.batch import Row, TokenMasks
from mini_infer_engine.core.speculation.acceptance import draft_levels
from mini_infer_engine.core.speculation.pass_times import GuessCosts
from mini_infer_engine.kernels.context import KernelContext
from mini_infer_engine.kernels.recurrence.restore_states import restore_states
from mini_infer_engine.kernels.sampling.sample import sample
from mini_infer_engine.kernels.sampling.sampling_state import SamplingState
from mini_infer_engine.kernels.sampling.speculate import (
    chunk_inputs,
    expand_slots,
    keep_guess,
    look_up_guesses,
    settle_guesses,
)
from mini_infer_engine.layers.attention import AttentionBlock
from mini_infer_engine.models.causal_model import CausalModel
from mini_infer_engine.models.hidden_taps import HiddenTaps
from mini_infer_engine.ops.base import AttentionPass, ResidualState
from mini_infer_engine.ops.triton_ops import TritonOps
from mini_infer_engine.runtime.attention.triton_attention import TritonAttentionPass
from mini_infer_engine.runtime.attention.triton_backends import TritonBackend, triton_backend
from mini_infer_engine.runtime.cuda.decode_inputs import decode_inputs
from mini_infer_engine.runtime.cuda.device_state import DeviceBatchState
from mini_infer_engine.runtime.cuda.draft_reading import DraftReading, update_history
from mini_infer_engine.runtime.cuda.graphs import GraphMemory, record
from mini_infer_engine.runtime.cuda.hidden_draft import CudaHiddenDraft
from mini_infer_engine.runtime.cuda.hidden_states import CudaHiddenStates
from mini_infer_engine.runtime.cuda.kernel_head import KernelHead
from mini_infer_engine.runtime.cuda.sampling import CudaPassHandle, CudaSampling, GuessedPart, SpeculativePart
from mini_infer_engine.runtime.cuda.speculative_sampling import SpeculativeSampling
from mini_infer_engine.runtime.draft_vocabulary import DraftVocabulary
from mini_infer_engine.runtime.inputs.host_staging import PinnedStaging
from mini_infer_engine.runtime.memory.kv_pool import KVPool
from mini_infer_engine.runtime.recurrent.pass_tables import blank_steps, verify_tables
from mini_infer_engine.runtime.recurrent.triton_pass import TritonRecurrentPass
from mini_infer_engine.runtime.worker import ModelWorker

MAX_ROWS = 128
"""Most sequences of a pass with drafts: above, passes without are faster, and the logits of all draft tokens are large.
"""
TIMED_RUNS = 3
"""Runs of each pass that are timed before the first request; the quickest counts, since the first of all is slow."""
_READ_SIZES = (16, 64, 512, 4096)
"""Numbers of tokens that a draft reads for which its kernels differ."""
_TIMED_READS = (16, 128, 1024)
_UPLOADS_IN_FLIGHT = 4
"""Uploads of two passes, each before drafting and, where grammars forbid some draft tokens, before it is settled."""

Run = Callable[[], None]
Recorder = Callable[[Run], Run]
"""Turns a function into one that runs it: a CUDA graph's replay, or the function itself."""


def speculative_buckets(largest: int) -> list[int]:
    """Returns numbers of sequences with graphs of their own."""
    return [size for size in (1, 2, 4, 8, 16, 32, 64, 128) if size < largest] + [largest]


@dataclass(frozen=True, slots=True)
class _Captured:
    """The parts of a pass of one number of rows and drafts; drafting and settling come with and without filters."""

    guess: dict[bool, Run]
    verify: Run
    settle: dict[bool, Run]


def _quickest_s(run: Run) -> float:
    """Returns the seconds until the device is done, in the quickest of several runs."""
    seconds = []
    for _ in range(TIMED_RUNS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def _on_host(values: Tensor) -> Tensor:
    """Queues a copy to main memory, and returns it."""
    copied = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
    return copied.copy_(values, non_blocking=True)


class CudaSpeculation:
    """The speculation of one executor, whose model verifies draft tokens."""

    def __init__(
        self,
        config: SpeculationConfig,
        worker: ModelWorker,
        pool: KVPool,
        state: DeviceBatchState,
        attention: TritonBackend,
        kernels: KernelContext,
        sampling: CudaSampling,
        *,
        states: CudaHiddenStates | None,
        max_num_batched_tokens: int,
    ) -> None:
        """Takes `states`, the target's hidden states if a draft reads them."""
        max_num_seqs = sampling.buckets[-1]
        self._config, self._worker, self._state, self._kernels = config, worker, state, kernels
        self._page_size, self._null_page = pool.spec.page_size, pool.null_page
        self._longest = state.page_tables.shape[2] * self._page_size
        self.max_rows = min(MAX_ROWS, max_num_seqs)
        self.buckets = speculative_buckets(self.max_rows)
        self.levels = draft_levels(config.num_tokens)
        self._ops = TritonOps(kernels)
        self._attention = attention
        self._draft_attention: TritonBackend | None = None
        self._reading: DraftReading | None = None
        self._states = states
        self._recurrent = pool.states
        """The recurrent states of the model, of which those before draft tokens are kept until these are settled."""
        self._hidden_draft: CudaHiddenDraft | None = None
        _, slots, width = state.page_tables.shape
        device, most, vocabulary = state.device, config.num_tokens, worker.config.vocab_size
        # [slots, positions] int32: see kernels.sampling.speculate
        self._history = torch.zeros((slots, width * self._page_size + most + 2), dtype=torch.int32, device=device)
        self._virtual = SamplingState.zeros(self.max_rows * (most + 1) + 1, device)
        self._own_rows = torch.arange(self.max_rows * (most + 1), dtype=torch.int32, device=device)
        self._logits = torch.zeros((self.max_rows * (most + 1), vocabulary), dtype=worker.dtype, device=device)
        self._results = torch.zeros(self.max_rows * (most + 2), dtype=torch.int64, device=device)
        # Of the rows of a pass: slots, then how many guesses may count; padded rows' are the spare slot's.
        self._packed = torch.zeros((2, self.max_rows), dtype=torch.int32, device=device)
        self._packed[0] = state.padding_slot
        self._staging = PinnedStaging(self._packed, _UPLOADS_IN_FLIGHT)
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._sampling = SpeculativeSampling(sampling, self._history, self._virtual, self._own_rows)
        self._head: KernelHead | None = None
        if worker.head is not None:
            self._head = KernelHead(worker.head, self._ops)
            token_ids = worker.head.token_ids
            self._vocabulary = DraftVocabulary(worker.model, token_ids, self.max_rows, worker.dtype)
            # Passes without guesses keep nothing: a slot's hidden states come with its first pass with guesses.
            worker.model.taps = HiddenTaps(worker.head.shape.layers, always=False)
            width = worker.head.shape.num_features
            # Hidden states of each slot's token before the last one, and of every position of a pass with guesses.
            self._features = torch.zeros((slots, width), dtype=worker.dtype, device=device)
            self._checked_features = torch.zeros((len(self._logits), width), dtype=worker.dtype, device=device)
        if worker.draft is not None:
            draft = worker.draft
            sizes = (self.max_rows, draft.config.vocab_size)
            # -inf for the tokens that a draft has not in its own vocabulary
            self._draft_logits = torch.full(sizes, float("-inf"), dtype=draft.dtype, device=device)
            draft_pool = KVPool(draft.model.kv_spec(self._page_size, draft.dtype), pool.num_pages, device)
            self._draft_attention = triton_backend(draft.model.attention_layers, draft_pool, self._longest, kernels)
            self._reading = DraftReading(
                draft.model,
                self._draft_attention,
                self._ops,
                state,
                self._history,
                self._null_page,
                max_rows=self.max_rows,
                most_tokens=min(max_num_batched_tokens, self.max_rows * self._longest),
                states=states,
            )
            if states is not None:
                self._hidden_draft = CudaHiddenDraft(
                    states, self._draft_attention, self._ops, state, self._history, config.num_tokens
                )

    # -- Before the first request

    @property
    def num_graphs(self) -> int:
        """Number of graphs that `capture` records."""
        readings = 0 if self._reading is None else len(self._reading.buckets)
        return 5 * len(self.buckets) * len(self.levels) + readings

    def passes(self) -> list[Run]:
        """Returns every pass kernel by kernel, over rows that are all padding, to compile its kernels in threads.

        Drafting and settling are one piece: they share the slots of a pass, whose positions must stay in bounds.
        """
        made = [self._pass(bucket, drafts, lambda run: run) for bucket in self.buckets for drafts in self.levels]

        def guess_and_settle() -> None:
            for one in made:
                for run in (*one.guess.values(), *one.settle.values()):
                    run()

        def settle_in_stages() -> None:
            for drafts in self.levels:
                self._sampling.compile_kernels(self._logits[: drafts + 1], self._packed[0, :1])

        reads: list[Run] = [partial(self._read_padding, tokens) for tokens in self._read_sizes(_READ_SIZES)]
        if self._reading is not None:
            reads += self._reading.runs()
        return [guess_and_settle, settle_in_stages, *(one.verify for one in made), *reads]

    def capture(self, memory: GraphMemory, *, only_largest: bool = False) -> None:
        """Records all passes, or only the largest one, whose memory the others share."""
        for bucket in self.buckets[-1:] if only_largest else reversed(self.buckets):
            for drafts in self.levels[-1:] if only_largest else reversed(self.levels):
                made = self._pass(bucket, drafts, lambda run: record(run, memory).replay)
                self._captured[bucket, drafts] = made
        if self._reading is not None:
            self._reading.capture(memory, only_largest=only_largest)

    def measure(self) -> GuessCosts:
        """Measures recorded passes and the draft's reading over rows that are all padding: no request takes less."""
        pass_s = {}
        for key, made in self._captured.items():

            def run(made: _Captured = made) -> None:
                made.guess[False]()
                made.verify()
                made.settle[False]()

            pass_s[key] = _quickest_s(run)
        sizes = self._read_sizes(_TIMED_READS)
        return GuessCosts(pass_s, tuple((tokens, _quickest_s(partial(self._read_padding, tokens))) for tokens in sizes))

    def _read_sizes(self, sizes: Sequence[int]) -> list[int]:
        """Returns those sizes that a sequence may have, if there is a draft that reads."""
        return [] if self._draft_attention is None else sorted({min(size, self._longest) for size in sizes})

    def _read_padding(self, tokens: int) -> None:
        pages = [self._null_page] * -(-tokens // self._page_size)
        self.catch_up([Row(self._state.padding_slot, 0, tokens, [0] * tokens, pages, None)])

    def _pass(self, bucket: int, drafts: int, recorded: Recorder) -> _Captured:
        def guess(*, filtered: bool) -> Run:
            return recorded(partial(self._guess, bucket, drafts, filtered=filtered))

        def settle(*, filtered: bool) -> Run:
            return recorded(partial(self._settle, bucket, drafts, filtered=filtered))

        return _Captured(
            {filtered: guess(filtered=filtered) for filtered in (False, True)},
            recorded(partial(self._verify, bucket, drafts)),
            {filtered: settle(filtered=filtered) for filtered in (False, True)},
        )

    # -- Passes

    def catch_up(self, rows: list[Row]) -> None:
        """Writes known tokens to the history, and has the draft model compute their keys and values."""
        if not rows:
            return
        if self._reading is not None:
            self._reading.read(rows)
        else:
            update_history(self._history, rows)

    def begin(self, rows: list[Row], indices: Sequence[int], drafts: int, *, waits_for_masks: bool) -> GuessedPart:
        """Drafts for these rows, which have these indices in their batch, and computes the logits that verify the
        drafts.
        """
        bucket = self._bucket(rows)
        self._load(rows, [row.num_drafts or 0 for row in rows])
        self._state.send_pages(rows, self._page_size, ahead=drafts)
        filtered, made = self._state.has_filters([row.slot for row in rows]), self._pass_of(bucket, drafts)
        made.guess[filtered]()
        guesses, known = None, None
        if waits_for_masks:
            guesses = _on_host(self._guesses(len(rows), drafts))
            known = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
            known.record()  # before the logits: masks are computed meanwhile
        made.verify()
        return GuessedPart(rows, list(indices), drafts, guesses, known)

    def finish(self, part: GuessedPart, masks: TokenMasks | None, handle: CudaPassHandle) -> None:
        """Samples at every position, and determines which draft tokens are accepted."""
        rows, drafts = part.rows, part.drafts
        bucket = self._bucket(rows)
        packed_masks = None
        if masks is not None:
            packed_masks = self._sampling.packed_masks(part, masks)
            if masks.limits:
                pairs = zip(part.indices, rows, strict=True)
                self._load(rows, [masks.limits.get(index, row.num_drafts or 0) for index, row in pairs])
        filtered = self._state.has_filters([row.slot for row in rows])
        if packed_masks is None and not self._sampling.is_needed_for(rows):
            self._pass_of(bucket, drafts).settle[filtered]()
        else:
            self._settle_in_stages(part, bucket, packed_masks, handle, filtered=filtered)
        results = self._results_of(bucket, drafts)[: len(rows)]
        handle.speculative = SpeculativePart(part.indices, _on_host(results))

    def _settle_in_stages(
        self, part: GuessedPart, bucket: int, packed_masks: Tensor | None, handle: CudaPassHandle, *, filtered: bool
    ) -> None:
        slots, queries = self._packed[0, :bucket], part.drafts + 1
        expand_slots(slots, self._state.state, self._history, self._virtual, queries)

        def settle(scores: Tensor) -> Tensor:
            self._sample(scores, filtered=filtered)
            self._compare(bucket, part.drafts)
            return self._results_of(bucket, part.drafts)

        self._sampling.run(part, self._logits[: bucket * queries], slots, packed_masks, settle, handle)

    def _bucket(self, rows: list[Row]) -> int:
        return self.buckets[bisect_left(self.buckets, len(rows))]

    def _pass_of(self, bucket: int, drafts: int) -> _Captured:
        return self._captured.get((bucket, drafts)) or self._pass(bucket, drafts, lambda run: run)

    def _load(self, rows: list[Row], limits: list[int]) -> None:
        """Sends the slots, and how many draft tokens of each may be accepted."""
        array = self._staging.arrays[self._staging.begin()]
        array[0], array[1] = self._state.padding_slot, 0
        array[0, : len(rows)] = [row.slot for row in rows]
        array[1, : len(rows)] = limits
        self._staging.send()

    def _guesses(self, rows: int, drafts: int) -> Tensor:
        """Returns the draft tokens of the slots loaded last, [rows, drafts] int32."""
        slots = self._packed[0, :rows].long()
        ahead = torch.arange(1, drafts + 1, device=self._state.device)
        return self._history[slots[:, None], self._state.state.positions[slots].long()[:, None] + ahead]

    def _results_of(self, bucket: int, drafts: int) -> Tensor:
        return self._results[: bucket * (drafts + 2)].view(bucket, drafts + 2)

    # -- What is recorded

    def _sample(self, logits: Tensor, *, filtered: bool) -> None:
        """Samples each row of logits in its own slot of this pass."""
        sample(
            logits,
            self._own_rows[: len(logits)],
            self._virtual,
            workspace=self._kernels.workspace,
            programs=self._kernels.policy.sample_programs,
            filtered=filtered,
        )

    def _guess(self, bucket: int, drafts: int, *, filtered: bool) -> None:
        slots, state = self._packed[0, :bucket], self._state.state
        expand_slots(slots, state, self._history, self._virtual, 1)
        if self._head is not None:
            self._guess_by_head(self._head, bucket, drafts, filtered=filtered)
            return
        if self._draft_attention is None or self._worker.draft is None:
            config = self._config
            look_up_guesses(slots, state, self._history, drafts, config.lookup_max, config.lookup_min)
            return
        model, hidden = self._worker.draft.model, None
        for step in range(drafts):
            logits = self._draft_logits[:bucket]
            if self._hidden_draft is None:
                residual = self._draft_step(model, bucket) if step else self._first_draft_step(model, bucket)
            elif hidden is None:
                residual = self._hidden_draft.first_step(slots)
                hidden = self._hidden_draft.own_hidden(residual)
            else:
                residual = self._hidden_draft.next_step(slots, self._own_rows[:bucket], self._virtual, hidden)
                hidden = self._hidden_draft.own_hidden(residual)
            model.logits(self._ops, residual, logits)
            self._sample(logits, filtered=filtered)
            keep_guess(slots, state, self._history, self._virtual.last_tokens, step)

    def _guess_by_head(self, head: KernelHead, bucket: int, drafts: int, *, filtered: bool) -> None:
        """Drafts as a chain from the hidden states of the tokens before the last ones."""
        model, slots = self._worker.model, self._packed[0, :bucket]
        state = head.begin(self._features.index_select(0, slots))
        for step in range(drafts):
            embedding = model.embed(self._ops, self._virtual.last_tokens[:bucket])
            state, hidden = head.step(state, embedding)
            logits = self._vocabulary.logits(self._ops, hidden, self._logits[:bucket])
            self._sample(logits, filtered=filtered)
            keep_guess(slots, self._state.state, self._history, self._virtual.last_tokens, step)

    def _first_draft_step(self, model: CausalModel, bucket: int) -> ResidualState:
        """Reads the newest token and the one before it, which may be an accepted draft token that is unread."""
        assert self._draft_attention is not None
        ends = torch.arange(1, bucket + 1, dtype=torch.int64, device=self._state.device) * 2 - 1
        return self._chunks(model, self._draft_attention, bucket, offset=-1, count=2, selected=ends)

    def _draft_step(self, model: CausalModel, bucket: int) -> ResidualState:
        assert self._draft_attention is not None
        hidden, positions, kv_lengths = decode_inputs(self._own_rows[:bucket], self._virtual, model.embeddings)
        attend = self._draft_attention.decode(self._state.page_tables, self._packed[0, :bucket], positions, kv_lengths)
        residual: ResidualState = model(
            self._ops, model.scale_embeddings(hidden), TritonAttentionPass(attend, attend, None, positions)
        )
        return residual

    def _verify(self, bucket: int, drafts: int) -> None:
        model = self._worker.model
        reads_features = self._head is not None and model.taps is not None
        with model.taps.recording() if reads_features and model.taps is not None else nullcontext():
            residual = self._chunks(model, self._attention, bucket, offset=0, count=drafts + 1)
        model.logits(self._ops, residual, self._logits[: bucket * (drafts + 1)])
        if reads_features and model.taps is not None:
            self._checked_features[: bucket * (drafts + 1)] = model.taps.take()

    def _settle(self, bucket: int, drafts: int, *, filtered: bool) -> None:
        slots, queries = self._packed[0, :bucket], drafts + 1
        expand_slots(slots, self._state.state, self._history, self._virtual, queries)
        self._sample(self._logits[: bucket * queries], filtered=filtered)
        self._compare(bucket, drafts)

    def _compare(self, bucket: int, drafts: int) -> None:
        """Compares draft tokens with those sampled at their positions; the slots continue after the accepted ones."""
        slots, queries = self._packed[0, :bucket], drafts + 1
        settle_guesses(
            slots,
            self._packed[1, :bucket],
            self._virtual.last_tokens,
            self._state.state,
            self._history,
            self._results_of(bucket, drafts),
        )
        if (recurrent := self._recurrent) is not None:
            per_slot, padding = recurrent.slots.num_drafts, self._state.padding_slot
            results = self._results_of(bucket, drafts)
            restore_states(recurrent.storage, slots, results, recurrent.first_draft_slot, per_slot, padding)
        if self._head is not None:
            made = self._results_of(bucket, drafts)[:, 0]
            places = torch.arange(bucket, device=self._state.device) * queries + (made - 1).clamp_(min=0)
            self._features.index_copy_(0, slots.long(), self._checked_features.index_select(0, places))

    def _chunks(
        self,
        model: CausalModel,
        attention: TritonBackend,
        bucket: int,
        *,
        offset: int,
        count: int,
        selected: Tensor | None = None,
    ) -> ResidualState:
        """Computes `count` tokens of each row, from `offset` after its last one. Returns the state of all or the
        `selected`.
        """
        slots, tables = self._packed[0, :bucket], self._state.page_tables
        inputs = chunk_inputs(
            slots,
            self._state.state,
            self._history,
            tables,
            page_size=self._page_size,
            offset=offset,
            count=count,
            vocabulary=model.config.vocab_size,
        )
        attend = attention.check(tables, slots, inputs, count)

        def attend_selected(qkv: Tensor, layer: AttentionBlock) -> Tensor:
            mixed = attend(qkv, layer)
            return mixed if selected is None else mixed.index_select(0, selected)

        hidden = model.embed(self._ops, inputs.token_ids)
        planned: AttentionPass = TritonAttentionPass(attend, attend_selected, selected, inputs.positions)
        if self._recurrent is not None and model is self._worker.model:
            steps = blank_steps(bucket, self._state.device, count)
            rows = verify_tables(slots, steps, count, self._recurrent, self._state.padding_slot)
            planned = TritonRecurrentPass(planned, self._recurrent, rows, self._kernels)
        residual: ResidualState = model(self._ops, hidden, planned)
        if self._states is not None and model is self._worker.model:
            self._states.store(self._ops, inputs.kv_index[0])
        return residual
