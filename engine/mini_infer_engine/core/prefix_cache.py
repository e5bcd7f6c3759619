"""Tracks which blocks of sixteen tokens are in which pages: hits for new prompts, and events for other components.

A key names a block and everything before it, so it also fixes the block's offset in a page. It is registered once for
each page that has it (a copy): Stored is emitted when the first copy appears, Removed when the last one goes. A page
has its blocks in order and without gaps, so any user of a page's later block has its earlier ones. Nothing here decides
which sequences run; references are the pool's.
"""

from array import array
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import groupby
from typing import cast

import msgspec

from mini_infer_contract.blocks import BLOCK_SIZE_TOKENS, KEY_BYTES, block_keys
from mini_infer_contract.events import MEDIUM_GPU, BlockStored, KVEvent, block_removed, block_stored
from mini_infer_engine.core.kv_eviction import NEVER
from mini_infer_engine.core.page_allocator import PageAllocator
from mini_infer_engine.core.sequence import Sequence


class Block(msgspec.Struct, eq=False, gc=False):
    """A cached block of one KV group, and its pages."""

    group: int
    """Index of the KV group whose layers' keys and values it has: a key names a block once in each group."""
    key: bytes
    parent: bytes | None
    packed_tokens: bytes
    """Token ids of four bytes each, as in an `array("I")`: a fifth of the memory of a tuple."""
    salt: str
    pages: list[int]
    """All pages that contain it, first copy first."""


@dataclass(slots=True, frozen=True)
class Hit:
    """The longest cached prefix of a sequence."""

    num_tokens: int
    pages: list[int]
    """Whole pages that can be shared."""
    tail_page: int | None
    """The page that begins with the num_tokens % page_size tokens after the whole pages."""
    others: "tuple[Hit, ...]" = ()
    """The hits of the same tokens in the other KV groups. Where a group needs not all of them, `pages` has null
    pages.
    """

    def without_tail(self, page_size: int) -> "Hit":
        """Returns the hit of the whole pages alone."""
        return Hit(len(self.pages) * page_size, self.pages, None)


MISS = Hit(0, [], None)
_FEW_BLOCKS = 4
"""Number of blocks whose keys are computed all at once: a lookup of the first key alone would compute it twice."""


