"""Speculation for the executor in plain torch: tracks each slot, drafts tokens for it, and verifies them.

Every position of a draft is sampled as a decode of its own would be, with the noise of its output index. A draft token
is accepted if it equals the token that was sampled there; the first that does not ends the row. So the text is that of
an engine without speculation, token for token, greedy or sampled, whatever drafted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

import msgspec
from torch import Tensor

from mini_infer_engine.config.options.speculation import SpeculationConfig
from mini_infer_engine.core.bans import completed_bans, longest_before
from mini_infer_engine.core.batch import Batch, Row
from mini_infer_engine.core.request import SamplingParams
from mini_infer_engine.runtime.cpu.drafts import (
    DraftModel,
    HeadModel,
    ReadingDraft,
    SlotProgress,
    TorchHiddenDraft,
    as_chunk,
)
from mini_infer_engine.runtime.hidden_states import HiddenStates
from mini_infer_engine.runtime.memory.kv_pool import KVPool
from mini_infer_engine.runtime.worker import ModelWorker
from mini_infer_engine.speculation.ngram import look_up


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A batch rewritten with true positions, now that earlier draft tokens are accepted or rejected."""

    batch: Batch
    """Rows with draft tokens are chunks in this batch, with their tokens, and sample at each of them."""
    places: list[int]
    """Index of each of its rows in the batch that was launched."""
    drafts: list[list[int]]
    """Draft tokens of each row."""


class TorchSpeculation:
    """The speculation of one executor."""

    def __init__(self, config: SpeculationConfig, worker: ModelWorker, pool: KVPool, num_slots: int) -> None:
        self._slots = [SlotProgress() for _ in range(num_slots)]
        self._states = pool.states
        self.states = HiddenStates.of(None if worker.draft is None else worker.draft.model, pool)
        """The hidden states that the draft reads; None if it reads none."""
        self._draft: ReadingDraft | None = None
        if worker.draft is not None and self.states is not None:
            self._draft = TorchHiddenDraft(worker.draft, pool, self.states, config.num_tokens)
        elif worker.draft is not None:
            self._draft = DraftModel(worker.draft, pool)
        self._vocab_size = worker.config.vocab_size
        self.head = None if worker.head is None else HeadModel(worker.head, worker, num_slots)
        self._look_up = partial(look_up, longest=config.lookup_max, shortest=config.lookup_min)

    def _is_in_vocabulary(self, token: int) -> bool:
        """Returns True if the model has the token: a draft's table may have more rows."""
        return token < self._vocab_size

    def prepare(self, batch: Batch) -> PreparedBatch:
        """Reads known tokens, drafts, and returns a batch with true positions: decodes, then rows with drafts, then
        prompts.
        """
        for row in batch.catch_up:
            assert row.token_ids is not None
            self._slots[row.slot].history[row.position :] = row.token_ids
        if self._draft is not None:
            self._draft.read(batch.catch_up)
        guesses = self._guess(batch)
        plain, guessed = list[tuple[int, Row]](), list[tuple[int, Row]]()
        for place, row in enumerate(batch.rows[: batch.num_decodes]):
            slot, drafts = self._slots[row.slot], guesses.get(place, [])
            if drafts:
                chunk = as_chunk(row, slot.kv_length, [slot.last_token, *drafts], slot.output_index, len(drafts) + 1)
                chunk = msgspec.structs.replace(chunk, known_token_ids=_tail(row, slot))
                if self._states is not None:
                    chunk.checkpoints = self._states.draft_checkpoints(row.slot, len(drafts))
                guessed.append((place, chunk))
            else:
                plain.append((place, _true_row(row, slot)))
        prompts = list(enumerate(batch.rows))[batch.num_decodes :]
        places, rows = zip(*plain, *guessed, *prompts, strict=True)
        laid_out = Batch(list(rows), len(plain), waits_for_masks=batch.waits_for_masks)
        return PreparedBatch(laid_out, list(places), [guesses.get(place, []) for place in places])

    def _guess(self, batch: Batch) -> dict[int, list[int]]:
        """Returns draft tokens by place in the batch."""
        reads = self._draft is not None
        drafting = [place for place, row in enumerate(batch.rows) if row.num_drafts or (reads and row.num_drafts == 0)]
        if self.head is not None:
            drafting = [place for place in drafting if self._slots[batch.rows[place].slot].features is not None]
        rows = [batch.rows[place] for place in drafting]
        slots = [self._slots[row.slot] for row in rows]
        if not rows:
            return {}
        if self._draft is not None:
            guessed = [list(takewhile(self._is_in_vocabulary, tokens)) for tokens in self._draft.guess(rows, slots)]
            return dict(zip(drafting, guessed, strict=True))
        if self.head is not None:
            return dict(zip(drafting, self.head.guess(rows, slots), strict=True))
        found = [
            self._look_up([*slot.history[: slot.position], slot.last_token], row.num_drafts or 0)
            for row, slot in zip(rows, slots, strict=True)
        ]
        return dict(zip(drafting, found, strict=True))

    def settle(
        self, prepared: PreparedBatch, sampled: list[int], features: Tensor | None, limits: Mapping[int, int]
    ) -> list[list[int]]:
        """Returns the tokens that each row of the prepared batch has made, from the tokens sampled at all of its
        positions.

        features [positions, layers * hidden] are the hidden states there, if a head reads them. `limits` has the number
        of draft tokens that may be accepted, for some rows of the launched batch.
        """
        made: list[list[int]] = []
        at = 0
        for row, place, guesses in zip(prepared.batch.rows, prepared.places, prepared.drafts, strict=True):
            drafts = guesses[: limits.get(place)]
            if row.sampling is None:
                made.append([])
                continue
            tokens = right_tokens(drafts, sampled[at : at + row.num_samples][: len(drafts) + 1])
            slot = self._slots[row.slot]
            slot.features = None if features is None else features[at + len(tokens) - 1]
            at += row.num_samples
            if row.num_drafts is not None:
                slot.history[slot.position :] = [slot.last_token, *tokens]
            slot.kv_length = row.start + row.count - row.num_samples + len(tokens)
            slot.position = slot.kv_length + row.position_offset
            if row.compaction is not None:  # the offset of later rows has what was evicted
                slot.kv_length = row.compaction.num_kept
            slot.output_index, slot.last_token = row.output_index + len(tokens), tokens[-1]
            made.append(tokens)
        return made


