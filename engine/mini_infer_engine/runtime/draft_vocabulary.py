"""Computes logits of the tokens that a head may draft, by their rows of the model's output matrix; all others are -inf.

Logits keep their places, so that a draft token is drawn with the noise that will verify it.
"""

import torch
from torch import Tensor, nn

from mini_infer_engine.layers.linear import UNQUANTIZED, Linear
from mini_infer_engine.models.causal_model import CausalModel
from mini_infer_engine.models.decoder import DecoderModel
from mini_infer_engine.ops.base import Ops, ResidualState


class DraftVocabulary:
    """The draft vocabulary of one head over one model, whose weights are loaded."""

    def __init__(self, model: CausalModel, token_ids: Tensor | None, max_rows: int, dtype: torch.dtype) -> None:
        """Copies the rows of token_ids [tokens] int64, from `SpeculativeHead.token_ids`. None means all: nothing is
        copied.
        """
        assert isinstance(model, DecoderModel), "heads draft for models of ours"
        self._model, self._token_ids = model, token_ids
        self._rows: Linear | None = None
        if token_ids is None:
            return
        head = model.head
        if head.method is UNQUANTIZED and head.blocked is None:
            weight = head.weight.index_select(0, token_ids)
            self._rows = Linear.borrowing(nn.Parameter(weight, requires_grad=False))
        # [rows, vocab]: what no guess may be stays -inf
        self._logits = torch.full(
            (max_rows, model.config.vocab_size), float("-inf"), dtype=dtype, device=token_ids.device
        )

    def logits(self, ops: Ops, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns logits [rows, vocab] of hidden states [rows, hidden] before the model's last norm. They go to `out`
        if the vocabulary is whole.

        They are valid until the next call. Output matrices in other than the model's dtype are read whole.
        """
        state = ResidualState(hidden)
        if self._token_ids is None:
            return self._model.logits(ops, state, out)
        if self._rows is None:
            some = self._model.logits(ops, state).index_select(1, self._token_ids)
        else:
            some = self._model.logits(ops, state, head=self._rows)
        return self._logits[: len(hidden)].index_copy_(1, self._token_ids, some)
