"""Writes pages behind: those that the device will evict soon to main memory, and those of main memory to the disk.

So are checkpoints of recurrent state, in as many pages of main memory as they take. A page stays cached where it is,
while it is copied and afterwards: its eviction loses nothing from then on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from mini_infer_engine.core.kv_tiers.copies import Copies
from mini_infer_engine.core.kv_tiers.host_blocks import HostBlocks
from mini_infer_engine.core.kv_tiers.page_record import PageRecord, later_part_keys, page_key, state_key, state_records
from mini_infer_engine.core.kv_tiers.tier import Tier
from mini_infer_engine.core.kv_tiers.tier_index import DiskIndex
from mini_infer_engine.core.kv_tiers.tier_memory import DiskMoved, DiskPage, Moved, PageMove, StateMove, sealed
from mini_infer_engine.core.prefix_cache import Block, PrefixCache
from mini_infer_engine.core.state_checkpoints import Checkpoint, StateCheckpoints

_BYTES_AT_ONCE = 64 << 20
"""Bytes that are written behind at a time. Their pages cannot be evicted meanwhile."""
_MOST_SCANNED, _MOST_SCANNED_IDLE = 256, 16_384
"""Most cached pages that are looked at in a step, which takes some 50 us, and while nothing runs."""


def window(num_pages: int, num_below: int, num_blank_below: int, *, is_idle: bool) -> int:
    """Returns how many of a tier's cached pages, the least recently used first, should be in the next tier too, which
    has `num_below` pages.

    While requests run it is a fourth of the pages, of which a step looks at some, and no more than half of those below:
    what was copied just now is not to be evicted for it. While nothing runs it is all of them, as long as nothing is
    evicted for them.
    """
    if is_idle:
        return _MOST_SCANNED_IDLE if num_blank_below else 0
    return max(1, min(num_pages // 4, num_below // 2, _MOST_SCANNED))


@dataclass(slots=True, frozen=True)
class _Found:
    """What is to be stored next: pages of the device with their blocks, and checkpoints of states."""

    pages: list[tuple[int, list[Block]]]
    states: list[Checkpoint]


class WriteBehind:
    """The copies from the device to main memory, and from there to the disk."""

    def __init__(
        self,
        cache: PrefixCache,
        host: HostBlocks,
        disk: DiskIndex,
        tiers: tuple[Tier, Tier],
        copies: Copies,
        checkpoints: StateCheckpoints | None = None,
    ) -> None:
        self._cache, self._host, self._disk = cache, host, disk
        self._host_tier, self._disk_tier = tiers
        self._copies = copies
        self._checkpoints = checkpoints
        self._pages_at_once = max(1, _BYTES_AT_ONCE // copies.host.page_bytes)
        self.targets: list[int] = []
        """Pages of main memory to which something is being copied."""
        self.writing: set[int] = set()
        """Pages of main memory that are being written to the disk."""
        self._scanned_device: tuple[object, ...] | None = None
        self._scanned_host: tuple[int, bool] | None = None
        """The states of the caches when all pages in the window were in the next tier already."""
        self._unwritable: set[bytes] = set()
        """Keys of pages that the disk cannot store."""
        self._generation = 0
        """Copies that were requested in an earlier generation are forgotten when they end."""

    def forget(self) -> None:
        """Forgets what is being copied: its contents cannot be relied on."""
        self._generation += 1

    def run(self, *, is_idle: bool) -> bool:
        """Requests the next copies. Returns False if there is nothing to write behind."""
        to_host = self._host_tier.is_on and not self.targets and self._store(is_idle=is_idle)
        to_disk = self._disk_tier.is_on and not self.writing and self._write(is_idle=is_idle)
        return to_host or to_disk

    def _store(self, *, is_idle: bool) -> bool:
        """Copies pages and states that the device will evict soon. They may be evicted meanwhile, and their copies are
        forgotten then: no allocation waits for a copy.
        """
        pool, host = self._cache.pool, self._host
        state = (pool.num_cached, pool.least_recently_used(1), *self._state_of_checkpoints(), is_idle)
        if state == self._scanned_device:
            return False
        limit = host.num_blank if is_idle else host.num_free
        states = self._find_states(limit, is_idle=is_idle)
        size = self._copies.host.pages_per_state
        pages = self._find_pages(limit - len(states) * size, is_idle=is_idle)
        if not pages and not states:
            self._scanned_device = state
            return False
        wanted = len(states) * size + len(pages)
        targets = host.allocate(wanted)  # fewer than wanted where other engines use the rest
        states = states[: len(targets) // size] if size else []
        for_states, for_pages = targets[: len(states) * size], targets[len(states) * size :]
        moves = [PageMove(page, target) for (page, _), target in zip(pages, for_pages, strict=False)]
        unused = for_pages[len(moves) :]
        host.release_all(unused)
        self.targets = targets[: len(targets) - len(unused)]
        if not self.targets:
            return False
        parts = [tuple(for_states[place * size : (place + 1) * size]) for place in range(len(states))]
        state_moves = [StateMove(one.slot, own) for one, own in zip(states, parts, strict=True)]
        stored = partial(self._stored, _Found(pages, states), moves, state_moves, self._generation)
        self._copies.store(moves, state_moves, stored)
        return True

    def _find_pages(self, most: int, *, is_idle: bool) -> list[tuple[int, list[Block]]]:
        """Returns up to `most` pages that are to be stored, and their blocks."""
        pool, cache, found = self._cache.pool, self._cache, list[tuple[int, list[Block]]]()
        count = window(pool.num_pages, self._host.num_pages, self._host.num_blank, is_idle=is_idle)
        limit = min(self._pages_at_once, most)
        for page in pool.least_recently_used(count):
            if len(found) >= limit:
                break
            blocks = cache.whole_page(page)
            if blocks is not None and page_key(blocks) not in self._host:
                found.append((page, blocks))
        return found

    def _state_of_checkpoints(self) -> tuple[object, ...]:
        if self._checkpoints is None:
            return ()
        return len(self._checkpoints), self._checkpoints.num_free, tuple(self._checkpoints.least_recently_used(1))

    def _find_states(self, most_pages: int, *, is_idle: bool) -> list[Checkpoint]:
        """Returns checkpoints that are to be stored in up to `most_pages` pages, but no more than half of those that
        are copied at once: pages wait behind them.
        """
        checkpoints, size, host = self._checkpoints, self._copies.host.pages_per_state, self._host
        if checkpoints is None or not size:
            return []
        count = window(checkpoints.num_slots, host.num_pages // size, host.num_blank // size, is_idle=is_idle)
        limit = min(max(1, self._pages_at_once // 2 // size), most_pages // size)
        found: list[Checkpoint] = []
        for checkpoint in checkpoints.least_recently_used(count):
            if len(found) >= limit:
                break
            if not self._is_stored(checkpoint.key):
                found.append(checkpoint)
        return found

    def _is_stored(self, key: bytes) -> bool:
        """True if all parts of a state are in main memory. If only some are, the first one is forgotten, so that the
        state can be stored anew.
        """
        first = self._host.page(state_key(key))
        record = None if first is None else self._host.record(first)
        if first is None or record is None:
            return state_key(key) in self._host  # nothing that it has can be stored
        if all(part in self._host for part in later_part_keys(key, record.digest, self._copies.host.pages_per_state)):
            return True
        own = [page for page in self._host.acquire([record.key]) if page is not None]
        for page in own:
            self._host.evict(page)
        self._host.release_all(own)
        return False

    def _stored(
        self, found: _Found, moves: list[PageMove], states: list[StateMove], generation: int, moved: Moved
    ) -> None:
        targets, self.targets = self.targets, []
        if moved.error:
            self._host_tier.failed(moved.error)
        elif generation == self._generation:
            self._host_tier.stored(len(targets) * self._copies.host.page_bytes, moved.seconds)
            self._host.add_all(self._contents(found, moves, states, moved.digests))
        self._host.release_all(targets)

    def _contents(
        self, found: _Found, moves: list[PageMove], states: list[StateMove], digests: Sequence[int]
    ) -> list[tuple[int, PageRecord]]:
        """Returns what has been stored and was not evicted meanwhile, and perhaps overwritten, by page."""
        identity, contents = self._copies.host.identity, list[tuple[int, PageRecord]]()
        for move, (page, blocks), digest in zip(moves, found.pages, digests, strict=False):
            if self._cache.whole_page(page) is blocks:
                record = PageRecord(tuple(blocks), sealed(digest, page_key(blocks), identity))
                contents.append((move.target, record))
        for state, checkpoint, digest in zip(states, found.states, digests[len(moves) :], strict=False):
            if self._checkpoints is not None and self._checkpoints.in_slot(checkpoint.slot) is checkpoint:
                seal = sealed(digest, state_key(checkpoint.key), identity)
                contents += zip(state.pages, state_records(checkpoint.key, seal, len(state.pages)), strict=True)
        return contents

    def _write(self, *, is_idle: bool) -> bool:
        host, disk, page_bytes = self._host, self._copies.disk, self._copies.host.page_bytes
        if disk is None:
            return False
        state = (self._host.num_changes, is_idle)
        if state == self._scanned_host:
            return False
        num_below = disk.capacity_bytes // page_bytes
        num_left = (disk.capacity_bytes - disk.used_bytes) // page_bytes
        count = window(host.num_pages, num_below, num_left, is_idle=is_idle)
        limit = min(self._pages_at_once, num_left) if is_idle else self._pages_at_once
        found: list[PageRecord] = []

        def is_new(page: int) -> bool:
            record = self._host.record(page) if len(found) < limit else None
            if record is None or record.key in self._disk or record.key in self._unwritable:
                return False
            found.append(record)
            return True

        pages = host.begin_eviction(count, is_new)
        if not pages:
            self._scanned_host = state
        self.writing.update(pages)
        for page, record in zip(pages, found, strict=True):
            self._copies.write(page, record, partial(self._written, page, record, self._generation))
        return bool(pages)

    def _written(self, page: int, record: PageRecord, generation: int, moved: DiskMoved) -> None:
        self.writing.discard(page)
        self._host.end_eviction([page])
        if moved.error:
            self._disk_tier.failed(moved.error)
        elif moved.is_gone:
            self._unwritable.add(record.key)
        elif generation == self._generation:
            self._disk_tier.stored(self._copies.host.page_bytes, moved.seconds)
            self._disk.add(DiskPage(record, moved.location))
