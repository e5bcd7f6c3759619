"""Which endpoint holds which blocks of which prompts, rebuilt from KV events in our own chain of keys.

An event brings token ids and the sender's hashes. The keys are computed here from the token ids; the sender's hashes
only name its blocks in later events, so an engine with another hash, salt or block size needs no trust. Guesses stand
in until the event of a routed prompt comes. Pure: no sockets, no sequence numbers, time is passed in.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import Any

from mini_infer_contract.blocks import BLOCK_SIZE_TOKENS, block_keys, root_key
from mini_infer_contract.events import MEDIUM_GPU, AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVEvent


def prompt_root(adapter: str = "", salt: str = "") -> bytes:
    """The parent of a prompt's first block in the gateway's keys.

    No model revision in it: hits are looked up an endpoint at a time, and an endpoint serves one revision.
    """
    return root_key("", adapter, salt)


@dataclass(slots=True)
class _Block:
    """One block of an endpoint's: its place in our chain."""

    end: bytes
    """Our last key at or before its end."""
    rest: tuple[int, ...]
    """Token ids after `end`: fewer than a block, and none wherever the sender's block size is a multiple of ours."""
    parent: "_Block | None"
    children: int = 0
    """Blocks that hang on this one: where there are several, several conversations share it."""


@dataclass(frozen=True, slots=True)
class Hit:
    """What an endpoint holds of one prompt."""

    blocks: int
    """From the first on, without a gap."""
    shared_blocks: int
    """Those of them that other prompts held there begin with too."""
    sharers: int
    """How many continuations the shared part has."""


NO_HIT = Hit(0, 0, 1)


@dataclass(slots=True)
class _Holdings:
    """What one endpoint holds."""

    by_hash: dict[BlockHash, _Block] = field(default_factory=dict)
    owner: dict[bytes, BlockHash] = field(default_factory=dict)
    """Our key -> the sender's block that ends with it; the least recently used first."""
    step: int = 1
    """Ours to the smallest run of the sender's blocks that ends where one of ours does: it shares whole blocks only."""
    stale_until_s: float | None = None
    """Its events stopped: what they said is believed until then; None: they come."""
    guesses: dict[bytes, float] = field(default_factory=dict)
    """Our key -> when it expires, on the caller's clock; the oldest first."""

    def size(self) -> int:
        return max(len(self.owner), len(self.by_hash)) + len(self.guesses)


