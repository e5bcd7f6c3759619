"""Logits to tokens on a GPU: one buffer where every pass leaves its logits, and the sampling that reads it.

Rows with nothing but temperature and filters are sampled by CUDA graphs. Where a row has more (bias, bans, penalties)
the same stages run kernel by kernel; log probabilities come after either. Every stage knows slots, none knows a forward
pass.
"""

from bisect import bisect_left
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
from mini_infer_engine.runtime.cuda.graphs import record
from mini_infer_engine.runtime.cuda.logprobs import CudaLogprobs
from mini_infer_engine.runtime.embeddings import Embeddings
from mini_infer_engine.runtime.inputs.host_staging import PinnedStaging
from mini_infer_engine.runtime.inputs.mask_staging import MaskStaging
from mini_infer_engine.runtime.prompt_logprobs import PromptLogprobs
from mini_infer_engine.sampling.logit_changes import build_logit_changes
from mini_infer_engine.sampling.logprobs import LogprobTensors, PackedLogprobs
from mini_infer_engine.sampling.penalties import Penalties

_UPLOADS_IN_FLIGHT = 4
"""Two passes of two parts each: decode rows by one graph, prompt chunks by another."""


@dataclass(frozen=True, slots=True)
class SpeculativePart:
    """Rows with guesses of a launched pass."""

    indices: list[int]
    """In their batch."""
    results: Tensor  # [rows, queries + 1] int64, in main memory: how many tokens each has made, and the tokens

    def read(self, result: PassResult) -> None:
        """Put the tokens where they belong, once the pass has run."""
        for index, (count, *tokens) in zip(self.indices, self.results.tolist(), strict=True):
            result.tokens[index] = tokens[:count]


@dataclass(frozen=True, slots=True)
class GuessedPart:
    """Rows whose guesses are made, and whose logits are on their way."""

    rows: list[Row]
    indices: list[int]
    """In their batch."""
    drafts: int
    """Of each row."""
    guesses: Tensor | None  # [rows, drafts] int32, in main memory once `known` has happened
    """Where masks depend on them."""
    known: Any
    """A torch.cuda.Event, where there are guesses to be read."""

    def read(self) -> dict[int, list[int]]:
        """By row of the batch, once the guesses are made; -1 where there is none."""
        assert self.guesses is not None
        self.known.synchronize()
        pairs = zip(self.rows, self.indices, self.guesses.tolist(), strict=True)
        return {index: tokens[: row.num_drafts] for row, index, tokens in pairs if row.num_drafts}


