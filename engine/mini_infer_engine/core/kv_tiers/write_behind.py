"""Writes pages behind: those that the device will evict soon to main memory, and those of main memory to the disk.

A page stays cached where it is, while it is copied and afterwards: its eviction loses nothing from then on.
"""

from functools import partial

from mini_infer_engine.core.kv_tiers.copies import Copies
from mini_infer_engine.core.kv_tiers.host_blocks import HostBlocks
from mini_infer_engine.core.kv_tiers.page_record import PageRecord
from mini_infer_engine.core.kv_tiers.tier import Tier
from mini_infer_engine.core.kv_tiers.tier_index import DiskIndex
from mini_infer_engine.core.kv_tiers.tier_memory import DiskMoved, DiskPage, Moved, PageMove, sealed
from mini_infer_engine.core.prefix_cache import Block, PrefixCache

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


class WriteBehind:
    """The copies from the device to main memory, and from there to the disk."""

    def __init__(
        self, cache: PrefixCache, host: HostBlocks, disk: DiskIndex, tiers: tuple[Tier, Tier], copies: Copies
    ) -> None:
        self._cache, self._host, self._disk = cache, host, disk
        self._host_tier, self._disk_tier = tiers
        self._copies = copies
        self._pages_at_once = max(1, _BYTES_AT_ONCE // copies.host.page_bytes)
        self.storing: list[PageMove] = []
        """Pages of the device, each with the page of main memory to which it is being copied."""
        self.writing: set[int] = set()
        """Pages of main memory that are being written to the disk."""
        self._scanned_device: tuple[int, list[int], bool] | None = None
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
        to_host = self._host_tier.is_on and not self.storing and self._store(is_idle=is_idle)
        to_disk = self._disk_tier.is_on and not self.writing and self._write(is_idle=is_idle)
        return to_host or to_disk

    def _store(self, *, is_idle: bool) -> bool:
        """Copies pages that the device will evict soon. They may be evicted meanwhile, and their copies are forgotten
        then: no allocation waits for a copy.
        """
        pool, host, cache = self._cache.pool, self._host, self._cache
        state = (pool.num_cached, pool.least_recently_used(1), is_idle)
        if state == self._scanned_device:
            return False
        count = window(pool.num_pages, host.num_pages, host.num_blank, is_idle=is_idle)
        limit = min(self._pages_at_once, host.num_blank if is_idle else host.num_free)
        sources, found = list[int](), list[list[Block]]()
        for page in pool.least_recently_used(count):
            if len(found) == limit:
                break
            blocks = cache.whole_page(page)
            if blocks is not None and blocks[-1].key not in self._host:
                found.append(blocks)
                sources.append(page)
        if not found:
            self._scanned_device = state
            return False
        targets = host.allocate(len(found))  # fewer than wanted where other engines use the rest
        self.storing = [PageMove(*pair) for pair in zip(sources, targets, strict=False)]
        if targets:
            self._copies.store(self.storing, partial(self._stored, found[: len(targets)], self._generation))
        return bool(targets)

    def _stored(self, blocks_of_pages: list[list[Block]], generation: int, moved: Moved) -> None:
        moves, self.storing = self.storing, []
        if moved.error:
            self._host_tier.failed(moved.error)
        elif generation == self._generation:
            self._host_tier.stored(len(moves) * self._copies.host.page_bytes, moved.seconds)
            identity = self._copies.host.identity
            self._host.add_all(
                [
                    (move.target, PageRecord(tuple(blocks), sealed(digest, blocks[-1].key, identity)))
                    for move, blocks, digest in zip(moves, blocks_of_pages, moved.digests, strict=True)
                    if self._cache.whole_page(move.source) is blocks  # else it was evicted, and perhaps overwritten
                ]
            )
        self._host.release_all(move.target for move in moves)

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
