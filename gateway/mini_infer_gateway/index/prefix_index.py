"""Maps prompts to the endpoints that have their blocks cached, rebuilt from KV events with our own chain of keys.

An event contains token ids and the sender's hashes. The keys are computed here from the token ids; the sender's hashes
only name its blocks in later events, so an engine with another hash, salt or block size needs no trust. Guesses stand
in until the event of a routed prompt arrives. No call takes long: large changes are applied, forgotten and freed in
parts. Pure: no sockets, no sequence numbers, time is passed in.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from math import lcm
from typing import Any

from msgspec.structs import replace

from mini_infer_contract.blocks import BLOCK_SIZE_TOKENS, block_keys, root_key
from mini_infer_contract.events import (
    MEDIUM_DISK,
    MEDIUM_GPU,
    MEDIUM_HOST,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
)
from mini_infer_gateway.index.cached_blocks import (
    DEVICE,
    DISK,
    HOST,
    NO_HIT,
    ROOT,
    CachedBlocks,
    Conversation,
    Hit,
)
from mini_infer_gateway.index.guesses import Guesses
from mini_infer_gateway.index.key_chain import Lookup

__all__ = ["NO_HIT", "Conversation", "Hit", "PrefixIndex", "prompt_root", "slices"]

TIERS = {None: DEVICE, MEDIUM_GPU: DEVICE, MEDIUM_HOST: HOST, MEDIUM_DISK: DISK, "STORAGE": DISK}
"""The tier of each medium that events name; "STORAGE" is vLLM's. Copies in other media do not count."""
SLICE_BLOCKS = 256
"""Blocks that are applied, forgotten or freed at once, which takes less than two milliseconds."""
MAX_EVICTED = 4 * SLICE_BLOCKS
"""Largest number of blocks that one call forgets; if the limit was lowered, later calls forget the rest."""


@lru_cache(maxsize=1024)
def prompt_root(adapter: str = "", salt: str = "") -> bytes:
    """Returns the parent of a prompt's first block in the gateway's keys.

    It does not depend on the model revision: hits are looked up by endpoint, and an endpoint serves one revision.
    """
    return root_key("", adapter, salt)


def slices(events: Iterable[KVEvent]) -> Iterator[list[KVEvent]]:
    """Divides events into parts of at most SLICE_BLOCKS, and long chains too: other tasks may run between two parts."""
    part: list[KVEvent] = []
    remaining = SLICE_BLOCKS
    for event in events:
        for piece in _pieces(event):
            blocks = len(piece.block_hashes) if isinstance(piece, BlockStored) else 1
            if part and blocks > remaining:
                yield part
                part, remaining = [], SLICE_BLOCKS
            part.append(piece)
            remaining -= blocks
    if part:
        yield part


def _pieces(event: KVEvent) -> Iterator[KVEvent]:
    if not isinstance(event, BlockStored | BlockRemoved) or len(event.block_hashes) <= SLICE_BLOCKS:
        yield event
        return
    for start in range(0, len(event.block_hashes), SLICE_BLOCKS):
        part = slice(start, start + SLICE_BLOCKS)
        if isinstance(event, BlockRemoved):
            yield replace(event, block_hashes=event.block_hashes[part])
            continue
        tokens = slice(start * event.block_size, (start + SLICE_BLOCKS) * event.block_size)
        yield replace(
            event,
            block_hashes=event.block_hashes[part],
            parent_block_hash=event.block_hashes[start - 1] if start else event.parent_block_hash,
            token_ids=event.token_ids[tokens],
            extra_keys=event.extra_keys[part] if event.extra_keys else None,
        )


class _Holdings:
    """The confirmed and the guessed blocks of one endpoint."""

    __slots__ = ("blocks", "guesses", "stale_until_s")

    def __init__(self) -> None:
        self.blocks, self.guesses = CachedBlocks(), Guesses()
        self.stale_until_s: float | None = None
        """Time until which blocks are trusted after the endpoint's events stopped; None while events arrive."""

    def size(self) -> int:
        return len(self.blocks) + len(self.guesses)

    def hit(self, keys: Lookup, now_s: float) -> Hit:
        """Returns the part of a prompt that is cached or guessed to be."""
        blocks, guesses = self.blocks, self.guesses
        hit = blocks.hit(keys) if keys.first in blocks.owner or blocks.step > 1 else NO_HIT
        if not guesses.by_key:
            return hit
        depth = guesses.depth(keys, hit.blocks, now_s, blocks.step)
        if depth == hit.blocks:
            return hit
        return Hit(depth, hit.shared_blocks, hit.sharers, hit.host_blocks, hit.disk_blocks)


