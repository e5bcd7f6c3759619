"""Samples tokens from logits on a GPU, in one buffer where every pass leaves its logits.

Rows with nothing but temperature and filters are sampled by CUDA graphs. If a row has more (bias, bans, penalties) the
same stages run kernel by kernel; log probabilities come after either. Every stage knows slots, none knows a forward
pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mini_infer_engine.core.batch import Row, TokenMasks
from mini_infer_engine.core.request import SamplingParams
from mini_infer_engine.core.result import PassResult
from mini_infer_engine.kernels.context import KernelContext
from mini_infer_engine.kernels.sampling.penalise import count_sampled, penalised
from mini_infer_engine.kernels.sampling.sample import sample
from mini_infer_engine.kernels.sampling.token_mask import apply_token_masks
from mini_infer_engine.runtime.cuda.device_state import DeviceBatchState
from mini_infer_engine.runtime.cuda.graph_sizes import GraphSizes
from mini_infer_engine.runtime.cuda.graphs import GraphMemory, record
from mini_infer_engine.runtime.cuda.logprobs import CudaLogprobs
from mini_infer_engine.runtime.embeddings import Embeddings
from mini_infer_engine.runtime.inputs.host_staging import PinnedStaging
from mini_infer_engine.runtime.inputs.mask_staging import MaskStaging
from mini_infer_engine.runtime.memory.swap_digests import SwapCheck
from mini_infer_engine.runtime.prompt_logprobs import PromptLogprobs
from mini_infer_engine.sampling.logit_changes import build_logit_changes
from mini_infer_engine.sampling.logprobs import LogprobTensors, PackedLogprobs
from mini_infer_engine.sampling.penalties import Penalties

_UPLOADS_IN_FLIGHT = 4
"""Uploads of two passes with two parts each: decode rows by one graph, prompt chunks by another."""


@dataclass(frozen=True, slots=True)
class SpeculativePart:
    """Rows with drafts of a launched pass."""

    indices: list[int]
    """Index of each row in its batch."""
    results: Tensor  # [rows, queries + 1] int64, in main memory: how many tokens each has made, and the tokens

    def read(self, result: PassResult) -> None:
        """Stores the tokens in the result of the batch. The pass must have run."""
        for index, (count, *tokens) in zip(self.indices, self.results.tolist(), strict=True):
            result.tokens[index] = tokens[:count]


@dataclass(frozen=True, slots=True)
class GuessedPart:
    """Rows whose draft tokens are made, and whose logits are being computed."""

    rows: list[Row]
    indices: list[int]
    """Index of each row in its batch."""
    drafts: int
    """Draft tokens of each row."""
    guesses: Tensor | None  # [rows, drafts] int32, in main memory once `known` has happened
    """The draft tokens, if masks depend on them."""
    known: Any
    """A torch.cuda.Event, if there are draft tokens to be read."""

    def read(self) -> dict[int, list[int]]:
        """Waits for the draft tokens and returns them by row of the batch; -1 where there is none."""
        assert self.guesses is not None
        self.known.synchronize()
        pairs = zip(self.rows, self.indices, self.guesses.tolist(), strict=True)
        return {index: tokens[: row.num_drafts] for row, index, tokens in pairs if row.num_drafts}


class CudaPassHandle:
    """A launched pass. The sampling kernel writes its tokens to main memory, so that no copy delays the next pass."""

    def __init__(self, rows: list[Row], state: DeviceBatchState) -> None:
        self._places = [
            (index, state.next_place(row))
            for index, row in enumerate(rows)
            if row.sampling is not None and row.num_drafts is None
        ]
        self.rows = rows
        self._num_rows, self._on_host = len(rows), state.state.on_host
        self.speculative: SpeculativePart | None = None
        self.logprobs: list[tuple[list[tuple[int, int]], LogprobTensors | PackedLogprobs]] = []
        """For each part of the pass, (row of the batch, number of most likely tokens) and their tensors.

        A row with drafts is there once for each of its positions.
        """
        self.prompt_logprobs: PromptLogprobs | None = None
        self.embeddings: Embeddings | None = None
        self.deferred: list[DeferredPart] = []
        """Parts that wait for their masks."""
        self.guessed: GuessedPart | None = None
        """Rows with drafts that wait for their masks."""
        self.swap_check: SwapCheck | None = None
        self.done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's

    def result(self) -> PassResult:
        """Waits for `done` and returns the results by row of the batch."""
        self.done.synchronize()
        tokens = self._on_host.flatten().numpy().data
        result = PassResult([()] * self._num_rows)
        for row, place in self._places:
            result.tokens[row] = (tokens[place],)
        if self.speculative is not None:
            self.speculative.read(result)
        for rows, tensors in self.logprobs:
            logprobs = tensors.read([number for _, number in rows])
            for (row, _), one in zip(rows, logprobs, strict=True):
                of_row = result.logprobs.setdefault(row, [])
                if len(of_row) < len(result.tokens[row]):  # what stands behind a wrong guess is told to nobody
                    of_row.append(one)
        if self.prompt_logprobs is not None:
            result.prompt_logprobs = self.prompt_logprobs.read()
        if self.embeddings is not None:
            result.embeddings = self.embeddings.read()
        if self.swap_check is not None:
            result.swap_faults = self.swap_check.faults()
        return result


@dataclass(frozen=True, slots=True)
class DeferredPart:
    """A part of a pass that has its logits and waits for its masks."""

    rows: list[Row]
    indices: Sequence[int]
    """Indices of `rows` in their batch."""
    logits: Tensor  # [rows, vocab]
    slots: Tensor  # [rows] int32
    is_loaded: bool
    """True if its rows are those loaded last, so that graphs can sample it."""


class CudaSampling:
    """Samples from `logits`, whose rows [0, n) are those of the slots loaded last."""

    def __init__(
        self,
        state: DeviceBatchState,
        vocab_size: int,
        dtype: torch.dtype,
        buckets: list[int],
        most_rows: int,
        kernels: KernelContext,
    ) -> None:
        """Allocates buffers. `buckets` are numbers of rows with graphs, the last for all slots; `most_rows` includes
        padding.
        """
        device = state.device
        self.state = state
        self.buckets = buckets
        self._kernels = kernels
        self.logits = torch.zeros((max(buckets[-1], most_rows), vocab_size), dtype=dtype, device=device)
        self.slots = torch.full((buckets[-1],), state.padding_slot, dtype=torch.int32, device=device)
        # One slot more for the padded rows of graphs, which have no penalties.
        self.penalties = Penalties(state.padding_slot + 1, vocab_size, device)
        self._params: list[SamplingParams | None] = [None] * state.padding_slot
        """Parameters of the request in each slot. None if penalties count its tokens, which then must be sent anew."""
        self.logprobs = CudaLogprobs(len(self.logits), device)
        self._biased_slots: set[int] = set()
        """Slots whose request has biases, bans or a list of allowed tokens."""
        self._staging = PinnedStaging(self.slots, _UPLOADS_IN_FLIGHT)
        self._loaded: tuple[int, list[int]] = (0, [])
        self._graphs: dict[int, dict[bool, torch.cuda.CUDAGraph]] = {}
        self.sizes = GraphSizes(buckets)
        self._masks = MaskStaging(buckets[-1], _UPLOADS_IN_FLIGHT, device)

    def bucket(self, rows: int) -> int:
        """Returns the number of rows of the captured graphs that fit so many rows."""
        self.sizes.requested(rows)
        return self.sizes.fitting(rows)

    def begin(self, rows: list[Row], num_decodes: int) -> CudaPassHandle:
        """Stores the sampling parameters of all rows but the first `num_decodes` in their slots. Returns the pass's
        handle.
        """
        for row in rows[num_decodes:]:
            self._begin_slot(row)
        return CudaPassHandle(rows, self.state)

    def _begin_slot(self, row: Row) -> None:
        params = row.sampling
        if params is not None and params is self._params[row.slot]:
            return  # the same request goes on, be it as another of its beams
        self._params[row.slot] = None if params is None or params.has_penalties else params
        self.penalties.begin(row)
        self.logprobs.begin(row)
        if params is not None and params.changes_logits:
            self._biased_slots.add(row.slot)
        else:
            self._biased_slots.discard(row.slot)

    def load(self, rows: list[Row]) -> None:
        """Sends the slots whose logits a pass is about to compute; rows that do not sample count as padding."""
        padding = self.state.padding_slot
        slots = [padding if row.sampling is None else row.slot for row in rows]
        loading = (self.bucket(len(rows)), slots)
        if loading == self._loaded:
            return
        array = self._staging.arrays[self._staging.begin()]
        array[:] = padding
        array[: len(slots)] = slots
        self._staging.send()
        self._loaded = loading

    def capture(self, bucket: int, memory: GraphMemory) -> None:
        """Records the sampling of `bucket` rows, with and without filters."""
        logits, slots = self.logits[:bucket], self.slots[:bucket]
        self._graphs[bucket] = {
            filtered: record(partial(self.sample, logits, slots, filtered=filtered), memory)
            for filtered in (False, True)
        }
        self.sizes.captured(bucket)

    def run(self, rows: list[Row], indices: Sequence[int], handle: CudaPassHandle) -> None:
        """Samples the rows that were loaded, which have these indices in their batch."""
        slots = self._loaded[1]
        if any(slot != self.state.padding_slot for slot in slots):
            self._sample_part(self._loaded_part(rows, indices), slots, None, handle)

    def defer(self, rows: list[Row], indices: Sequence[int], *, is_last: bool) -> DeferredPart:
        """Returns the loaded rows as a part for `run_deferred`. Unless it `is_last`, logits are copied: another forward
        comes.
        """
        part = self._loaded_part(rows, indices)
        if is_last:
            return part
        return DeferredPart(rows, indices, part.logits.clone(), part.slots.clone(), is_loaded=False)

    def _loaded_part(self, rows: list[Row], indices: Sequence[int]) -> DeferredPart:
        return DeferredPart(rows, indices, self.logits[: len(rows)], self.slots[: len(rows)], is_loaded=True)

    def run_deferred(self, part: DeferredPart, masks: TokenMasks, handle: CudaPassHandle) -> None:
        """Samples a part whose masks have come, by a graph if its rows need nothing more."""
        slots = [row.slot for row in part.rows if row.sampling is not None]
        if not slots:
            return
        lines = {(index, 0): line for line, index in enumerate(part.indices)}
        self._sample_part(part, slots, self._masks.packed(masks, lines), handle)

    def _sample_part(
        self, part: DeferredPart, slots: list[int], packed_masks: Tensor | None, handle: CudaPassHandle
    ) -> None:
        """Samples a part. Log probabilities are of raw logits, which masks and suppressed tokens overwrite."""
        requested = self.logprobs.requested(part.rows, part.logits, are_masked=packed_masks is not None)
        filtered, bucket = self.state.has_filters(slots), self._loaded[0]
        if self.are_biased(slots) or self.penalties.concern(slots):
            self._run_stages(part, slots, packed_masks, filtered=filtered)
        else:
            if packed_masks is not None:
                apply_token_masks(part.logits, packed_masks)
            if part.is_loaded and bucket in self._graphs:
                self._graphs[bucket][filtered].replay()
            else:
                self.sample(part.logits, part.slots, filtered=filtered)
        if requested is not None:
            made = requested.compute(part.slots, self.state.state.last_tokens)
            rows = [(part.indices[row], number) for row, number in requested.rows]
            handle.logprobs.append((rows, made.on_host()))

    def sample(self, logits: Tensor, slots: Tensor, *, filtered: bool) -> None:
        """Filters and samples kernel by kernel, and advances the slots."""
        sample(
            logits,
            slots,
            self.state.state,
            workspace=self._kernels.workspace,
            programs=self._kernels.policy.sample_programs,
            filtered=filtered,
        )

    def are_biased(self, slots: list[int]) -> bool:
        """Returns True if some of these slots have biases, bans or a list of allowed tokens."""
        return bool(self._biased_slots) and not self._biased_slots.isdisjoint(slots)

    def _run_stages(self, part: DeferredPart, slots: list[int], packed_masks: Tensor | None, *, filtered: bool) -> None:
        """Applies bias and bans, masks, penalties and filters, and samples, kernel by kernel; `slots` are those that
        sample.
        """
        scores, state = part.logits, self.state.state
        changes = build_logit_changes(part.rows, self.state.device) if self.are_biased(slots) else None
        if changes is not None:
            scores = changes.apply(scores, state.last_tokens.index_select(0, part.slots))
        if packed_masks is not None:
            apply_token_masks(scores, packed_masks)
        penalises = self.penalties.concern(slots)
        if penalises:
            scores = penalised(scores, part.slots, self.penalties)
        self.sample(scores, part.slots, filtered=filtered)
        if penalises:
            count_sampled(part.slots, state, self.penalties)
