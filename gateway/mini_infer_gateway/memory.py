"""How the gateway's memory is shared out, so that the worst input allowed stays below one limit.

Sizes of the parts were measured: `tests/gateway/test_memory.py` holds them to it. Pure.
"""

import re
from dataclasses import dataclass

BASE_BYTES = 96 << 20
"""Interpreter, libraries, and some thousand connections."""
BODY_FACTOR = 6
"""A body is read, decoded, rendered and tokenised: so many times its size at once, until its keys are known."""
BLOCK_BYTES = 300
"""Of a block in the prefix index: two keys, two table entries, its place in the tree."""
TOKENIZER_FACTOR = 26
"""A tokenizer takes so many times the size of its tokenizer.json."""
REMEMBERED_SHARE, SEGMENTS_SHARE, BODIES_SHARE, SPARE_SHARE = 0.08, 0.04, 0.2, 0.1
RESPONSES_SHARE = 0.05
LEAST_INDEX_SHARE = 0.1

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


def parse_size(text: str) -> int:
    """Bytes of "1Gi", "900M", "512MiB" or a plain number. ValueError: it is none of these."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?)?b?\s*", text.lower())
    if not found:
        raise ValueError(f"{text!r} is no size: write bytes, or a number with K, M, G, Ki, Mi or Gi")
    return int(float(found[1]) * _UNITS[found[2] or ""])


@dataclass(frozen=True, slots=True)
class MemoryShares:
    """What each part may take."""

    bodies_bytes: int
    """Of request bodies that are read or tokenised, each counted BODY_FACTOR times."""
    remembered_bytes: int
    """Of prompts of before (prompts.remembered)."""
    segments_bytes: int
    """Of pieces of text and their token ids (contract.segments), over all tokenizers."""
    responses_bytes: int
    """Of responses that are kept (contract.stored_responses)."""
    index_blocks: int
    short_bytes: int
    """By how much the limit is too low for the tokenizers that are loaded."""


def share_out(limit_bytes: int, tokenizer_bytes: int, responses_bytes: int | None = None) -> MemoryShares:
    """The parts for a limit, where tokenizers of this size are loaded: the index has what the others leave.

    `responses_bytes`: what kept responses may take; None: a share.
    """
    responses = int(RESPONSES_SHARE * limit_bytes) if responses_bytes is None else responses_bytes
    bodies, remembered, segments, spare, least = (
        int(share * limit_bytes)
        for share in (BODIES_SHARE, REMEMBERED_SHARE, SEGMENTS_SHARE, SPARE_SHARE, LEAST_INDEX_SHARE)
    )
    left = limit_bytes - BASE_BYTES - tokenizer_bytes - bodies - remembered - segments - spare - responses
    return MemoryShares(bodies, remembered, segments, responses, max(left, least) // BLOCK_BYTES, max(0, least - left))


class BodyBudget:
    """Bytes of request bodies in memory, over all requests."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.taken_bytes = 0

    def take(self, size_bytes: int) -> bool:
        """Whether there is room; one request alone always has it."""
        if self.taken_bytes and self.taken_bytes + size_bytes > self._limit_bytes:
            return False
        self.taken_bytes += size_bytes
        return True

    @property
    def is_tight(self) -> bool:
        """More than half is taken: what need not be kept should not be."""
        return 2 * self.taken_bytes > self._limit_bytes

    def give_back(self, size_bytes: int) -> None:
        """What was taken is not needed any more."""
        self.taken_bytes -= size_bytes


class HeldBody:
    """What one request has taken of a budget."""

    __slots__ = ("_budget", "_taken_bytes")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget, self._taken_bytes = budget, 0

    def grow(self, size_bytes: int) -> bool:
        """Room for a body of this size that is still to be worked on; False: others need it now."""
        more = BODY_FACTOR * size_bytes - self._taken_bytes
        if more > 0:
            if not self._budget.take(more):
                return False
            self._taken_bytes += more
        return True

    def settle(self, size_bytes: int) -> None:
        """The prompt's keys are known: from now on only the body itself is kept."""
        if (less := self._taken_bytes - size_bytes) > 0:
            self._budget.give_back(less)
            self._taken_bytes = size_bytes

    def release(self) -> None:
        """Nothing of it is kept."""
        self._budget.give_back(self._taken_bytes)
        self._taken_bytes = 0
