"""Drafts tokens in plain torch: by a small model, by one that reads the target's hidden states, or by a trained head.

Each draft token is drawn with the noise that will verify it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from mini_infer_engine.core.batch import Batch, Row
from mini_infer_engine.models.hidden_taps import HiddenTaps
from mini_infer_engine.ops.base import ResidualState
from mini_infer_engine.ops.torch_ops import TorchOps
from mini_infer_engine.runtime.attention.backends import torch_backend
from mini_infer_engine.runtime.draft_vocabulary import DraftVocabulary
from mini_infer_engine.runtime.hidden_states import HiddenStates, entry_rows
from mini_infer_engine.runtime.inputs.batch_tensors import build_inputs
from mini_infer_engine.runtime.memory.kv_pool import KVPool
from mini_infer_engine.runtime.worker import ModelWorker
from mini_infer_engine.sampling.reference import build_sampling, sample
from mini_infer_engine.speculation.head import SpeculativeHead


@dataclass(slots=True)
class SlotProgress:
    """The progress of the sequence that runs in a slot."""

    position: int = 0
    """Position of the last token in the text."""
    kv_length: int = 0
    """Tokens in the KV cache before it."""
    output_index: int = 0
    last_token: int = 0
    features: Tensor | None = None  # [layers * hidden], where a head reads them
    """Hidden states of the token before the last one."""
    history: list[int] = field(default_factory=list)
    """Tokens received by `catch_up` or made in passes with drafts: all those before `position`, then the last one."""


class ReadingDraft(Protocol):
    """A draft with keys and values, which reads the text before it guesses."""

    def read(self, rows: list[Row]) -> None:
        """Computes the keys and values of known tokens."""

    def guess(self, rows: Sequence[Row], slots: Sequence[SlotProgress]) -> list[list[int]]:
        """Drafts the next tokens of each row, as many as it asks for, with the noise that will verify them.

        Rows that ask for none are read, too.
        """


class DraftModel:
    """A small model with pages of its own, addressed by the page tables of the model for which it drafts."""

    def __init__(self, worker: ModelWorker, pool: KVPool) -> None:
        spec = worker.model.kv_spec(pool.spec.page_size, worker.dtype)
        self._worker, self._ops = worker, TorchOps()
        self._pool = KVPool(spec, pool.num_pages, worker.device)
        self._attention = torch_backend(worker.model.attention_layers, self._pool)

    def read(self, rows: list[Row]) -> None:
        """Computes the keys and values of known tokens."""
        if rows:
            self._logits(Batch(rows, 0))

    def guess(self, rows: Sequence[Row], slots: Sequence[SlotProgress]) -> list[list[int]]:
        """Drafts the next tokens of each row, as many as it asks for, with the noise that will verify them."""
        guesses: list[list[int]] = [[] for _ in rows]
        for step in range(max(1, *(row.num_drafts or 0 for row in rows))):
            drafting = [index for index, row in enumerate(rows) if step == 0 or (row.num_drafts or 0) > step]
            inputs = [self._input(rows[index], slots[index], guesses[index]) for index in drafting]
            logits = self._logits(Batch(inputs, 0))
            tokens = sample(logits, build_sampling(inputs, self._worker.config.vocab_size, self._worker.device))
            for index, token in zip(drafting, tokens.tolist(), strict=True):
                if rows[index].num_drafts:
                    guesses[index].append(token)
        return guesses

    @staticmethod
    def _input(row: Row, slot: SlotProgress, guesses: list[int]) -> Row:
        """Returns a chunk of the newest token. The first one has the token before it too: if that was a draft token, it
        is unread.
        """
        before = slot.position
        tokens = [guesses[-1]] if guesses else [*slot.history[max(0, before - 1) : before], slot.last_token]
        index = slot.output_index + len(guesses)
        return as_chunk(row, slot.kv_length + len(guesses) + 1 - len(tokens), tokens, index, samples=1)

    def _logits(self, batch: Batch) -> Tensor:
        model, spec = self._worker.model, self._pool.spec
        inputs = build_inputs(batch, spec.page_size, self._pool.null_page, self._worker.device)
        attention = self._attention.prepare(inputs, inputs.sample_rows)
        # A token that its table has not cannot be guessed, but may stand in a prompt.
        token_ids = inputs.token_ids.clamp_(max=model.config.vocab_size - 1)
        state = model(self._ops, model.embed(self._ops, token_ids), attention)
        return model.logits(self._ops, state)


class TorchHiddenDraft:
    """A draft that reads the target's hidden states, with pages of its own under the ids of the target's pages."""

    def __init__(self, worker: ModelWorker, pool: KVPool, states: HiddenStates, most_drafts: int) -> None:
        spec = worker.model.kv_spec(pool.spec.page_size, worker.dtype)
        self._worker, self._ops, self._states, self._model = worker, TorchOps(), states, states.draft
        self._pool = KVPool(spec, pool.num_pages, worker.device)
        self._attention = torch_backend(self._model.attention_layers, self._pool)
        self._most_drafts = most_drafts

    def read(self, rows: list[Row]) -> None:
        """Computes the keys and values of known tokens by the target's hidden states."""
        if rows := entry_rows(rows):
            self._forward(rows, None)

    def guess(self, rows: Sequence[Row], slots: Sequence[SlotProgress]) -> list[list[int]]:
        """Drafts the next tokens of each row: the first by the target's hidden states, the others by the draft's own.

        The first step computes the entries of the newest tokens again: those of accepted draft tokens were made of the
        draft's own hidden states.
        """
        guesses: list[list[int]] = [[] for _ in rows]
        hidden: Tensor | None = None
        drafting = list(range(len(rows)))
        for step in range(max(1, *(row.num_drafts or 0 for row in rows))):
            still = [index for index in drafting if step == 0 or (rows[index].num_drafts or 0) > step]
            if hidden is not None:
                hidden = hidden[[drafting.index(index) for index in still]]
            drafting = still
            inputs = [self._input(rows[index], slots[index], guesses[index]) for index in drafting]
            state = self._forward(entry_rows(inputs), hidden)
            hidden = self._model.own_hidden(self._ops, state).clone()
            logits = self._model.logits(self._ops, state)
            tokens = sample(logits, build_sampling(inputs, self._model.config.vocab_size, self._worker.device))
            for index, token in zip(drafting, tokens.tolist(), strict=True):
                if rows[index].num_drafts:
                    guesses[index].append(token)
        return guesses

    def _input(self, row: Row, slot: SlotProgress, guesses: list[int]) -> Row:
        """Returns a chunk of the newest token; the first one has tokens before it, too."""
        again = min(self._most_drafts + 1, slot.kv_length - 1)
        before = slot.history[max(0, slot.position - again) : slot.position]
        tokens = [guesses[-1]] if guesses else [*before, slot.last_token]
        index = slot.output_index + len(guesses)
        return as_chunk(row, slot.kv_length + len(guesses) + 1 - len(tokens), tokens, index, samples=1)

    def _forward(self, rows: list[Row], hidden: Tensor | None) -> ResidualState:
        """Computes entries, by these hidden states [tokens, width], or by those of the target if None."""
        spec = self._pool.spec
        inputs = build_inputs(Batch(rows, 0), spec.page_size, self._pool.null_page, self._worker.device)
        # A token that the vocabulary has not cannot be guessed, but may stand in a prompt.
        inputs.token_ids.clamp_(max=self._model.config.vocab_size - 1)
        if hidden is None:
            kv_index = inputs.write_pages[0] * spec.page_size + inputs.write_offsets
            x = self._states.embed(self._ops, inputs.token_ids, kv_index)
        else:
            x = self._model.combine(self._ops, self._model.embed(self._ops, inputs.token_ids), hidden)
        state: ResidualState = self._model(self._ops, x, self._attention.prepare(inputs, inputs.sample_rows))
        return state


