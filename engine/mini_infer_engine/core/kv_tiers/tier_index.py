"""Tracks which pages of prefixes are in which pages of main memory, and where on the disk. No copies here."""

from collections.abc import Callable, Iterable, Sequence

from mini_infer_contract.events import MEDIUM_DISK, MEDIUM_HOST
from mini_infer_engine.core.block_store import BlockStore
from mini_infer_engine.core.kv_tiers.page_record import PageRecord
from mini_infer_engine.core.kv_tiers.tier_events import TierEvents
from mini_infer_engine.core.kv_tiers.tier_memory import DiskPage
from mini_infer_engine.core.page_allocator import PageAllocator


class HostIndex:
    """Implements `HostBlocks` for memory of one engine. It is the `Contents` of its own block store."""

    def __init__(self, num_pages: int, page_size: int, *, record_events: bool) -> None:
        self.store: BlockStore = PageAllocator(num_pages, page_size, self)
        self.num_pages = num_pages
        self.events = TierEvents(MEDIUM_HOST, are_recorded=record_events)
        self._pages: dict[bytes, int] = {}
        self._records: list[PageRecord | None] = [None] * num_pages
        self.num_changes = 0
        """Pages that have come or gone since the start."""

    def __contains__(self, key: bytes) -> bool:
        return key in self._pages

    def __len__(self) -> int:
        return len(self._pages)

    def page(self, key: bytes) -> int | None:
        """Returns the page with this key, or None."""
        return self._pages.get(key)

    def record(self, page: int) -> PageRecord | None:
        """Returns what is in a page, or None if that is nothing that can be hit."""
        return self._records[page]

    def sync(self) -> None:
        """Does nothing: nobody else changes anything."""

    def acquire(self, keys: Sequence[bytes]) -> list[int | None]:
        """Adds a user to the pages with these keys, and returns them; None for those that are not here."""
        found = [self._pages.get(key) for key in keys]
        self.store.acquire_all([page for page in found if page is not None])
        return found

    def allocate(self, count: int) -> list[int]:
        """Returns up to `count` pages with one user each: blank ones, then the least recently used."""
        return [self.store.allocate() for _ in range(min(count, self.store.num_free))]

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can return."""
        return self.store.num_free

    @property
    def num_blank(self) -> int:
        """Pages that `allocate` can return without evicting anything."""
        return self.store.num_blank

    def release_all(self, pages: Iterable[int]) -> None:
        """Removes a user from each page, in this order: the first is reused first. Without contents it is blank."""
        self.store.release_all(pages)

    def begin_eviction(self, count: int, is_wanted: Callable[[int], bool]) -> list[int]:
        """Returns those of the next `count` pages to be evicted that are wanted, and adds a user to each."""
        return self.store.begin_eviction(count, is_wanted)

    def end_eviction(self, pages: Sequence[int]) -> None:
        """Removes the user that `begin_eviction` added. The pages are the next to be evicted."""
        self.store.end_eviction(pages, retain=True)

    def add_all(self, contents: Sequence[tuple[int, PageRecord]]) -> None:
        """Registers the contents of pages that are in use, unless they are in another page already."""
        for page, record in contents:
            key = record.key
            if key not in self._pages:
                self._pages[key] = page
                self._records[page] = record
                self.num_changes += 1
                self.events.stored(record)

    def retains(self, page: int) -> bool:
        """Implements `Contents`: a page with a record stays cached."""
        return self._records[page] is not None

    def evict(self, page: int) -> None:
        """Implements `Contents`, and forgets a page that cannot be relied on."""
        record = self._records[page]
        if record is not None:
            self._records[page] = None
            self.num_changes += 1
            del self._pages[record.key]
            self.events.removed(record)

    def clear(self) -> None:
        """Forgets all pages. Those without a user become blank."""
        pages = list(self._pages.values())
        for page in pages:
            self.evict(page)
        self.store.acquire_all(pages)
        self.store.release_all(pages)

    def detach(self) -> None:
        """Forgets all pages."""
        self.clear()

    @property
    def records(self) -> list[PageRecord]:
        """The records of all pages that can be hit."""
        return [record for record in self._records if record is not None]


class DiskIndex:
    """The pages on the disk by the key of their last block."""

    def __init__(self, *, record_events: bool) -> None:
        self.events = TierEvents(MEDIUM_DISK, are_recorded=record_events)
        self._pages: dict[bytes, DiskPage] = {}
        self._keys: dict[int, bytes] = {}
        """The key of each location."""

    def __contains__(self, key: bytes) -> bool:
        return key in self._pages

    def __len__(self) -> int:
        return len(self._pages)

    def page(self, key: bytes) -> DiskPage | None:
        """Returns the page with this key, or None."""
        return self._pages.get(key)

    def add(self, page: DiskPage) -> None:
        """Registers a page, unless one of the same tokens is registered already."""
        key = page.record.key
        if key in self._pages:
            return
        self._pages[key] = page
        self._keys[page.location] = key
        self.events.stored(page.record)

    def forget(self, location: int) -> None:
        """Forgets a page that is gone or cannot be relied on. An unknown location is no error."""
        key = self._keys.pop(location, None)
        if key is not None:
            self.events.removed(self._pages.pop(key).record)

    def clear(self) -> None:
        """Forgets all pages."""
        for location in list(self._keys):
            self.forget(location)

    @property
    def records(self) -> list[PageRecord]:
        """The records of all pages."""
        return [page.record for page in self._pages.values()]
