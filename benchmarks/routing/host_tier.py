"""Main memory of a modelled engine: evicted blocks, least recently used first, and the time of their loads.

It follows the engine's tier (core/kv_tiers): a block that the device evicts was copied before, one that is loaded
stays, and a prefix is loaded where that is faster than computing it. Loads follow each other, beside passes.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostShape:
    """The size and the speed of main memory."""

    blocks: int = 0
    """0: there is none."""
    tokens_per_s: float = 600_000.0
    latency_s: float = 0.0005


NO_HOST = HostShape()


class HostTier:
    """The blocks of one engine's main memory."""

    def __init__(self, shape: HostShape, block_tokens: int, compute_s_per_token: float) -> None:
        self._shape, self._block_tokens, self._compute_s = shape, block_tokens, compute_s_per_token
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._free_s = 0.0

    def evicted(self, blocks: Iterable[int]) -> tuple[list[int], list[int]]:
        """Takes blocks that the device evicts. Returns those that are new here, and those that go for them."""
        if not self._shape.blocks:
            return [], []
        new = []
        for block in blocks:
            if block not in self._blocks:
                new.append(block)
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        gone = []
        while len(self._blocks) > self._shape.blocks:
            gone.append(self._blocks.popitem(last=False)[0])
        return new, gone

    def match(self, blocks: Sequence[int]) -> int:
        """Returns how many of these blocks, which the device lacks, are loaded; 0 if computing is faster."""
        count = 0
        for block in blocks:
            if block not in self._blocks:
                break
            count += 1
        tokens = count * self._block_tokens
        is_faster = self._shape.latency_s + tokens / self._shape.tokens_per_s < tokens * self._compute_s
        return count if is_faster else 0

    def load(self, blocks: Sequence[int], now_s: float) -> float:
        """Begins to load blocks. Returns the time at which they are on the device."""
        for block in blocks:
            self._blocks.move_to_end(block)
        seconds = self._shape.latency_s + len(blocks) * self._block_tokens / self._shape.tokens_per_s
        self._free_s = max(now_s, self._free_s) + seconds
        return self._free_s
