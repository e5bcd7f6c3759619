"""The prompt chunks of one pass, as the attention kernels read them."""

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
    """New tokens of the longest chunk, or more. Only flash-attn needs it."""
    longest_key: int
    """Tokens of the longest sequence with its new ones, or more: the launch config depends on it."""
    pages: int = UNKNOWN_PAGES
    """Of all sequences with new tokens, or more: whether scratch memory holds them depends on it."""

    @functools.cached_property
    def key_starts(self) -> Tensor:
        """[sequences + 1] running sum of `ends`. Only flash-attn needs it, so other passes do not launch the kernels
        for it.
        """
        return functional.pad(self.ends.cumsum(0), (1, 0)).to(torch.int32)
