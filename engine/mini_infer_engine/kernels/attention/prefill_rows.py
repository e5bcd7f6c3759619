"""Describes the prompt chunks of one pass in the form that the attention kernels read."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

UNKNOWN_PAGES = 1 << 30


@dataclass(frozen=True)  # without slots: a property is kept
class PrefillRows:
    """Chunks side by side in one list of tokens. Integer tensors are int32 on the device."""

    page_tables: Tensor  # [sequences, width] pages of each sequence, in order
    query_starts: Tensor  # [sequences + 1] where each one's new tokens begin
    ends: Tensor  # [sequences] tokens of each with its new ones
    longest_query: int
    """New tokens of the longest chunk, or an upper bound. Only flash-attn needs it."""
    longest_key: int
    """Tokens of the longest sequence with its new ones, or an upper bound: the launch config depends on it."""
    pages: int = UNKNOWN_PAGES
    """Pages of all sequences with new tokens, or an upper bound, which decides whether they fit in scratch memory."""

    @functools.cached_property
    def key_starts(self) -> Tensor:
        """The running sum of `ends`, [sequences + 1].

        Only flash-attn needs it, so other passes do not launch the kernels for it.
        """
        return functional.pad(self.ends.cumsum(0), (1, 0)).to(torch.int32)
