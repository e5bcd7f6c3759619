"""Brings pages of lower tiers back to the device, for sequences that wait for them with slot and pages of their own.

Pages on the disk are read into main memory first, where they stay. A page whose digest is not that with which it left
the device ends the load before it: the sequence computes the tokens from there on.
"""

from collections import Counter
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import partial

from mini_infer_engine.core.kv_tiers.copies import Copies
from mini_infer_engine.core.kv_tiers.host_blocks import HostBlocks
from mini_infer_engine.core.kv_tiers.page_record import PageRecord
from mini_infer_engine.core.kv_tiers.tier import Tier
from mini_infer_engine.core.kv_tiers.tier_index import DiskIndex
from mini_infer_engine.core.kv_tiers.tier_memory import DiskMoved, Moved, PageMove, sealed
from mini_infer_engine.core.page_allocator import PageAllocator
from mini_infer_engine.core.sequence import Sequence


@dataclass(slots=True, frozen=True)
class TierPage:
    """A page that a tier has for a waiting sequence."""

    tier: Tier
    record: PageRecord
    location: int = -1
    """The page's location on the disk; -1 in main memory."""


@dataclass(slots=True, frozen=True)
class Loaded:
    """Event: the pages of a sequence have been loaded, or as many of them as were valid."""

    sequence: Sequence
    num_tokens: int
    """Tokens at its beginning that are on the device now."""
    tokens_by_tier: dict[str, int]
    """The tokens among them that came from each tier."""
    is_first: bool
    """True if this was the sequence's first admission."""


@dataclass(slots=True, eq=False)
class _Load:
    sequence: Sequence | None
    """None once it was cancelled."""
    num_before: int
    """Tokens of the sequence that were on the device before."""
    pages: Items[TierPage]
    targets: list[int]
    is_first: bool
    host_pages: list[int] = field(default_factory=list)
    num_reading: int = 0
    """Pages that are still being read from the disk."""
    read_s: float = 0.0
    """Seconds until the last of the pages that were read had come."""
    num_valid: int = 0
    """Pages at its beginning that can be used."""


