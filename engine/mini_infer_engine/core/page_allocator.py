"""Implements `BlockStore` by counting references: the pages of a device's pool, and those of main memory.

It knows nothing of tokens, keys or sequences, nor of the memory itself, which runners have.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from mini_infer_engine.core.block_store import Contents
from mini_infer_engine.core.eviction_order import EvictionOrder

MOST_PINNED = 0.5
"""Largest share of the pages with pinned leases; further ones count as leases that are not pinned."""


class PoolTooSmallError(ValueError):
    """Raised when the page pool is too small for one sequence of the model's length; the settings are at fault."""


class PageAllocator:
    """Pages 0 .. num_pages - 1 with reference counts; free pages with wanted contents are reused in LRU order."""

    def __init__(self, num_pages: int, page_size: int, contents: Contents | None = None) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.references = [0] * num_pages
        self.num_copied_out = 0
        """Sequences whose pages, free by now, passes are still to copy to main memory: nothing but passes may write to
        free pages meanwhile.
        """
        self._contents = contents
        self._pins: Counter[int] = Counter()
        self._blank = list(range(num_pages - 1, -1, -1))
        self._cached = EvictionOrder()

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can return, blank or cached."""
        return len(self._blank) + len(self._cached)

    @property
    def num_blank(self) -> int:
        """Pages that `allocate` can return without evicting anything."""
        return len(self._blank)

    @property
    def num_cached(self) -> int:
        """Free pages whose contents can still be hit."""
        return len(self._cached)

    @property
    def num_taken(self) -> int:
        """Pages that were no longer cached, as they were reused or hit, or got another place in the order of eviction,
        since the start.
        """
        return self._cached.num_left

    @property
    def has_leases(self) -> bool:
        """True if some cached pages are reused in another order than that of their last use."""
        return self._cached.has_leases

    @property
    def usage(self) -> float:
        """Share of the pages in use, 0 to 1."""
        return 1 - self.num_free / self.num_pages

    def pages_for(self, num_tokens: int) -> int:
        """Returns the number of pages for this many tokens."""
        return -(-num_tokens // self.page_size)

    def check_fits(self, max_model_len: int) -> None:
        """Raises PoolTooSmallError unless one sequence of the model's length fits: then none can be stuck forever."""
        capacity = self.num_pages * self.page_size
        if capacity < max_model_len:
            raise PoolTooSmallError(
                f"the KV cache holds {capacity} tokens ({self.num_pages} pages of {self.page_size}), but one sequence "
                f"may have {max_model_len}: raise --kv-cache-memory (or --gpu-memory-utilization), or set "
                f"--max-model-len to at most {capacity}"
            )

    def allocate(self) -> int:
        """Returns a page with no other user: a blank one, or else the least recently used. Requires num_free > 0."""
        if self._blank:
            page = self._blank.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            if self._contents is not None:
                self._contents.evict(page)
        self.references[page] = 1
        return page

    def least_recently_used(self, count: int) -> list[int]:
        """Returns up to `count` cached pages, the one that is evicted first first. They get no user."""
        return list(islice(self._cached, count))

    def begin_eviction(self, count: int, is_wanted: Callable[[int], bool] | None = None) -> list[int]:
        """Returns the `count` least recently used cached pages, as far as there are so many and they are wanted, and
        adds a user to each: they can still be hit, and are not reused before `end_eviction`.
        """
        pages = [page for page in islice(self._cached, count) if is_wanted is None or is_wanted(page)]
        for page in pages:
            self._cached.suspend(page)
            self.references[page] += 1
        return pages

    def end_eviction(self, pages: Sequence[int], *, retain: bool = False) -> list[int]:
        """Removes the user that `begin_eviction` added. Returns the pages that are blank now, with forgotten contents;
        the others have been hit meanwhile, and are in use.

        With `retain`, no page becomes blank: unused ones stay cached, and are the next to be evicted.
        """
        if retain:
            self.release_all(pages)
            for page in reversed(pages):
                if page in self._cached:
                    self._cached.move_to_end(page, last=False)
            return []
        evicted = [page for page in pages if self.references[page] == 1]
        if self._contents is not None:
            for page in evicted:
                self._contents.evict(page)
        self.release_all(pages)
        return evicted

    def acquire(self, page: int) -> None:
        """Adds a user to a page that is in use or cached."""
        if not self.references[page]:
            del self._cached[page]
        self.references[page] += 1

    def num_unused(self, pages: Sequence[int]) -> int:
        """Returns how many of these pages have no user."""
        return list(map(self.references.__getitem__, pages)).count(0)

    def acquire_all(self, pages: Sequence[int]) -> None:
        """Calls `acquire` for each page, in one loop: a first token waits for it, and a long prompt has dozens of
        pages.
        """
        references = self.references
        for page in pages:
            if not references[page]:
                del self._cached[page]
            references[page] += 1

    def retain_all(self, pages: Sequence[int]) -> None:
        """Adds a user to each page whose lease stays, unlike that of a page that `acquire` gives to a session that has
        returned.
        """
        for page in pages:
            if not self.references[page]:
                self._cached.suspend(page)
            self.references[page] += 1

    def num_reusable(self, until_s: float) -> int:
        """Returns the number of pages that `allocate` returns before any whose lease ends by `until_s` or is pinned."""
        return len(self._blank) + self._cached.num_before(until_s)

    def release(self, page: int) -> None:
        """Removes a user. After the last one the page stays cached if its contents are wanted, or becomes blank."""
        self.release_all((page,))

    def release_all(self, pages: Iterable[int]) -> None:
        """Calls `release` for each page, in this order: the first is reused first."""
        references, contents = self.references, self._contents
        for page in pages:
            references[page] -= 1
            if references[page]:
                continue
            if contents is not None and contents.retains(page):
                self._cached[page] = None
            else:
                if self._cached.has_leases:
                    self._cached.forget(page)
                self._blank.append(page)

    def advance(self, now_s: float) -> None:
        """Ends the leases whose time has passed."""
        self._cached.advance(now_s)

    def lease(self, pages: Sequence[int], seconds: float, *, is_pinned: bool) -> None:
        """Has cached pages reused late for so many seconds after the latest `advance`; with less than 0, first. The
        order is that in which they are reused.
        """
        if seconds < 0:
            self._cached.mark_done(pages)
            return
        fits = is_pinned and self._cached.num_pinned + len(pages) <= MOST_PINNED * self.num_pages
        self._cached.lease(pages, self._cached.now_s + seconds, is_pinned=fits)

    def give_up(self, pages: Sequence[int], *, ends_lease: bool = True) -> None:
        """Has the cached pages of a session that will not return, in the order of its prefix, reused first. With
        `ends_lease` its lease ends, otherwise pages with a lease stay.
        """
        self._cached.give_up(pages, ends_lease=ends_lease)

    def pin(self, pages: Sequence[int]) -> None:
        """Adds a transfer to or from another engine as a user of each of these pages."""
        self.acquire_all(pages)
        self._pins.update(pages)

    def unpin(self, pages: Sequence[int]) -> None:
        """Removes the user that `pin` added from each of these pages. The last page is the first to be reused."""
        pins = self._pins
        for page in pages:
            pins[page] -= 1
            if not pins[page]:
                del pins[page]
        self.release_all(reversed(pages))

    @property
    def num_only_pinned(self) -> int:
        """Pages that nothing but transfers uses: no sequence that ends or is preempted frees them."""
        return sum(self.references[page] == pins for page, pins in self._pins.items())

    def touch(self, page: int) -> None:
        """Makes a page the most recently used one, if it is free."""
        if page in self._cached:
            self._cached.move_to_end(page)