def right_tokens(drafts: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """Returns the sampled tokens up to the first that differs from the draft: those after it depend on the rejected
    token.
    """
    for place, draft in enumerate(drafts):
        if sampled[place] != draft:
            return list(sampled[: place + 1])
    return list(sampled)


def _true_row(row: Row, slot: SlotProgress) -> Row:
    """Returns a decode row with the true position of its sequence."""
    assert row.sampling is not None
    suppressed = row.suppressed_token_ids if slot.output_index < row.sampling.min_tokens else ()
    true = msgspec.structs.replace(
        row, start=slot.kv_length, output_index=slot.output_index, count=1, suppressed_token_ids=suppressed
    )
    if row.num_drafts is not None:
        true.banned = _banned(row.sampling, [*_tail(row, slot), slot.last_token])
    return true


def _tail(row: Row, slot: SlotProgress) -> list[int]:
    """Returns the cached tokens that determine, with those after them, which tokens would complete one of the row's bad
    words.
    """
    assert row.sampling is not None
    count = longest_before(row.sampling.bad_words_token_ids)
    return slot.history[max(0, slot.position - count) : slot.position] if count else []


def _banned(sampling: SamplingParams, tokens: Sequence[int]) -> list[tuple[int | None, int]]:
    return [(None, token) for token in completed_bans(sampling.bad_words_token_ids, tokens)]


def sampled_rows(rows: Sequence[Row]) -> list[Row]:
    """Returns one row for each sample, as if each were a decode, with the fields that sampling reads."""
    single: list[Row] = []
    for row in rows:
        if row.sampling is not None and row.num_samples == 1:
            single.append(row)
        elif row.sampling is not None:
            for place in range(row.num_samples):
                index = row.output_index + place
                suppressed = row.suppressed_token_ids if index < row.sampling.min_tokens else ()
                one = msgspec.structs.replace(
                    row, token_ids=None, output_index=index, suppressed_token_ids=suppressed, known_token_ids=()
                )
                one.banned = _banned(row.sampling, [*row.known_token_ids, *(row.token_ids or ())[: place + 1]])
                single.append(one)
    return single


@dataclass(frozen=True, slots=True)
class Sample:
    """The place of one of the samples of a pass."""

    row: int
    """Index of its row in the pass."""
    guesses: Sequence[int]
    """Draft tokens of the row that stand before this sample."""


def samples_of(rows: Sequence[Row]) -> list[Sample]:
    """Returns the place of each of `sampled_rows`."""
    return [
        Sample(index, () if row.num_samples == 1 else (row.token_ids or ())[1 : place + 1])
        for index, row in enumerate(rows)
        if row.sampling is not None
        for place in range(row.num_samples)
    ]
