"""Divides the gateway's memory among its parts, so that the worst permitted input stays below one limit. Pure.

The sizes of the parts were measured, and `tests/gateway/test_memory.py` checks them.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mini_infer_web.fair_budget import FairBudget

BASE_BYTES = 96 << 20
"""Bytes of the interpreter, the libraries, and some thousand connections."""
BODY_FACTOR = 6
"""Memory of a body as a multiple of its size, until its keys are known: it is read, decoded, rendered and tokenised."""
VALUE_BYTES = 12
"""Bytes counted for a value of a JSON body beyond its length: decoded, it takes several times as much memory."""
BLOCK_BYTES = 300
"""Bytes of a block in the prefix index: two keys, two table entries, and its place in the tree."""
TOKENIZER_FACTOR = 26
"""Memory of a tokenizer as a multiple of the size of its tokenizer.json."""
PROMPT_CACHE_SHARE, SEGMENTS_SHARE, BODIES_SHARE, SPARE_SHARE = 0.08, 0.04, 0.2, 0.1
RESPONSES_SHARE = 0.05
LEAST_INDEX_SHARE = 0.1
LEAST_TOKENIZERS_SHARE, LEAST_TOKENIZERS_BYTES = 0.3, 64 << 20
"""Memory that tokenizers of servers get in any case: a share of the limit, and enough for two small ones."""

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


def parse_size(text: str) -> int:
    """Returns the bytes of "1Gi", "900M", "512MiB" or a plain number. Raises ValueError for anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?)?b?\s*", text.lower())
    if not found:
        raise ValueError(f"{text!r} is no size: write bytes, or a number with K, M, G, Ki, Mi or Gi")
    return int(float(found[1]) * _UNITS[found[2] or ""])


@dataclass(frozen=True, slots=True)
class MemoryShares:
    """The memory that each part may take."""

    bodies_bytes: int
    """Memory for request bodies that are read or tokenised; each counts BODY_FACTOR times its size."""
    prompt_cache_bytes: int
    """Memory for remembered prompts (`prompts.prompt_cache`)."""
    segments_bytes: int
    """Memory for pieces of text and their token ids (`contract.segments`), over all tokenizers."""
    responses_bytes: int
    """Memory for stored responses (`contract.stored_responses`)."""
    index_blocks: int
    tokenizers_bytes: int
    """Most memory for tokenizers that servers send; those that are configured are loaded in any case."""
    short_bytes: int
    """Bytes by which the limit is too low for the tokenizers that are loaded."""


def share_out(limit_bytes: int, tokenizer_bytes: int, responses_bytes: int | None = None) -> MemoryShares:
    """Returns the parts of a limit while tokenizers of this size are loaded: the index gets what the others leave.

    `responses_bytes` is the memory for stored responses; None if they get a share of the limit.
    """
    responses = int(RESPONSES_SHARE * limit_bytes) if responses_bytes is None else responses_bytes
    bodies, prompt_cache, segments, spare, least = (
        int(share * limit_bytes)
        for share in (BODIES_SHARE, PROMPT_CACHE_SHARE, SEGMENTS_SHARE, SPARE_SHARE, LEAST_INDEX_SHARE)
    )
    free = limit_bytes - BASE_BYTES - bodies - prompt_cache - segments - spare - responses
    left = free - tokenizer_bytes
    return MemoryShares(
        bodies_bytes=bodies,
        prompt_cache_bytes=prompt_cache,
        segments_bytes=segments,
        responses_bytes=responses,
        index_blocks=max(left, least) // BLOCK_BYTES,
        tokenizers_bytes=max(free - least, int(LEAST_TOKENIZERS_SHARE * limit_bytes), LEAST_TOKENIZERS_BYTES),
        short_bytes=max(0, least - left),
    )


class BodyBudget:
    """A limit for the bytes of all request bodies in memory, of which no client gets the last part."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._budget = FairBudget(limit_bytes)

    @property
    def used_bytes(self) -> int:
        """Bytes that are allocated."""
        return self._budget.used

    def take(self, size_bytes: int, client: str = "") -> bool:
        """Allocates from the budget. Returns False if there is no room; a sole request always has room."""
        return self._budget.take(size_bytes, client)

    def charge(self, size_bytes: int, client: str = "") -> None:
        """Allocates bytes that are in use already, whether there is room for them or not."""
        self._budget.charge(size_bytes, client)

    @property
    def is_tight(self) -> bool:
        """True if more than half is allocated, so that nothing optional should be retained."""
        return self._budget.is_tight

    def give_back(self, size_bytes: int, client: str = "") -> None:
        """Frees bytes that were allocated."""
        self._budget.give_back(size_bytes, client)


class BodyReservation:
    """The bytes that one request has allocated from a budget."""

    __slots__ = ("_budget", "_client", "_reserved_bytes")

    def __init__(self, budget: BodyBudget, client: str = "") -> None:
        """`client` is the one that is charged; "" if nobody is."""
        self._budget, self._client, self._reserved_bytes = budget, client, 0

    def grow(self, size_bytes: int, values: int = 0) -> bool:
        """Allocates room to process a body of this size with this number of JSON values. Returns False if there is not
        enough now.
        """
        more = BODY_FACTOR * (size_bytes + VALUE_BYTES * values) - self._reserved_bytes
        if more > 0:
            if not self._budget.take(more, self._client):
                return False
            self._reserved_bytes += more
        return True

    def add(self, size_bytes: int) -> bool:
        """Allocates bytes beside those of the body. Returns False if there is no room."""
        if not self._budget.take(size_bytes, self._client):
            return False
        self._reserved_bytes += size_bytes
        return True

    def settle(self, size_bytes: int) -> None:
        """Reduces the allocation to the body itself, once the prompt's keys are known."""
        if (less := self._reserved_bytes - size_bytes) > 0:
            self._budget.give_back(less, self._client)
            self._reserved_bytes = size_bytes

    @contextmanager
    def charged(self, size_bytes: int) -> Iterator[None]:
        """Counts memory that is in use already, whether there is room for it or not."""
        self._budget.charge(size_bytes, self._client)
        try:
            yield
        finally:
            self._budget.give_back(size_bytes, self._client)

    def release(self) -> None:
        """Frees the whole allocation."""
        self._budget.give_back(self._reserved_bytes, self._client)
        self._reserved_bytes = 0
