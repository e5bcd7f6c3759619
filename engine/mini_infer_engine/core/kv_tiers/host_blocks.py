"""Defines the interface of the record of which pages of prefixes are in main memory, of one engine or of several.

A page that several engines share may be evicted by another one between two calls: only a page with a user of this
engine stays what it is.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from mini_infer_engine.core.kv_tiers.page_record import PageRecord
from mini_infer_engine.core.kv_tiers.tier_events import TierEvents


class HostBlocks(Protocol):
    """The pages in main memory by the key of their last block. Those without a user are evicted in LRU order."""

    num_pages: int
    events: TierEvents
    num_changes: int
    """Pages that have come or gone since the start."""

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can return at most."""

    @property
    def num_blank(self) -> int:
        """Pages that `allocate` can return without evicting anything."""

    @property
    def records(self) -> list[PageRecord]:
        """The records of all pages that can be hit."""

    def __contains__(self, key: bytes) -> bool:
        """Returns True if a page with this key can be hit."""

    def __len__(self) -> int:
        """Returns the number of pages that can be hit."""

    def page(self, key: bytes) -> int | None:
        """Returns the page with this key, or None."""

    def record(self, page: int) -> PageRecord | None:
        """Returns what is in a page, or None if that is nothing that can be hit."""

    def sync(self) -> None:
        """Takes in what other engines have changed."""

    def acquire(self, keys: Sequence[bytes]) -> list[int | None]:
        """Adds a user to the pages with these keys, and returns them; None for those that are not here any more."""

    def allocate(self, count: int) -> list[int]:
        """Returns up to `count` pages with one user each: blank ones, then the least recently used."""

    def add_all(self, contents: Sequence[tuple[int, PageRecord]]) -> None:
        """Registers the contents of pages that were allocated, unless they are in another page already."""

    def release_all(self, pages: Iterable[int]) -> None:
        """Removes a user from each page, in this order: the first is reused first. Without contents it is blank."""

    def begin_eviction(self, count: int, is_wanted: Callable[[int], bool]) -> list[int]:
        """Returns those of the next `count` pages to be evicted that are wanted, and adds a user to each."""

    def end_eviction(self, pages: Sequence[int]) -> None:
        """Removes the user that `begin_eviction` added. The pages are the next to be evicted."""

    def evict(self, page: int) -> None:
        """Forgets a page that cannot be relied on."""

    def clear(self) -> None:
        """Forgets all pages."""

    def detach(self) -> None:
        """Forgets all pages for good, and leaves them to other engines if there are any."""