class PrefixCache:
    """Cached blocks by key and by page. It is the pool's `Contents`: it forgets a page's blocks when that is reused."""

    is_present = True

    def __init__(self, num_pages: int, page_size: int, *, record_events: bool = True, num_groups: int = 1) -> None:
        """Creates an empty cache and its pool. Events are those of group 0."""
        if page_size % BLOCK_SIZE_TOKENS:
            raise ValueError(f"page_size is {page_size} tokens: choose a multiple of {BLOCK_SIZE_TOKENS}")
        self.pool = PageAllocator(num_pages, page_size, self)
        self._blocks_per_page = page_size // BLOCK_SIZE_TOKENS
        self._groups: list[dict[bytes, Block]] = [{} for _ in range(num_groups)]
        self._blocks = self._groups[0]
        self._in_page: list[list[Block]] = [[] for _ in range(num_pages)]
        self._record_events = record_events
        self._changes: list[Block | list[bytes]] = []  # blocks that were stored, or keys that were removed together
        self.whole_pages: deque[int] | None = None
        """Pages that have got their last block, the oldest first, for who takes them from here. None: nobody does."""

    @property
    def num_groups(self) -> int:
        """The number of KV groups."""
        return len(self._groups)

    def match_length(self, sequence: Sequence) -> int:
        """Returns the blocks of the longest cached prefix, without what must be computed: the last known token for its
        logits, or more.
        """
        blocks, keys = self._blocks, sequence.keys
        limit = sequence.most_cached // BLOCK_SIZE_TOKENS
        count = 0
        if not keys and limit > _FEW_BLOCKS and sequence.first_key() not in blocks:
            return 0
        while count < limit:
            if count == len(keys):
                sequence.add_keys()
            found = list(map(blocks.__contains__, keys[count:limit]))
            if not all(found):
                return count + found.index(False)
            count += len(found)
        return count

    def match(self, sequence: Sequence) -> Hit:
        """Returns the longest cached prefix and its pages, none of which is acquired.

        A tail inside a page is worth a copy from one block on: moving 16 tokens is a few microseconds of memory traffic
        on a device, computing them again is a pass through the model's layers.
        """
        count = self.match_length(sequence)
        step, blocks, keys = self._blocks_per_page, self._blocks, sequence.keys
        pages = [blocks[key].pages[0] for key in keys[step - 1 : count : step]]  # the first copy of each
        tail_page = blocks[keys[count - 1]].pages[0] if count % step else None
        return Hit(count * BLOCK_SIZE_TOKENS, pages, tail_page)

    def longest(self, token_ids: Items[int], root: bytes) -> tuple[list[int], int]:
        """Returns the pages of the longest cached prefix of any tokens, in order, and its number of tokens. Acquires no
        page.

        The last page may be used only in part.
        """
        keys, count = block_keys(token_ids, root), 0
        while count < len(keys) and keys[count] in self._blocks:
            count += 1
        step = self._blocks_per_page
        last_of_pages = [*range(step - 1, count, step), *([count - 1] if count % step else [])]
        return [self._blocks[keys[index]].pages[0] for index in last_of_pages], count * BLOCK_SIZE_TOKENS

    def publish(self, sequence: Sequence) -> None:
        """Registers the blocks that launched passes fill and whose tokens are known.

        A sequence that hits them is launched later, so it runs after the pass that writes them, whatever becomes of the
        writer.
        """
        begin = sequence.num_published
        end = min(sequence.num_computed, len(sequence.token_ids)) // BLOCK_SIZE_TOKENS
        if begin >= end:
            return
        self._register(sequence, begin, end)
        sequence.num_published = end

    def _register(self, sequence: Sequence, begin: int, end: int) -> None:
        """Registers the blocks from `begin` to `end` in the sequence's pages."""
        keys, pages, blocks_per_page, blocks = (
            sequence.known_keys(end),
            sequence.pages,
            self._blocks_per_page,
            self._blocks,
        )
        for index in range(begin, end):
            block = blocks.get(keys[index])
            if block is None:
                block = blocks[keys[index]] = block_of(sequence, index)
                if self._record_events:
                    self._changes.append(block)
            self._add_to_page(block, pages[index // blocks_per_page])

    def _add_to_page(self, block: Block, page: int) -> None:
        """Registers a copy of a block."""
        block.pages.append(page)
        blocks = self._in_page[page]
        blocks.append(block)
        if self.whole_pages is not None and len(blocks) == self._blocks_per_page:
            self.whole_pages.append(page)

    def pages_of(self, keys: Items[bytes]) -> list[int]:
        """Returns the pages of those of these blocks that are cached. After its key, a block of another KV group than
        the first has the number of the group in one byte.
        """
        blocks = (self._groups[sum(key[KEY_BYTES:])].get(key[:KEY_BYTES]) for key in keys)
        return [block.pages[0] for block in blocks if block is not None]

    def knows(self, page: int) -> bool:
        """Returns True if blocks of the page can be hit."""
        return bool(self._in_page[page])

    def whole_page(self, page: int) -> list[Block] | None:
        """Returns the blocks of a page, or None if not all of its blocks can be hit."""
        blocks = self._in_page[page]
        return blocks if len(blocks) == self._blocks_per_page else None

    def retains(self, page: int) -> bool:
        """Implements `Contents` for the pool: an unused page is kept unless another page has the same contents.

        The other page counts as used now, so that it outlives the blocks that continue this one.
        """
        blocks = self._in_page[page]
        if not blocks:
            return False
        copies = blocks[-1].pages
        if len(copies) == 1:
            return True
        self.evict(page)
        self.pool.touch(copies[0])
        return False

    def evict(self, page: int) -> None:
        """Implements `Contents` for the pool: the page is about to get new contents."""
        removed = []
        for block in self._in_page[page]:
            block.pages.remove(page)
            if not block.pages:
                del self._groups[block.group][block.key]
                if not block.group:
                    removed.append(block.key)
        self._in_page[page] = []
        if removed and self._record_events:
            self._record_removed(removed)

    def forget(self, pages: Items[int]) -> None:
        """Forgets the blocks of pages that are in use, the last of a prefix first: their user writes to them."""
        for page in pages:
            self.evict(page)

    def _record_removed(self, keys: list[bytes]) -> None:
        """Records that the last copies of these blocks have gone together."""
        self._changes.append(keys)

    def clear(self) -> None:
        """Forgets all blocks, because pages' contents cannot be relied on. Nothing may be running, as it would use its
        blocks.
        """
        for page in range(self.pool.num_pages):
            self.evict(page)

    def take_events(self) -> list[KVEvent]:
        """Returns the changes since the last call, in order."""
        changes, self._changes = self._changes, []
        return events_of(changes)

    def snapshot(self) -> list[BlockStored]:
        """Returns all blocks that are cached now, parents before children (a parent always outlives its children)."""
        return chains(self._blocks.values())


class NoPrefixCache:
    """Stands in for a `PrefixCache` where prefix caching is off: nothing is found, remembered or reported."""

    is_present = False

    def match_length(self, sequence: Sequence) -> int:
        """Returns 0 blocks."""
        del sequence
        return 0

    def match(self, sequence: Sequence) -> Hit:
        """Returns no pages."""
        del sequence
        return MISS

    def longest(self, token_ids: Items[int], root: bytes) -> tuple[list[int], int]:
        """Returns no pages."""
        del token_ids, root
        return [], 0

    def publish(self, sequence: Sequence) -> None:
        """Remembers nothing. The sequence has no block whose end is to be watched for."""
        sequence.next_block_end = NEVER

    def knows(self, page: int) -> bool:
        """Returns False: no page has cached blocks."""
        del page
        return False

    def forget(self, pages: Items[int]) -> None:
        """Forgets nothing, for nothing is known."""

    def clear(self) -> None:
        """Forgets nothing, for nothing is known."""

    def take_events(self) -> list[KVEvent]:
        """Returns no events."""
        return []

    def snapshot(self) -> list[BlockStored]:
        """Returns no blocks."""
        return []


def events_of(changes: Iterable[Block | list[bytes]], medium: str = MEDIUM_GPU) -> list[KVEvent]:
    """Returns the events of a medium's changes, in order: blocks that were stored, or keys that went together."""
    events: list[KVEvent] = []
    for are_stored, group in groupby(changes, lambda change: isinstance(change, Block)):
        if are_stored:
            events += chains(cast("Iterable[Block]", group), medium)
        else:
            events += [block_removed(keys, medium) for keys in cast("Iterable[list[bytes]]", group)]
    return events


def chains(blocks: Iterable[Block], medium: str = MEDIUM_GPU) -> list[BlockStored]:
    """Returns one event for each run of blocks that continue each other."""
    runs: list[list[Block]] = []
    for block in blocks:
        if runs and block.parent == runs[-1][-1].key:
            runs[-1].append(block)
        else:
            runs.append([block])
    return [
        block_stored(
            [block.key for block in run],
            run[0].parent,
            array("I", b"".join(block.packed_tokens for block in run)).tolist(),
            run[0].salt,
            medium,
        )
        for run in runs
    ]


def block_of(sequence: Sequence, index: int, group: int = 0) -> Block:
    """Returns a block that is in no page yet."""
    keys, start = sequence.keys, index * BLOCK_SIZE_TOKENS
    tokens = sequence.key_ids(start, start + BLOCK_SIZE_TOKENS).tobytes()
    return Block(group, keys[index], keys[index - 1] if index else None, tokens, sequence.request.cache_salt, [])
