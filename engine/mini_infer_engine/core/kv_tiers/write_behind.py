"""Writes pages behind: those of the device to main memory, and those that main memory will evict soon to the disk.

Main memory that is much larger than the device gets pages as soon as passes have been launched that fill some, while
their sequences still run: under load the device evicts pages within few steps of a sequence's end. A smaller one gets
those that the device will evict soon. Checkpoints of recurrent state are written behind, too, in as many pages of main
memory as they take. A page stays cached where it is, while it is copied and afterwards: its eviction loses nothing from
then on.
"""

from collections import deque
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
"""Bytes that are written to the disk at a time. Their pages cannot be evicted meanwhile."""
_STORED_S, _MOST_STORED = 0.02, 1 << 30
"""Seconds of copying to main memory that are requested in a step, and the most bytes: more than its pass computes."""
_MOST_STORES = 4
"""Requests at a time: a copy begins after the passes that are in flight, and its end is noticed a step later."""
_LEAST_WHOLE, _LEAST_SHARE = 16, 1 / 16
"""Pages that passes have filled by which a store begins while requests run, and their share of a small device: a store
takes the host half a millisecond, and what the device may evict soon does not wait for it.
"""
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


def stored_at_once(page_bytes: int, bytes_per_s: float) -> int:
    """Returns how many pages are copied to main memory in a step."""
    return max(1, min(max(_BYTES_AT_ONCE, int(bytes_per_s * _STORED_S)), _MOST_STORED) // page_bytes)


def stores_all(num_pages: int, num_below: int) -> bool:
    """True if every page is to be stored at once. What is in both tiers takes room in main memory that is as large as
    the device; of one that is twice as large at least half has what the device has not.
    """
    return num_below >= 2 * num_pages


@dataclass(slots=True, frozen=True)
class _Found:
    """Pages of the device with their blocks, and checkpoints of states, that are to be stored next."""

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
        self._written_at_once = max(1, _BYTES_AT_ONCE // copies.host.page_bytes)
        self._stored_at_once = stored_at_once(copies.host.page_bytes, copies.host.bytes_per_s)
        self._least_whole = min(_LEAST_WHOLE, int(cache.pool.num_pages * _LEAST_SHARE))
        self.targets: set[int] = set()
        """Pages of main memory to which something is being copied."""
        self._sources: set[int] = set()
        """Pages of the device that are being copied."""
        self._states: set[int] = set()
        """Slots of checkpoints that are being copied."""
        self._num_stores = 0
        """Requests that have not ended."""
        if stores_all(cache.pool.num_pages, copies.host.num_pages):
            cache.whole_pages = deque(maxlen=cache.pool.num_pages)
        self.writing: set[int] = set()
        """Pages of main memory that are being written to the disk."""
        self._stored_until = 0
        """The number of pages that leave the device's cached ones before one does that may not be in main memory."""
        self._num_evicted = 0
        """Pages that main memory had evicted when that number was set."""
        self._seen_device: tuple[object, ...] | None = None
        self._seen_states: tuple[object, ...] | None = None
        self._scanned_host: tuple[int, bool] | None = None
        """The states of the caches when all pages in the window were in the next tier already."""
        self._unwritable: set[bytes] = set()
        """Keys of pages that the disk cannot store."""
        self._generation = 0
        """Copies that were requested in an earlier generation are forgotten when they end."""

    def forget(self) -> None:
        """Forgets what is being copied: its contents cannot be relied on."""
        self._generation += 1
        self._stored_until, self._seen_device, self._seen_states = 0, None, None

    def run(self, *, is_idle: bool) -> bool:
        """Requests the next copies. Returns False if there is nothing to write behind."""
        to_host = self._host_tier.is_on and self._num_stores < _MOST_STORES and self._store(is_idle=is_idle)
        to_disk = self._disk_tier.is_on and not self.writing and self._write(is_idle=is_idle)
        return to_host or to_disk

    def _store(self, *, is_idle: bool) -> bool:
        """Copies pages and states of the device. They may be evicted meanwhile, and their copies are forgotten then: no
        allocation waits for a copy.
        """
        host, size = self._host, self._copies.host.pages_per_state
        limit = host.num_blank if is_idle else host.num_free
        found = self._find(limit, is_idle=is_idle)
        if not found.pages and not found.states:
            return False
        wanted = len(found.states) * size + len(found.pages)
        targets = host.allocate(wanted)  # fewer than wanted where other engines use the rest
        num_states = min(len(found.states), len(targets) // size) if size else 0
        for_states, for_pages = targets[: num_states * size], targets[num_states * size :]
        moves = [PageMove(page, target) for (page, _), target in zip(found.pages, for_pages, strict=False)]
        unused = for_pages[len(moves) :]
        host.release_all(unused)
        targets = targets[: len(targets) - len(unused)]
        if len(targets) < wanted:
            self._stored_until, self._seen_device = 0, None
        if not targets:
            return False
        parts = [tuple(for_states[place * size : (place + 1) * size]) for place in range(num_states)]
        states = [StateMove(one.slot, own) for one, own in zip(found.states, parts, strict=False)]
        self.targets.update(targets)
        self._sources.update(move.source for move in moves)
        self._states.update(state.checkpoint for state in states)
        self._num_stores += 1
        self._copies.store(moves, states, partial(self._stored, found, targets, moves, states, self._generation))
        return True

    def _find(self, most: int, *, is_idle: bool) -> _Found:
        """Returns what is to be stored next, in up to `most` pages of main memory: first what will be evicted soon."""
        states = self._find_states(most, is_idle=is_idle)
        limit = min(self._stored_at_once, most - len(states) * self._copies.host.pages_per_state)
        pages = self._find_cached(limit, is_idle=is_idle)
        whole = self._cache.whole_pages
        if whole and (is_idle or len(whole) >= min(self._least_whole, limit)):
            while whole and len(pages) < limit:
                self._add(pages, whole.popleft())
        return _Found(list(pages.items()), states)

    def _find_cached(self, limit: int, *, is_idle: bool) -> dict[int, list[Block]]:
        """Returns up to `limit` pages of those that will be evicted soon. Blank pages are allocated before them.

        Where the order of eviction is that of use, nothing is looked at again before a fourth of the pages in the
        window have left it; then only what is new in it, unless main memory has evicted something.
        """
        pool, host, pages = self._cache.pool, self._host, dict[int, list[Block]]()
        count = window(pool.num_pages, host.num_pages, host.num_blank, is_idle=is_idle)
        if not is_idle:
            count -= pool.num_blank
        if count <= 0:
            return pages
        num_cached, num_taken = pool.num_cached, pool.num_taken
        state, num_evicted = (num_cached, num_taken, is_idle), (host.num_changes - len(host)) // 2
        num_stored = max(0, self._stored_until - num_taken)
        if state == self._seen_device if pool.has_leases else num_stored >= min(num_cached, count - count // 4):
            return pages
        if pool.has_leases or num_evicted != self._num_evicted:
            num_stored = 0
        for page in pool.least_recently_used(count)[num_stored:]:
            if len(pages) >= limit:
                return pages
            self._add(pages, page)
        self._stored_until, self._seen_device = num_taken + min(count, num_cached), state
        self._num_evicted = num_evicted
        return pages

    def _add(self, pages: dict[int, list[Block]], page: int) -> None:
        """Adds a page that is whole, not in main memory and not on its way there."""
        blocks = self._cache.whole_page(page)
        if blocks is not None and page not in self._sources and page_key(blocks) not in self._host:
            pages[page] = blocks

    def _find_states(self, most_pages: int, *, is_idle: bool) -> list[Checkpoint]:
        """Returns checkpoints that are to be stored in up to `most_pages` pages, but no more than half of those that
        are copied at once: pages wait behind them.
        """
        checkpoints, size, host = self._checkpoints, self._copies.host.pages_per_state, self._host
        if checkpoints is None or not size:
            return []
        state = (len(checkpoints), checkpoints.num_free, checkpoints.num_taken, host.num_changes, is_idle)
        if state == self._seen_states:
            return []
        count = window(checkpoints.num_slots, host.num_pages // size, host.num_blank // size, is_idle=is_idle)
        limit = min(max(1, self._stored_at_once // 2 // size), most_pages // size)
        found: list[Checkpoint] = []
        for checkpoint in checkpoints.least_recently_used(count):
            if len(found) >= limit:
                break
            if checkpoint.slot not in self._states and not self._is_stored(checkpoint.key):
                found.append(checkpoint)
        if not found:
            self._seen_states = state
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
        self,
        found: _Found,
        targets: list[int],
        moves: list[PageMove],
        states: list[StateMove],
        generation: int,
        moved: Moved,
    ) -> None:
        self._num_stores -= 1
        self.targets.difference_update(targets)
        self._sources.difference_update(move.source for move in moves)
        self._states.difference_update(state.checkpoint for state in states)
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
        limit = min(self._written_at_once, num_left) if is_idle else self._written_at_once
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
