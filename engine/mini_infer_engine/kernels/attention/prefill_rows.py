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
    last_keys: Tensor | None = None  # [tokens]
    """Index in its sequence of the last key that each new token sees; None: causal attention, where it is its own."""

    @classmethod
    def of_groups(
        cls,
        page_tables: Tensor,
        query_starts: Tensor,
        ends: Tensor,
        longest_query: int,
        longest_key: int,
        pages: int = UNKNOWN_PAGES,
    ) -> "list[PrefillRows]":
        """Returns the same chunks with the pages of each KV group: page_tables [groups, sequences, width]."""
        return [cls(table, query_starts, ends, longest_query, longest_key, pages) for table in page_tables.unbind(0)]

    @functools.cached_property
    def key_starts(self) -> Tensor:
        """The running sum of `ends`, [sequences + 1].

        Only flash-attn needs it, so other passes do not launch the kernels for it.
        """
        return functional.pad(self.ends.cumsum(0), (1, 0)).to(torch.int32)
