"""Defines the interface of one medium that stores pages of keys and values: a device's memory, main memory, a disk.

A store knows which of its pages are in use, by how many users, and in what order unused ones are reused. It knows
nothing of tokens, keys or sequences; the component that knows what a page contains is its `Contents`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol


class Contents(Protocol):
    """The store's interface to the component that knows the contents of pages."""

    def retains(self, page: int) -> bool:
        """Returns True if an unused page should keep its contents for as long as possible."""

    def evict(self, page: int) -> None:
        """Called when the page is about to get new contents."""


class BlockStore(Protocol):
    """Pages 0 .. num_pages - 1 of one medium, with reference counts. Unused pages are evicted in LRU order.

    `allocate` evicts only where no page is blank. A lower tier that is to receive what is evicted works ahead of it:
    `begin_eviction` chooses pages that stay cached, and can be hit, while they are written behind; `end_eviction` makes
    them blank, or the next to be evicted, except for those that were hit meanwhile.
    """

    num_pages: int

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can return, blank or cached."""

    @property
    def num_blank(self) -> int:
        """Pages that `allocate` can return without evicting anything."""

    def allocate(self) -> int:
        """Returns a page with one user: a blank one, or else the least recently used. Requires num_free > 0."""

    def acquire_all(self, pages: Sequence[int]) -> None:
        """Adds a user to each of these pages, which are in use or cached."""

    def release_all(self, pages: Iterable[int]) -> None:
        """Removes a user from each page, in this order: the first is reused first. After its last user a page stays
        cached if its contents are wanted, or becomes blank.
        """

    def begin_eviction(self, count: int, is_wanted: Callable[[int], bool] | None = None) -> list[int]:
        """Returns the `count` least recently used cached pages, as far as there are so many and they are wanted, and
        adds a user to each: they are not reused before `end_eviction`.
        """

    def end_eviction(self, pages: Sequence[int], *, retain: bool = False) -> list[int]:
        """Removes the user that `begin_eviction` added. Returns the pages that are blank now, with forgotten contents;
        the others have been hit meanwhile, and are in use.

        With `retain`, no page becomes blank: unused ones stay cached, and are the next to be evicted.
        """