class PrefixIndex:
    """The holdings of all endpoints, at most `max_blocks` in all."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._endpoints: dict[str, _Holdings] = {}
        self._total = 0

    def apply(self, endpoint: str, events: Sequence[KVEvent]) -> int:
        """Takes an endpoint's events in order; returns how many chains hung on a parent that is not known here."""
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
                    holdings.by_hash.clear()
                    holdings.owner.clear()
                    holdings.guesses.clear()
        self._total += holdings.size() - before
        self._trim()
        return orphans

    def guess(self, endpoint: str, keys: Sequence[bytes], expires_s: float) -> None:
        """A prompt with these keys was just sent there: they count as held until `expires_s`, or until an event."""
        holdings = self._holdings(endpoint)
        before = holdings.size()
        # Children first, so that of one prompt they are also the first to be forgotten.
        for key in reversed(keys):
            if (owner := holdings.owner.pop(key, None)) is not None:
                holdings.owner[key] = owner
            else:
                holdings.guesses.pop(key, None)
                holdings.guesses[key] = expires_s
        self._total += holdings.size() - before
        self._trim()

    def mark_stale(self, endpoint: str, until_s: float) -> None:
        """Events stopped while the endpoint lives: what they said counts until then, or until `clear`."""
        if holdings := self._endpoints.get(endpoint):
            holdings.stale_until_s = until_s

    def expire(self, now_s: float) -> None:
        """Drops guesses that nothing confirmed and what is stale; to be called now and then."""
        for holdings in self._endpoints.values():
            if holdings.stale_until_s is not None and holdings.stale_until_s <= now_s:
                self._total -= holdings.size() - len(holdings.guesses)
                holdings.by_hash.clear()
                holdings.owner.clear()
                holdings.stale_until_s = None
            expired = [key for key, expires_s in holdings.guesses.items() if expires_s <= now_s]
            for key in expired:
                del holdings.guesses[key]
            self._total -= len(expired)

    def hit(self, endpoint: str, keys: Sequence[bytes], now_s: float) -> Hit:
        """What is held there of a prompt with these keys."""
        holdings = self._endpoints.get(endpoint)
        if holdings is None:
            return NO_HIT
        owner, guesses, by_hash = holdings.owner, holdings.guesses, holdings.by_hash
        blocks, shared_blocks, sharers, step = 0, 0, 1, holdings.step
        for position in range(step - 1, len(keys), step):
            key = keys[position]
            block_hash = owner.get(key)
            if block_hash is not None:
                children = by_hash[block_hash].children
                if children > 1:
                    shared_blocks, sharers = position + 1, max(sharers, children)
            elif guesses.get(key, now_s) <= now_s:
                break
            blocks = position + 1
        return Hit(blocks, shared_blocks, sharers)

    def held_blocks(self, endpoint: str) -> int:
        """How many blocks are held there in all, guesses included."""
        holdings = self._endpoints.get(endpoint)
        return len(holdings.owner) * holdings.step + len(holdings.guesses) if holdings else 0

    def clear(self, endpoint: str) -> None:
        """The endpoint is gone, or what is known of it is not to be trusted."""
        holdings = self._endpoints.pop(endpoint, None)
        if holdings:
            self._total -= holdings.size()

    def _holdings(self, endpoint: str) -> _Holdings:
        return self._endpoints.setdefault(endpoint, _Holdings())

    def _store(self, holdings: _Holdings, event: BlockStored) -> bool:
        rest: tuple[int, ...] = ()
        if not _on_device(event):
            return True
        if event.parent_block_hash is None:
            parent, end = None, _root(event)
        elif parent := holdings.by_hash.get(event.parent_block_hash):
            end, rest = parent.end, parent.rest
        else:
            return False
        holdings.step = lcm(max(1, event.block_size), BLOCK_SIZE_TOKENS) // BLOCK_SIZE_TOKENS
        for position, block_hash in enumerate(event.block_hashes):
            if position or event.parent_block_hash is not None:
                end = _distinguish(end, _extra(event, position))
            tokens = (*rest, *event.token_ids[position * event.block_size : (position + 1) * event.block_size])
            keys = block_keys(tokens, end)
            end = keys[-1] if keys else end
            rest = tokens[len(keys) * BLOCK_SIZE_TOKENS :]
            known = holdings.by_hash.get(block_hash)
            if known is None or known.end != end or known.rest != rest:
                _drop(holdings, block_hash)
                if parent:
                    parent.children += 1
                known = holdings.by_hash[block_hash] = _Block(end, rest, parent)
            parent = known
            for key in keys:
                holdings.guesses.pop(key, None)
            if keys and not rest:
                holdings.owner.pop(end, None)
                holdings.owner[end] = block_hash
        return True

    def _remove(self, holdings: _Holdings, event: BlockRemoved) -> None:
        if _on_device(event):
            for block_hash in event.block_hashes:
                _drop(holdings, block_hash)

    def _trim(self) -> None:
        """Forgets the least recently used blocks of the largest endpoint."""
        while self._total > self._max_blocks:
            holdings = max(self._endpoints.values(), key=_Holdings.size)
            before = holdings.size()
            # A tenth of it at once, so that a full index does not look for its largest part at every event.
            target = before - max(self._total - self._max_blocks, before // 10)
            while holdings.guesses and holdings.size() > target:
                del holdings.guesses[next(iter(holdings.guesses))]
            while holdings.owner and holdings.size() > target:
                _drop(holdings, next(iter(holdings.owner.values())))
            while holdings.by_hash and holdings.size() > target:
                _drop(holdings, next(iter(holdings.by_hash)))
            self._total -= before - holdings.size()


def _drop(holdings: _Holdings, block_hash: BlockHash) -> None:
    block = holdings.by_hash.pop(block_hash, None)
    if block is None:
        return
    if block.parent:
        block.parent.children -= 1
    if holdings.owner.get(block.end) == block_hash:
        del holdings.owner[block.end]


def _on_device(event: BlockStored | BlockRemoved) -> bool:
    """Blocks of other tiers, and of a hybrid model's further groups, say nothing about a hit on the device."""
    return event.medium in (None, MEDIUM_GPU) and not event.group_idx


def _extra(event: BlockStored, position: int) -> tuple[Any, ...]:
    """What tells a block apart beside tokens and parent, without the adapter, which is the root's."""
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
    """A parent under which no text prompt's keys are found: media hashes are not known to the gateway."""
    return root_key(parent.hex(), "", repr(extra)) if extra else parent
