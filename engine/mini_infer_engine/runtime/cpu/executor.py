"""Executes passes in plain torch: on a CPU, and as the slow reference on a GPU. Nothing is captured."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.config.options.speculation import speculation_of
from mini_infer_engine.core.batch import Batch, Row, TokenMasks
from mini_infer_engine.core.kv_tiers.tier_memory import LayerwiseLoad
from mini_infer_engine.core.request import Request
from mini_infer_engine.core.result import PassResult
from mini_infer_engine.core.speculation.pass_times import GuessCosts
from mini_infer_engine.ops.base import AttentionPass, ResidualState
from mini_infer_engine.ops.torch_ops import TorchOps
from mini_infer_engine.runtime.attention.backends import torch_backend
from mini_infer_engine.runtime.cpu.speculation import PreparedBatch, TorchSpeculation, sampled_rows, samples_of
from mini_infer_engine.runtime.embeddings import Embeddings, needs_embeddings
from mini_infer_engine.runtime.eviction.compactor import Compactor
from mini_infer_engine.runtime.image_encoder import image_encoder_of
from mini_infer_engine.runtime.inputs.batch_tensors import PassInputs, build_inputs
from mini_infer_engine.runtime.inputs.layer_progress import CountedLayers, LoadedAttention, MarkedAttention
from mini_infer_engine.runtime.memory.kv_pool import KVPool
from mini_infer_engine.runtime.memory.swap_digests import SwapCheck
from mini_infer_engine.runtime.prompt_logprobs import PromptLogprobs
from mini_infer_engine.runtime.recurrent.torch_pass import TorchRecurrentPass
from mini_infer_engine.runtime.stage_traffic import StageTraffic
from mini_infer_engine.runtime.worker import ModelWorker
from mini_infer_engine.sampling.logit_changes import build_logit_changes
from mini_infer_engine.sampling.logprobs import (
    LogprobTensors,
    most_of,
    named_tokens,
    rows_with_logprobs,
    token_logprobs,
)
from mini_infer_engine.sampling.penalties import Penalties
from mini_infer_engine.sampling.reference import build_sampling, sample
from mini_infer_engine.sampling.token_masks import apply_token_masks


@dataclass(slots=True)
class TorchPassHandle:
    """A launched pass, whose results are in main memory once `done` has happened."""

    rows: list[Row]
    sampling_rows: list[int]
    """Indices of the rows that sample."""
    prepared: PreparedBatch | None = None
    """The batch after drafting, if tokens may be drafted; then `rows` are its rows."""
    features: Tensor | None = None  # [samples, layers * hidden]
    """Hidden states, if a head drafts from them."""
    made: list[list[int]] | None = None
    """The tokens of each of these rows."""
    tokens: Tensor | None = None  # [sampling rows] int64
    requested: list[tuple[int, int]] = field(default_factory=list)
    """For each line of `logprobs`, its row and the number of most likely tokens to report."""
    logprobs: LogprobTensors | None = None
    """Log probabilities of the sampling rows that request them, in order, at each of their draft tokens too."""
    prompt_logprobs: PromptLogprobs | None = None
    embeddings: Embeddings | None = None
    unsampled: tuple[PassInputs, Tensor] | None = None
    """Inputs and logits of a pass that waits for its masks."""
    done: torch.cuda.Event | None = None
    swap_check: SwapCheck | None = None

    def result(self) -> PassResult:
        """Waits for `done` and returns the results by row of the launched batch."""
        if self.done is not None:
            self.done.synchronize()
        result = PassResult([()] * len(self.rows))
        if self.made is not None:
            result.tokens = list(self.made)
        elif self.tokens is not None:
            for row, token in zip(self.sampling_rows, self.tokens.tolist(), strict=True):
                result.tokens[row] = (token,)
        if self.logprobs is not None:
            logprobs = self.logprobs.read([number for _, number in self.requested])
            for (row, _), one in zip(self.requested, logprobs, strict=True):
                of_row = result.logprobs.setdefault(row, [])
                if len(of_row) < len(result.tokens[row]):  # what stands behind a wrong guess is told to nobody
                    of_row.append(one)
        if self.prompt_logprobs is not None:
            result.prompt_logprobs = self.prompt_logprobs.read()
        if self.embeddings is not None:
            result.embeddings = self.embeddings.read()
        if self.swap_check is not None:
            result.swap_faults = self.swap_check.faults()
        return result if self.prepared is None else _in_order(result, self.prepared.places)


class TorchExecutor:
    """The `executor.Executor` in plain torch."""

    default_page_size: int = 16
    page_size_step: int = 16

    def __init__(self, worker: ModelWorker, pool: KVPool, settings: EngineSettings) -> None:
        self.worker, self.pool = worker, pool
        config = speculation_of(settings)
        if config is not None and worker.device.type != "cpu":
            raise ModelError("attention_backend = 'torch' guesses no tokens on a GPU: leave out speculative_method.")
        self.speculation = None if config is None else TorchSpeculation(config, worker, pool, settings.max_num_seqs)
        self.max_speculative_rows = 0 if config is None else settings.max_num_seqs
        self.guess_costs = GuessCosts()
        self.ops = TorchOps(worker.collectives)
        self.attention = torch_backend(worker.model.attention_layers, pool)
        self.compactor = Compactor(pool)
        self.last_tokens = torch.zeros(settings.max_num_seqs, dtype=torch.int64, device=worker.device)
        self.penalties = Penalties(settings.max_num_seqs, worker.config.vocab_size, worker.device)
        self.traffic = None if worker.link.size == 1 else StageTraffic(worker, self.last_tokens)
        self._reports_layers = False
        self.images = image_encoder_of(worker)

    def compile_kernels(self, most_tokens: int, *, defers: bool = False) -> None:
        """Does nothing: torch's operators are compiled."""

    def capture(
        self, *, reports_layers: bool = False, loads: LayerwiseLoad | None = None, defers: bool = False
    ) -> None:
        """Records no passes, and only stores whether they report the progress of their layers."""
        del loads, defers
        self._reports_layers = reports_layers and self.worker.device.type == "cpu"

    def warm_up(self) -> bool:
        """Returns False: nothing is deferred."""
        return False

    def graph_bytes(self) -> int:
        """Returns 0: nothing is captured."""
        return 0

    def refuses(self, request: Request) -> str | None:
        """Returns None: every request can be served."""
        del request
        return None

    def launch(self, batch: Batch) -> TorchPassHandle:
        """Computes a pass; on a CPU it is complete when this returns."""
        with torch.inference_mode():
            self.pool.transfer(batch.transfers)
            self._encode_images(batch)
            if self.traffic is not None and not self.traffic.is_last:
                return self._launch_part(batch, self.traffic)
            report_layers = batch.report_layers if self._reports_layers else None
            loads = batch.layerwise_loads
            prepared = None if self.speculation is None else self.speculation.prepare(batch)
            reads_features = self.speculation is not None and self.speculation.head is not None
            taps = self.worker.model.taps if batch.num_drafts and reads_features else None
            batch = batch if prepared is None else prepared.batch
            reads_prompts = any(row.prompt_targets for row in batch.rows)
            layers = None
            if report_layers is not None:
                layers = CountedLayers()
                report_layers(layers)
            with nullcontext() if taps is None else taps.recording():
                inputs, state = self._forward(batch, every_token=reads_prompts, layers=layers, loads=loads)
            sampling = [index for index, row in enumerate(batch.rows) if row.sampling is not None]
            handle = TorchPassHandle(batch.rows, sampling, prepared, swap_check=self.pool.swap_check)
            if taps is not None:
                handle.features = taps.take()[inputs.sample_rows] if reads_prompts else taps.take()
            if reads_prompts:
                handle.prompt_logprobs = PromptLogprobs.of(batch.rows, state, self._logits)
                state = state.select(inputs.sample_rows)
            if needs_embeddings(batch.rows):
                handle.embeddings = Embeddings.of(batch.rows, state, self.worker.model, self.ops, self.worker.pooler)
            if handle.sampling_rows and batch.waits_for_masks:
                handle.unsampled = inputs, self._logits(state)
            elif handle.sampling_rows:
                self._sample(handle, inputs, self._logits(state), None)
            if self.worker.device.type == "cuda" and handle.unsampled is None:
                handle.done = _recorded_event()
            return handle

    def guesses(self, handle: TorchPassHandle) -> Mapping[int, Sequence[int]]:
        """Returns the draft tokens of a launched pass, by row of the batch."""
        prepared = handle.prepared
        if prepared is None:
            return {}
        return {place: drafts for place, drafts in zip(prepared.places, prepared.drafts, strict=True) if drafts}

    def _launch_part(self, batch: Batch, traffic: StageTraffic) -> TorchPassHandle:
        """Computes a pass on a stage that is not the last: another stage samples."""
        traffic.begin(batch)
        _, state = self._forward(batch, every_token=True, loads=batch.layerwise_loads)
        traffic.hand_on(batch.rows, state.residual)
        done = _recorded_event() if self.worker.device.type == "cuda" else None
        return TorchPassHandle(batch.rows, [], done=done, swap_check=self.pool.swap_check)

    def sample(self, handle: TorchPassHandle, masks: TokenMasks) -> None:
        """Samples a launched pass within its masks; does nothing on a stage that is not the last."""
        if self.traffic is not None and not self.traffic.is_last:
            return
        assert handle.unsampled is not None, "this pass waits for no masks"
        with torch.inference_mode():
            self._sample(handle, *handle.unsampled, masks)
            handle.unsampled = None
            if self.worker.device.type == "cuda":
                handle.done = _recorded_event()

    def logits(self, batch: Batch) -> Tensor:
        """Returns the logits of every token, or the hidden states on a stage that is not the last."""
        with torch.inference_mode():
            self.pool.transfer(batch.transfers)
            self._encode_images(batch)
            state = self._forward(batch, every_token=True)[1]
            if self.traffic is None or self.traffic.is_last:
                return self._logits(state)
            self.traffic.hand_on([], state.residual)
            return state.residual

    def _encode_images(self, batch: Batch) -> None:
        if batch.encoder is not None and self.images is not None:
            self.images.run(batch.encoder)

    def _forward(
        self,
        batch: Batch,
        *,
        every_token: bool,
        layers: CountedLayers | None = None,
        loads: Sequence[LayerwiseLoad] = (),
    ) -> tuple[PassInputs, ResidualState]:
        """Returns the inputs, and the residual state of all tokens or of those that sample."""
        model, traffic = self.worker.model, self.traffic
        inputs = build_inputs(batch, self.pool.spec.page_size, self.pool.null_page, self.worker.device)
        token_ids = inputs.token_ids
        if inputs.all_pending:
            token_ids = self.last_tokens.index_select(0, inputs.pending_slots)
        elif inputs.pending_slots.shape[0]:
            pending = self.last_tokens.index_select(0, inputs.pending_slots)
            token_ids = token_ids.index_copy(0, inputs.pending_tokens, pending)
        if self.images is not None:
            inputs.images = self.images.prepare(batch)
        states = None if self.speculation is None else self.speculation.states
        needs_all = every_token or states is not None or len(inputs.sample_rows) == inputs.num_tokens
        attention: AttentionPass = self.attention.prepare(inputs, None if needs_all else inputs.sample_rows)
        attention = self.compactor.observe(batch.rows, attention)
        attention = LoadedAttention(attention, loads) if loads else attention
        attention = attention if layers is None else MarkedAttention(attention, layers.mark)
        if self.pool.states is not None:
            attention = TorchRecurrentPass(attention, self.pool.states, batch.rows, self.worker.device)
        if traffic is None or traffic.is_first:
            hidden = model.embed(self.ops, token_ids)
        else:
            hidden = model.enter(self.ops, traffic.receive(inputs.num_tokens))
        if (images := inputs.images) is None:
            state: ResidualState = model(self.ops, hidden, attention)
        else:
            state = images.forward(model, self.ops, hidden, attention)
        self.compactor.compact(batch.rows)
        if states is not None:
            states.store(self.ops, inputs.write_pages[0] * self.pool.spec.page_size + inputs.write_offsets)
            if not every_token:
                state = state.select(inputs.sample_rows)
        return inputs, state

    def _logits(self, state: ResidualState) -> Tensor:
        return self.worker.model.logits(self.ops, state)

    def _sample(self, handle: TorchPassHandle, inputs: PassInputs, logits: Tensor, masks: TokenMasks | None) -> None:
        """Applies bias and bans, masks, penalties, temperature and filters, and samples; log probabilities are of raw
        logits.
        """
        rows = sampled_rows(handle.rows)
        slots = [row.slot for row in rows]
        samples = samples_of(handle.rows)
        for row in rows:
            if row.token_ids is not None:
                self.penalties.begin(row)
        scores, device, requested = logits, self.worker.device, rows_with_logprobs(rows)
        if (changes := build_logit_changes(rows, device)) is not None:
            scores = changes.apply(scores, self.last_tokens.index_select(0, inputs.sample_slots))
        if masks is not None:
            if scores is logits and requested:
                scores = logits.clone()
            places = None if handle.prepared is None else handle.prepared.places
            batch_rows = [one.row if places is None else places[one.row] for one in samples]
            apply_token_masks(
                scores, masks, [(row, len(one.guesses)) for row, one in zip(batch_rows, samples, strict=True)]
            )
        scores = self.penalties.applied(scores, slots, [one.guesses for one in samples])
        tokens = sample(scores, build_sampling(rows, self.worker.config.vocab_size, device))
        if handle.prepared is not None and self.speculation is not None:
            limits = {} if masks is None else masks.limits
            handle.made = self.speculation.settle(handle.prepared, tokens.tolist(), handle.features, limits)
            self.penalties.count_made([row.slot for row in handle.rows], handle.made)
            for row, its_tokens in zip(handle.rows, handle.made, strict=True):
                if its_tokens:
                    self.last_tokens[row.slot] = its_tokens[-1]
                    if self.pool.states is not None and len(its_tokens) < row.num_samples:
                        self.pool.states.roll_back(row.slot, len(its_tokens))
        else:
            self.penalties.count(slots, tokens)
            self.last_tokens.index_copy_(0, inputs.sample_slots, tokens)
        if self.traffic is not None:
            self.traffic.return_tokens(handle.rows)
        if requested:
            lines = torch.tensor([index for index, _ in requested], device=device)
            made = token_logprobs(
                logits[lines], tokens[lines], most_of([number for _, number in requested]), named_tokens(rows)
            )
            handle.requested = [(samples[index].row, number) for index, number in requested]
            handle.logprobs = made.on_host()
        handle.tokens = tokens if device.type == "cpu" else _pinned(tokens)


def _in_order(result: PassResult, places: list[int]) -> PassResult:
    """Returns the result with its rows at these places, which they have in the launched batch."""
    tokens: list[Sequence[int]] = [()] * len(places)
    for row, place in enumerate(places):
        tokens[place] = result.tokens[row]
    return PassResult(
        tokens,
        logprobs={places[row]: logprobs for row, logprobs in result.logprobs.items()},
        prompt_logprobs={places[row]: logprobs for row, logprobs in result.prompt_logprobs.items()},
        embeddings={places[row]: vector for row, vector in result.embeddings.items()},
    )


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    event.record()
    return event


def _pinned(tokens: Tensor) -> Tensor:
    on_host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
    return on_host.copy_(tokens, non_blocking=True)