class Loads:
    """The loads under way, and those that have ended."""

    def __init__(self, pool: PageAllocator, host: HostBlocks, disk: DiskIndex, host_tier: Tier, copies: Copies) -> None:
        self._pool, self._host, self._disk, self._copies = pool, host, disk, copies
        self._host_tier = host_tier
        self._loads: dict[Sequence, _Load] = {}
        self._under_way: list[_Load] = []
        """All loads whose copies have not ended, cancelled ones too."""
        self._keys: Counter[bytes] = Counter()
        self._ended: list[Loaded] = []

    @property
    def are_under_way(self) -> bool:
        """True if `take` will return something later."""
        return bool(self._loads or self._ended)

    def is_loading(self, key: bytes) -> bool:
        """True if a page with this key is on its way to the device."""
        return key in self._keys

    @property
    def host_pages(self) -> list[int]:
        """Pages of main memory that loads use; a page that several use is there several times."""
        return [page for load in self._under_way for page in load.host_pages]

    def take(self) -> list[Loaded]:
        """Returns the loads that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def begin(self, sequence: Sequence, pages: Items[TierPage], *, is_first: bool) -> None:
        """Loads pages behind the computed tokens of a sequence, which has been given pages for them."""
        first = sequence.num_computed // self._pool.page_size
        targets = sequence.pages[first : first + len(pages)]
        load = _Load(sequence, sequence.num_computed, pages, targets, is_first)
        self._loads[sequence] = load
        self._under_way.append(load)
        self._pool.pin(targets)
        self._keys.update(page.record.key for page in pages)
        places = self._acquire_host_pages(load)
        load.num_valid = len(load.host_pages)
        load.num_reading = len(places)
        for place in places:
            location = load.pages[place].location
            self._copies.read(location, load.host_pages[place], partial(self._read, load, place))
        if not places:
            self._copy(load)

    def _acquire_host_pages(self, load: _Load) -> list[int]:
        """Adds a user to the pages in main memory, and allocates those that are read from the disk, as far as any are
        free. Returns the places of the latter. The load has no pages after the first that can be had from nowhere.
        """
        pages = self._host.acquire([page.record.key for page in load.pages])
        places = [place for place, page in enumerate(pages) if page is None]
        end = next((place for place in places if load.pages[place].location < 0), len(pages))
        places = [place for place in places if place < end]
        targets = self._host.allocate(len(places))
        if len(targets) < len(places):
            end = places[len(targets)]
        for place, target in zip(places, targets, strict=False):
            pages[place] = target
        load.host_pages = [page for page in pages[:end] if page is not None]
        self._host.release_all(page for page in reversed(pages[end:]) if page is not None)
        return places[: len(targets)]

    def cancel(self, sequence: Sequence) -> None:
        """Loads nothing more for a sequence. Its pages stay pinned for as long as they may be written to."""
        self._ended = [loaded for loaded in self._ended if loaded.sequence is not sequence]
        load = self._loads.pop(sequence, None)
        if load is not None:
            load.sequence = None

    def _read(self, load: _Load, place: int, moved: DiskMoved) -> None:
        if moved.error:
            load.pages[place].tier.failed(moved.error)
        if moved.error or moved.is_gone:
            self._disk.forget(load.pages[place].location)
            load.num_valid = min(load.num_valid, place)
        load.read_s = max(load.read_s, moved.seconds)
        load.num_reading -= 1
        if not load.num_reading:
            self._copy(load)

    def _copy(self, load: _Load) -> None:
        """Copies pages of main memory to the device, unless there are none or nobody waits for them any more."""
        if not load.num_valid or load.sequence is None:
            self._end(load, 0)
            return
        pairs = zip(load.host_pages, load.targets[: load.num_valid], strict=False)
        self._copies.load([PageMove(*pair) for pair in pairs], partial(self._copied, load))

    def _copied(self, load: _Load, moved: Moved) -> None:
        if moved.error:
            self._host_tier.failed(moved.error)
            self._end(load, 0)
            return
        identity, num_valid, new = self._copies.host.identity, 0, list[tuple[int, PageRecord]]()
        for page, host_page, digest in zip(load.pages, load.host_pages, moved.digests, strict=False):
            if sealed(digest, page.record.key, identity) != page.record.digest:
                self._forget(page, host_page)
                break
            if page.location >= 0:
                new.append((host_page, page.record))
            num_valid += 1
        if new:
            self._host.add_all(new)
        self._measure(load.pages[: len(moved.digests)], load.read_s, moved.seconds)
        self._end(load, num_valid)

    def _measure(self, pages: Items[TierPage], read_s: float, copy_s: float) -> None:
        """Reports to each tier what its pages took: the read of those on the disk, and their share of the copy."""
        page_bytes, page_size = self._copies.host.page_bytes, self._pool.page_size
        for tier, number in Counter(page.tier for page in pages).items():
            seconds = copy_s * number / len(pages) + (0.0 if tier is self._host_tier else read_s)
            tier.loaded(number * page_size, number * page_bytes, seconds)

    def _forget(self, page: TierPage, host_page: int) -> None:
        """Forgets a page that is not what it was."""
        page.tier.mismatch()
        if page.location >= 0:
            self._disk.forget(page.location)
        elif self._host.record(host_page) is page.record:
            self._host.evict(host_page)

    def _end(self, load: _Load, num_valid: int) -> None:
        self._under_way.remove(load)
        self._keys.subtract(page.record.key for page in load.pages)
        self._keys = +self._keys
        self._host.release_all(reversed(load.host_pages))
        self._pool.unpin(load.targets)
        if load.sequence is None:
            return
        del self._loads[load.sequence]
        page_size, counts = self._pool.page_size, Counter[str]()
        for page in load.pages[:num_valid]:
            page.tier.hit(page_size)
            counts[page.tier.name] += page_size
        num_tokens = load.num_before + num_valid * page_size
        self._ended.append(Loaded(load.sequence, num_tokens, dict(counts), load.is_first))