class CudaPassHandle:
    """A launched pass: the sampling kernel writes its tokens to the host, so no copy stands between two passes."""

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

        A row with guesses is there once for each of its positions.
        """
        self.prompt_logprobs: PromptLogprobs | None = None
        self.embeddings: Embeddings | None = None
        self.held: list[HeldPart] = []
        """Parts that wait for their masks."""
        self.guessed: GuessedPart | None = None
        """Rows with guesses that wait for theirs."""
        self.done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's

    def result(self) -> PassResult:
        """See `PassHandle.result`."""
        self.done.synchronize()
        tokens = self._on_host.flatten().numpy().data
        result = PassResult([()] * self._num_rows)
        for row, place in self._places:
            result.tokens[row] = (tokens[place],)
        if self.speculative is not None:
            self.speculative.read(result)
        for rows, tensors in self.logprobs:
            told = tensors.read([number for _, number in rows])
            for (row, _), one in zip(rows, told, strict=True):
                of_row = result.logprobs.setdefault(row, [])
                if len(of_row) < len(result.tokens[row]):  # what stands behind a wrong guess is told to nobody
                    of_row.append(one)
        if self.prompt_logprobs is not None:
            result.prompt_logprobs = self.prompt_logprobs.read()
        if self.embeddings is not None:
            result.embeddings = self.embeddings.read()
        return result


@dataclass(frozen=True, slots=True)
class HeldPart:
    """A part of a pass that has its logits and waits for its masks."""

    rows: list[Row]
    indices: Sequence[int]
    """Of `rows` in their batch."""
    logits: Tensor  # [rows, vocab]
    slots: Tensor  # [rows] int32
    is_loaded: bool
    """It is what was loaded last, so that graphs can sample it."""


class CudaSampling:
    """Rows [0, n) of `logits` are those of the slots loaded last."""

    def __init__(
        self,
        state: DeviceBatchState,
        vocab_size: int,
        dtype: torch.dtype,
        buckets: list[int],
        most_rows: int,
        kernels: KernelContext,
    ) -> None:
        """`buckets`: numbers of rows with graphs, the last for all slots; `most_rows` of a pass, with its padding."""
        device = state.device
        self.state = state
        self.buckets = buckets
        self._kernels = kernels
        self.logits = torch.zeros((max(buckets[-1], most_rows), vocab_size), dtype=dtype, device=device)
        self.slots = torch.full((buckets[-1],), state.padding_slot, dtype=torch.int32, device=device)
        # One slot more for the padded rows of graphs, which have no penalties.
        self.penalties = Penalties(state.padding_slot + 1, vocab_size, device)
        self._params: list[SamplingParams | None] = [None] * state.padding_slot
        """Of what runs in each slot; None where penalties count its tokens, which then are told anew."""
        self.logprobs = CudaLogprobs(len(self.logits), device)
        self._biased_slots: set[int] = set()
        """Slots whose request has biases, bans or a list of allowed tokens."""
        self._staging = PinnedStaging(self.slots, _UPLOADS_IN_FLIGHT)
        self._loaded: tuple[int, list[int]] = (0, [])
        self._graphs: dict[int, dict[bool, torch.cuda.CUDAGraph]] = {}
        self._masks = MaskStaging(buckets[-1], _UPLOADS_IN_FLIGHT, device)

    def bucket(self, rows: int) -> int:
        """The number of rows that the graphs for so many rows have."""
        return self.buckets[bisect_left(self.buckets, rows)]

    def begin(self, rows: list[Row], num_decodes: int) -> CudaPassHandle:
        """The handle of a pass, after the slots of all rows but the first `num_decodes` have the rows' parameters."""
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
        """Tell the device whose logits a pass is about to leave; rows that do not sample count as padding."""
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

    def capture(self, bucket: int, memory: Any) -> None:
        """Record sampling of `bucket` rows, with and without filters."""
        logits, slots = self.logits[:bucket], self.slots[:bucket]
        self._graphs[bucket] = {
            filtered: record(partial(self.sample, logits, slots, filtered=filtered), memory)
            for filtered in (False, True)
        }

    def run(self, rows: list[Row], indices: Sequence[int], handle: CudaPassHandle) -> None:
        """Sample the rows that were loaded, which have these indices in their batch."""
        slots = self._loaded[1]
        if any(slot != self.state.padding_slot for slot in slots):
            self._sample_part(self._loaded_part(rows, indices), slots, None, handle)

    def hold(self, rows: list[Row], indices: Sequence[int], *, is_last: bool) -> HeldPart:
        """What `run_held` needs of the rows that were loaded; unless it `is_last`, another forward overwrites them."""
        part = self._loaded_part(rows, indices)
        if is_last:
            return part
        return HeldPart(rows, indices, part.logits.clone(), part.slots.clone(), is_loaded=False)

    def _loaded_part(self, rows: list[Row], indices: Sequence[int]) -> HeldPart:
        return HeldPart(rows, indices, self.logits[: len(rows)], self.slots[: len(rows)], is_loaded=True)

    def run_held(self, part: HeldPart, masks: TokenMasks, handle: CudaPassHandle) -> None:
        """Sample a part whose masks have come; by a graph where its rows have nothing more."""
        slots = [row.slot for row in part.rows if row.sampling is not None]
        if not slots:
            return
        lines = {(index, 0): line for line, index in enumerate(part.indices)}
        self._sample_part(part, slots, self._masks.packed(masks, lines), handle)

    def _sample_part(
        self, part: HeldPart, slots: list[int], packed_masks: Tensor | None, handle: CudaPassHandle
    ) -> None:
        """Log probabilities are those of the raw logits, which masks and suppressed tokens are written over."""
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
        """Filters and choice, kernel by kernel; the slots advance."""
        sample(
            logits,
            slots,
            self.state.state,
            workspace=self._kernels.workspace,
            programs=self._kernels.policy.sample_programs,
            filtered=filtered,
        )

    def are_biased(self, slots: list[int]) -> bool:
        """Whether what runs in some of these slots has biases, bans or a list of allowed tokens."""
        return bool(self._biased_slots) and not self._biased_slots.isdisjoint(slots)

    def _run_stages(self, part: HeldPart, slots: list[int], packed_masks: Tensor | None, *, filtered: bool) -> None:
        """Bias and bans, masks, penalties, filters and choice, kernel by kernel; `slots` of the rows that sample."""
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
