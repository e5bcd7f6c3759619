"""Computes log probabilities of prompt tokens: the head runs over a chunk's tokens some at a time, since logits are
wide.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mini_infer_engine.core.batch import Row
from mini_infer_engine.core.request import TokenLogprobs
from mini_infer_engine.ops.base import ResidualState
from mini_infer_engine.sampling.logprobs import LogprobTensors, token_logprobs

_TOKENS_AT_A_TIME = 256
"""Tokens whose logits are computed at once: with a vocabulary of 150,000 they take 160 MB in fp32."""


@dataclass(slots=True)
class PromptLogprobs:
    """Prompt log probabilities of the rows of one pass that request them; tensors are being copied to main memory."""

    pieces: list[tuple[int, int, LogprobTensors]]
    """Tuples (row, number of most likely tokens, tensors), in the order of the row's targets."""

    @classmethod
    def of(
        cls, rows: list[Row], state: ResidualState, logits_of: Callable[[ResidualState], Tensor]
    ) -> "PromptLogprobs":
        """Computes the log probabilities; `state` has every token of the pass."""
        pieces, begin, device = [], 0, state.residual.device
        for index, row in enumerate(rows):
            targets = torch.tensor(list(row.prompt_targets), dtype=torch.int64, device=device)
            for start in range(0, len(targets), _TOKENS_AT_A_TIME):
                some = targets[start : start + _TOKENS_AT_A_TIME]
                places = torch.arange(begin + start, begin + start + len(some), device=device)
                made = token_logprobs(logits_of(state.select(places)), some, row.num_prompt_logprobs)
                pieces.append((index, row.num_prompt_logprobs, made.on_host()))
            begin += row.count
        return cls(pieces)

    def read(self) -> dict[int, list[TokenLogprobs]]:
        """Returns the log probabilities by row. The pass must have run."""
        logprobs: dict[int, list[TokenLogprobs]] = {}
        for row, number, tensors in self.pieces:
            logprobs.setdefault(row, []).extend(tensors.read([number] * len(tensors.token_ids)))
        return logprobs