class HeadModel:
    """A speculative head over the model's own embeddings and output matrix."""

    def __init__(self, head: SpeculativeHead, worker: ModelWorker, max_rows: int) -> None:
        self._head, self._worker, self._ops = head, worker, TorchOps()
        self._vocabulary = DraftVocabulary(worker.model, head.token_ids, max_rows, worker.dtype)
        worker.model.taps = HiddenTaps(head.shape.layers, always=False)

    def guess(self, rows: Sequence[Row], slots: Sequence[SlotProgress]) -> list[list[int]]:
        """Drafts the next tokens of each row as a chain from the hidden states of the token before the last one."""
        guesses: list[list[int]] = [[] for _ in rows]
        model, device = self._worker.model, self._worker.device
        state = self._head.begin(torch.stack([slot.features for slot in slots if slot.features is not None]))
        newest = torch.tensor([slot.last_token for slot in slots], device=device)
        for step in range(max(row.num_drafts or 0 for row in rows)):
            state, hidden = self._head.step(state, model.embed(self._ops, newest))
            logits = self._vocabulary.logits(self._ops, hidden)
            drafting = [
                as_chunk(row, 0, [0], slot.output_index + step, 1) for row, slot in zip(rows, slots, strict=True)
            ]
            newest = sample(logits, build_sampling(drafting, self._worker.config.vocab_size, device))
            for row, own, token in zip(rows, guesses, newest.tolist(), strict=True):
                if len(own) < (row.num_drafts or 0):
                    own.append(token)
        return guesses


def as_chunk(row: Row, start: int, tokens: list[int], output_index: int, samples: int) -> Row:
    """Returns the row as a chunk of known tokens."""
    changes = {"start": start, "count": len(tokens), "token_ids": tokens, "output_index": output_index}
    return msgspec.structs.replace(row, **changes, num_samples=samples)
