"""Applies penalties for repeated tokens to logits, by the tokens and penalties of every slot.

Meaning and order are vLLM's: the repetition penalty considers prompt and output (Keskar et al., arXiv:1909.05858),
presence and frequency penalties the output alone (OpenAI). Slots without penalties cost no time.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from mini_infer_engine.core.batch import Row
from mini_infer_engine.device import to_device
from mini_infer_engine.kernels.sampling.penalty_state import MAX_COUNT

NEUTRAL = (1.0, 0.0, 0.0)


class Penalties:
    """Token counts and penalties of each slot. Passes call `begin`, `applied`, then `count`."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        # [slots, vocab] int16: twice the times that the output has the token, and one more if the prompt has it
        self.counts = torch.zeros((num_slots, vocab_size), dtype=torch.int16, device=device)
        # [slots, 3] fp32: repetition, presence, frequency
        self.strengths = torch.tensor([NEUTRAL] * num_slots, dtype=torch.float32, device=device)
        self._slots: set[int] = set()

    def begin(self, row: Row) -> None:
        """Stores penalties and known tokens of a row that begins in its slot."""
        params = row.sampling
        if params is not None and params.has_penalties:
            token_ids = np.asarray(row.known_token_ids, dtype=np.int64)
            prompt = len(token_ids) - row.output_index
            counts = np.zeros(self.counts.shape[1], dtype=np.int16)
            counts[token_ids[:prompt]] = 1
            np.add.at(counts, token_ids[prompt:], 2)
            self.counts[row.slot].copy_(to_device(counts, self.counts.device))
            self._set_strengths(
                row.slot, (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
            )
            self._slots.add(row.slot)
        elif row.slot in self._slots:
            self._set_strengths(row.slot, NEUTRAL)
            self._slots.remove(row.slot)

    def concern(self, slots: Iterable[int]) -> bool:
        """Returns True if one of these slots has penalties."""
        return bool(self._slots) and not self._slots.isdisjoint(slots)

    def applied(self, logits: Tensor, slots: Sequence[int], guesses: Sequence[Sequence[int]] = ()) -> Tensor:
        """Returns logits [rows, vocab] of these slots after penalties: in fp32, or unchanged if no slot has penalties.

        `guesses` has each row's draft tokens, which its slot has not counted; empty if no row has any.
        """
        if not self.concern(slots):
            return logits
        chosen = to_device(np.array(slots, dtype=np.int64), logits.device)
        logits, counts = logits.float(), self.counts.index_select(0, chosen)
        if pairs := [(row, token) for row, tokens in enumerate(guesses) for token in tokens]:
            places = to_device(np.array(pairs, dtype=np.int64).T.copy(), logits.device).unbind(0)
            counts = counts.int().index_put_(places, counts.new_tensor(2).int(), accumulate=True)
        repetition, presence, frequency = self.strengths.index_select(0, chosen)[:, :, None].unbind(1)
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        made = (counts >> 1).float()
        return torch.where(counts > 0, repeated, logits) - (presence * (made > 0) + frequency * made)

    def count(self, slots: Sequence[int], tokens: Tensor) -> None:
        """Counts tokens [rows] int64 that were sampled in these slots."""
        if self.concern(slots):
            places = (to_device(np.array(slots, dtype=np.int64), tokens.device), tokens)
            counts = self.counts[places]
            self.counts[places] = torch.where(counts < MAX_COUNT, counts + 2, counts)

    def count_made(self, slots: Sequence[int], made: Sequence[Sequence[int]]) -> None:
        """Counts several tokens for each of these slots."""
        if not self.concern(slots):
            return
        for place in range(max(map(len, made), default=0)):
            longer = [index for index, tokens in enumerate(made) if len(tokens) > place]
            tokens = np.array([made[index][place] for index in longer], dtype=np.int64)
            self.count([slots[index] for index in longer], to_device(tokens, self.counts.device))

    def _set_strengths(self, slot: int, strengths: tuple[float, ...]) -> None:
        self.strengths[slot].copy_(to_device(np.array(strengths, dtype=np.float32), self.strengths.device))