class PrefixIndex:
    """The cached blocks of all endpoints, at most `max_blocks` in total."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._endpoints: dict[str, _Holdings] = {}
        self._total = 0
        self._now_s = 0.0
        """The time of the last expiry run, with which uses of blocks are recorded."""
        self._discarded: list[CachedBlocks] = []
        """Blocks of endpoints that are removed: freeing a million blocks at once would take too long."""

    @property
    def total_blocks(self) -> int:
        """Number of confirmed and guessed blocks of all endpoints."""
        return self._total

    def limit(self, max_blocks: int) -> None:
        """Changes the limit; the excess is forgotten in parts."""
        self._max_blocks = max_blocks

    def apply(self, endpoint: str, events: Sequence[KVEvent]) -> int:
        """Applies an endpoint's events in order. Returns the number of chains that have no known place: their parent is
        unknown, or they have no tokens.

        The call takes time in proportion to the events: see `slices`.
        """
        holdings = self._holdings(endpoint)
        before = holdings.size()
        orphans = 0
        for event in events:
            match event:
                case BlockStored():
                    orphans += not self._store(holdings, event)
                case BlockRemoved():
                    self._remove(holdings, event)
                case AllBlocksCleared():
                    self._discarded.append(holdings.blocks)
                    holdings.blocks, holdings.guesses = CachedBlocks(), Guesses()
                    holdings.blocks.now_s = self._now_s
        added = holdings.size() - before
        self._total += added
        self._trim(added)
        return orphans

    def guess(self, endpoint: str, keys: Sequence[bytes], expires_s: float) -> None:
        """Records that a prompt was sent there: its keys count as cached until `expires_s`, or until an event."""
        holdings = self._holdings(endpoint)
        cached = holdings.blocks.touch(Lookup(keys))
        if cached < len(keys):
            before = len(holdings.guesses)
            holdings.guesses.add(keys, cached, expires_s)
            added = len(holdings.guesses) - before
            self._total += added
            self._trim(added)

    def mark_stale(self, endpoint: str, until_s: float) -> None:
        """Limits the trust in blocks of a live endpoint whose events stopped, to `until_s` or `clear`."""
        if holdings := self._endpoints.get(endpoint):
            holdings.stale_until_s = until_s

    def expire(self, now_s: float) -> bool:
        """Drops stale blocks and some expired guesses. Returns True if there is more to do at once.

        Call it at intervals; lookups ignore expired guesses anyway.
        """
        left = SLICE_BLOCKS
        self._now_s = now_s
        for holdings in self._endpoints.values():
            holdings.blocks.now_s = now_s
            if holdings.stale_until_s is not None and holdings.stale_until_s <= now_s:
                self._total -= len(holdings.blocks)
                self._discarded.append(holdings.blocks)
                holdings.blocks, holdings.stale_until_s = CachedBlocks(), None
            if left <= 0:
                return True
            before = len(holdings.guesses)
            left -= holdings.guesses.expire(now_s, left)
            self._total += len(holdings.guesses) - before
        if self._discarded and not self._discarded[-1].sweep(8 * SLICE_BLOCKS):
            self._discarded.pop()
        self._trim()
        return left <= 0 or bool(self._discarded) or self._total > self._max_blocks

    def hits(self, endpoints: Sequence[str], keys: Sequence[bytes], now_s: float) -> list[Hit]:
        """Returns for each of these endpoints the cached part of a prompt with these keys."""
        if not keys:
            return [NO_HIT] * len(endpoints)
        looked_up = Lookup(keys)
        each = map(self._endpoints.get, endpoints)
        return [holdings.hit(looked_up, now_s) if holdings else NO_HIT for holdings in each]

    def hit(self, endpoint: str, keys: Sequence[bytes], now_s: float) -> Hit:
        """Returns the cached part of a prompt with these keys, in time logarithmic in the prompt's length."""
        return self.hits([endpoint], keys, now_s)[0]

    def conversations(self, endpoint: str, most: int, most_forks: int = 1 << 20) -> list[Conversation]:
        """Returns at most `most` conversations that an endpoint's events report as cached, the latest used first."""
        holdings = self._endpoints.get(endpoint)
        return list(holdings.blocks.conversations(most, most_forks)) if holdings else []

    def run_end(self, endpoint: str, key: bytes) -> bytes | None:
        """Returns the last key of the unforked run of blocks that has this key; None if the endpoint lacks it."""
        holdings = self._endpoints.get(endpoint)
        return holdings.blocks.run_end(key) if holdings else None

    def guessed_blocks(self, endpoint: str) -> int:
        """Returns the number of blocks that are only guessed to be cached there."""
        holdings = self._endpoints.get(endpoint)
        return len(holdings.guesses) if holdings else 0

    def cached_blocks(self, endpoint: str) -> int:
        """Returns the number of all blocks cached there, guesses included."""
        return self.all_cached_blocks([endpoint])[0]

    def all_cached_blocks(self, endpoints: Sequence[str]) -> list[int]:
        """Returns `cached_blocks` of each of these endpoints."""
        each = map(self._endpoints.get, endpoints)
        return [
            len(holdings.blocks.owner) * holdings.blocks.step + len(holdings.guesses.by_key) if holdings else 0
            for holdings in each
        ]

    def clear(self, endpoint: str) -> None:
        """Forgets an endpoint that was removed, or whose blocks are not to be trusted."""
        holdings = self._endpoints.pop(endpoint, None)
        if holdings:
            self._total -= holdings.size()
            self._discarded.append(holdings.blocks)

    def _holdings(self, endpoint: str) -> _Holdings:
        holdings = self._endpoints.get(endpoint)
        if holdings is None:
            holdings = self._endpoints[endpoint] = _Holdings()
            holdings.blocks.now_s = self._now_s
        return holdings

    def _store(self, holdings: _Holdings, event: BlockStored) -> bool:
        tier = _tier(event)
        if not tier:
            return True
        blocks, size = holdings.blocks, event.block_size
        # Senders may name blocks of slower tiers by hashes alone, which those of the device have introduced.
        known = blocks.add_copies(event.block_hashes, tier) if tier != DEVICE else 0
        parent = event.block_hashes[known - 1] if known else event.parent_block_hash
        rest: tuple[int, ...] = ()
        row = ROOT
        if parent is None:
            end = _root(event)
        else:
            row = blocks.by_hash.get(parent, ROOT)
            if row == ROOT:
                return False
            end, rest = blocks.end_of(row)
        if known < len(event.block_hashes):
            if len(event.token_ids) < size * len(event.block_hashes) or size < 1:
                return False
            blocks.step = lcm(size, BLOCK_SIZE_TOKENS) // BLOCK_SIZE_TOKENS
        for position in range(known, len(event.block_hashes)):
            if position or parent is not None:
                end = _distinguish(end, _extra(event, position))
            tokens = (*rest, *event.token_ids[position * size : (position + 1) * size])
            keys = block_keys(tokens, end)
            end = keys[-1] if keys else end
            rest = tokens[len(keys) * BLOCK_SIZE_TOKENS :]
            row = blocks.add(event.block_hashes[position], row, end, len(keys), rest, tier)
            for key in keys:
                holdings.guesses.confirm(key)
        blocks.used(row)
        return True

    def _remove(self, holdings: _Holdings, event: BlockRemoved) -> None:
        if tier := _tier(event):
            for block_hash in event.block_hashes:
                holdings.blocks.drop_copy(block_hash, tier)

    def _trim(self, added: int = 0) -> None:
        """Forgets guesses, then the least recently used blocks, of the largest endpoint.

        It forgets as many blocks as were just added, if there are too many, and at most MAX_EVICTED more.
        """
        most = max(0, added) + MAX_EVICTED
        while self._total > self._max_blocks:
            holdings = max(self._endpoints.values(), key=_Holdings.size)
            before = holdings.size()
            # Some more than needed, so that a full index does not look for its largest part at every event.
            spare = min(SLICE_BLOCKS, before // 10)
            excess = max(1, min(before, self._total - self._max_blocks + spare, most))
            holdings.guesses.evict(min(excess, len(holdings.guesses)))
            if (left := excess - (before - holdings.size())) > 0:
                holdings.blocks.evict(left)
            self._total += holdings.size() - before
            most -= excess
            if most <= 0:
                return  # The rest goes with the next calls.


def _tier(event: BlockStored | BlockRemoved) -> int:
    """Returns the tier of an event's blocks, 0 if it is not known. Further groups of a hybrid model say nothing about
    hits.
    """
    return 0 if event.group_idx else TIERS.get(event.medium, 0)


def _extra(event: BlockStored, position: int) -> tuple[Any, ...]:
    """Returns what distinguishes a block apart from tokens, parent and adapter (the root includes the adapter)."""
    extra = event.extra_keys[position] if event.extra_keys and position < len(event.extra_keys) else None
    return tuple(item for item in extra or () if item != event.lora_name)


def _root(event: BlockStored) -> bytes:
    adapter = event.lora_name or ("" if event.lora_id is None else str(event.lora_id))
    match _extra(event, 0):
        case ():
            return prompt_root(adapter)
        case (str(salt),):
            return prompt_root(adapter, salt)
        case extra:
            return _distinguish(prompt_root(adapter), extra)


def _distinguish(parent: bytes, extra: tuple[Any, ...]) -> bytes:
    """Returns a parent under which no text prompt's keys are found: the gateway does not know hashes of media."""
    return root_key(parent.hex(), "", repr(extra)) if extra else parent
