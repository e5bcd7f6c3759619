"""Samples at each position of rows with drafts that request more than temperature and filters, kernel by kernel.

Each position has a line of logits: line row * queries + query follows `query` draft tokens. The stages and their order
are those of `CudaSampling`. Knows neither models nor how tokens are drafted.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from mini_infer_engine.core.batch import Row, TokenMasks
from mini_infer_engine.device import to_device
from mini_infer_engine.kernels.sampling.ban_words import ban_words
from mini_infer_engine.kernels.sampling.penalise import count_made, penalised_checks
from mini_infer_engine.kernels.sampling.sampling_state import SamplingState
from mini_infer_engine.kernels.sampling.token_mask import apply_token_masks
from mini_infer_engine.runtime.cuda.sampling import CudaPassHandle, CudaSampling, GuessedPart
from mini_infer_engine.runtime.inputs.mask_staging import MaskStaging
from mini_infer_engine.sampling.logit_changes import build_logit_changes

_UPLOADS_IN_FLIGHT = 4


class SpeculativeSampling:
    """The sampling stages of one executor's passes with drafts."""

    def __init__(self, sampling: CudaSampling, history: Tensor, virtual: SamplingState, own_rows: Tensor) -> None:
        """Wraps state that `kernels.sampling.speculate` defines: history [slots, positions] int32, `virtual`; own_rows:
        0, 1, ...
        """
        self._sampling, self._history, self._virtual, self._own_rows = sampling, history, virtual, own_rows
        self._masks = MaskStaging(len(own_rows), _UPLOADS_IN_FLIGHT, history.device)

    def compile_kernels(self, logits: Tensor, slots: Tensor) -> None:
        """Runs the kernels that some request may need, over lines of logits [queries, vocab] of a padded row: slots
        [1].
        """
        sampling, queries = self._sampling, len(logits)
        positions = sampling.state.state.positions
        scores = penalised_checks(logits, slots, positions, self._history, sampling.penalties, queries)
        penalised_checks(scores, slots, positions, self._history, sampling.penalties, queries)
        no_word = torch.zeros((1, 3), dtype=torch.int32, device=logits.device)
        ban_words(no_word, slots, positions, self._history, scores, queries)
        nothing = torch.zeros((1, queries + 1), dtype=torch.int64, device=logits.device)
        count_made(slots, nothing, sampling.penalties)

    def is_needed_for(self, rows: list[Row]) -> bool:
        """Returns True if some of these rows request more than graphs compute."""
        slots, sampling = [row.slot for row in rows], self._sampling
        return sampling.are_biased(slots) or sampling.penalties.concern(slots) or sampling.logprobs.concerns(rows)

    def packed_masks(self, part: GuessedPart, masks: TokenMasks) -> Tensor | None:
        """Returns the masks of these rows and of their draft tokens on the device, or None if they have none."""
        queries = part.drafts + 1
        lines = {
            (index, query): row * queries + query for row, index in enumerate(part.indices) for query in range(queries)
        }
        return self._masks.packed(masks, lines)

    def run(
        self,
        part: GuessedPart,
        logits: Tensor,
        slots: Tensor,
        packed_masks: Tensor | None,
        settle: Callable[[Tensor], Tensor],
        handle: CudaPassHandle,
    ) -> None:
        """Applies bias, bans, masks and penalties, samples and settles; then updates penalties' counts and log
        probabilities.

        logits [lines, vocab] and slots [rows] int32 both have padding. `settle` samples from the scores that it gets,
        compares, and returns results [rows, queries + 1].
        """
        sampling, queries = self._sampling, part.drafts + 1
        of_lines = [row for row in part.rows for _ in range(queries)]
        requested = sampling.logprobs.requested(of_lines, logits, are_masked=packed_masks is not None)
        scores = self._biased(part.rows, of_lines, logits, slots, queries)
        if packed_masks is not None:
            apply_token_masks(scores, packed_masks)
        penalises = sampling.penalties.concern([row.slot for row in part.rows])
        if penalises:
            positions = sampling.state.state.positions
            scores = penalised_checks(scores, slots, positions, self._history, sampling.penalties, queries)
        results = settle(scores)
        if penalises:
            count_made(slots, results, sampling.penalties)
        if requested is not None:
            made = requested.compute(self._own_rows, self._virtual.last_tokens)
            located = [(part.indices[line // queries], number) for line, number in requested.rows]
            handle.logprobs.append((located, made.on_host()))

    def _biased(
        self, rows: Sequence[Row], of_lines: Sequence[Row], logits: Tensor, slots: Tensor, queries: int
    ) -> Tensor:
        """Returns the logits after biases, lists of allowed tokens and banned words: a copy if there are any."""
        sampling = self._sampling
        if not sampling.are_biased([row.slot for row in rows]):
            return logits
        scores, words = logits, _packed_words(rows, logits.device)
        if (changes := build_logit_changes(of_lines, logits.device)) is not None:
            scores = changes.apply(scores, self._virtual.last_tokens)
        elif words is not None:
            scores = scores.to(torch.float32, copy=True)
        if words is not None:
            ban_words(words, slots, sampling.state.state.positions, self._history, scores, queries)
        return scores


def _packed_words(rows: Sequence[Row], device: torch.device) -> Tensor | None:
    """Returns the banned words of rows in the format of `ban_words`, or None if there are none."""
    words = [
        (index, word)
        for index, row in enumerate(rows)
        if row.sampling is not None
        for word in row.sampling.bad_words_token_ids
    ]
    if not words:
        return None
    packed = np.zeros((len(words), max(3, 2 + max(len(word) for _, word in words))), dtype=np.int32)
    for line, (index, (*before, last)) in zip(packed, words, strict=True):
        line[:3] = (index, last, len(before))
        line[3 : 3 + len(before)] = before
    return to_device(packed, device)
