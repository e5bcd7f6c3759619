"""Bans words from the output where guesses are verified: tokens that would complete one get minus infinity, in place.

The tokens before each position are in the history of its slot: those that are known, and guesses.
"""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["words_stride"])
def _ban_words(
    words,
    words_stride,
    slots,
    positions,
    history,
    history_stride,
    scores,
    scores_stride,
    QUERIES: tl.constexpr,
):
    """Bans with one program per (word, query)."""
    word, query = words + tl.program_id(0) * words_stride, tl.program_id(1)
    row = tl.load(word)
    count = tl.load(word + 2)
    slot = tl.load(slots + row).to(tl.int64)
    first = tl.load(positions + slot) + query + 1 - count
    is_completed = first >= 0
    for place in range(count):
        token = tl.load(history + slot * history_stride + tl.maximum(first + place, 0))
        is_completed = is_completed & (token == tl.load(word + 3 + place))
    line = (row * QUERIES + query).to(tl.int64)
    tl.store(scores + line * scores_stride + tl.load(word + 1), float("-inf"), mask=is_completed)


def ban_words(
    words: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    history: torch.Tensor,
    scores: torch.Tensor,
    queries: int,
) -> None:
    """Bans words in scores [rows * queries, vocabulary] fp32, whose query n follows n guesses.

    words [words, 3 + most] int32: row, last token, number of tokens before it, those tokens. slots [rows]; positions
    [slots] and history [slots, positions] int32 are those of `kernels.sampling.speculate`.
    """
    _ban_words[(words.shape[0], queries)](
        words,
        words.stride(0),
        slots,
        positions,
        history,
        history.stride(0),
        scores,
        scores.stride(0),
        QUERIES=queries,
        num_warps=1,
    )
