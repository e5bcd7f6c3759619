"""Describes the rows of a pass over recurrent states as tables of int32 that kernels read."""

from dataclasses import dataclass

import torch

CHUNK_SIZE = 64
"""The most tokens of a chunk: within it the cost grows with its square, and between chunks there is a chain of
products.
"""
MOST_PROGRAMS = 64
"""Programs for each head that update steps: they loop over more, most of which may be padding."""
NO_SLOT = -1
"""Stands for no slot in the tables."""


@dataclass(frozen=True, slots=True)
class PassTables:
    """The tables of one pass, int32 on the device. Rows of one token are steps, longer ones are cut into chunks."""

    steps: torch.Tensor
    """[steps, 4]: token, slot of the state before it or -1, slot of the state after it, another slot for that or -1.

    A step whose third number is `padding_slot` is padding: it reads and writes no state, and its outputs are zeros,
    unless its token is -1.
    """
    rows: torch.Tensor
    """[rows, 8]: first token, slot of the state before it or -1, slot of the state after the row, first chunk, number
    of chunks, first store, number of stores, 0. A row without chunks is padding.
    """
    chunks: torch.Tensor
    """[chunks, 4]: first token, tokens, row, slot to which the state after it is copied or -1. One without tokens is
    padding.
    """
    stores: torch.Tensor
    """[stores, 2]: tokens of the row, slot to which its state after them is written; a row's in the order of tokens."""
    padding_slot: int
    step_tokens: int = 1
    """Consecutive tokens of each step. With more than one, the state after each token but the last is written to a slot
    of its own, from the fourth number of the step on: a pass that verifies draft tokens goes back to one of them.
    """
    is_padded: bool = False
    """True if there are tokens in no row: their outputs are zeros."""

    def outputs(self, tokens: int, width: int, like: torch.Tensor) -> torch.Tensor:
        """Returns memory [tokens, width] for the outputs of all rows, in the dtype of `like`."""
        make = torch.zeros if self.is_padded else torch.empty
        return make((tokens, width), dtype=like.dtype, device=like.device)
