"""The prompt chunks of one pass, as attention kernels want them."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """Chunks side by side in one list of tokens. Integer tensors are int32 on the device."""

    page_tables: Tensor  # [sequences, width] pages of each sequence, in order
    query_starts: Tensor  # [sequences + 1] where each one's new tokens begin
    key_starts: Tensor  # [sequences + 1] running sum of `ends`
    ends: Tensor  # [sequences] tokens of each with its new ones
    longest_query: int
    """New tokens of the longest chunk, or more."""
    longest_key: int
