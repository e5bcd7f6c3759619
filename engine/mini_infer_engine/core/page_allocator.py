"""The page pool: which pages are in use, by how many, and in what order unused ones are given away.

It counts references and knows nothing of tokens, keys or sequences; whoever remembers what a page holds is its
`Contents`.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol


class PoolTooSmallError(ValueError):
    """The page pool cannot hold one sequence of the model's length; the settings are at fault."""


class Contents(Protocol):
    """What the pool asks of whoever knows the contents of pages."""

    def wants(self, page: int) -> bool:
        """Whether a page that nobody uses any more should keep its contents for as long as possible."""

    def forget(self, page: int) -> None:
        """The page is about to get new contents."""


class PageAllocator:
    """Pages 0 .. num_pages - 1 with reference counts; free pages with wanted contents go in LRU order."""

    def __init__(self, num_pages: int, page_size: int, contents: Contents | None = None) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.references = [0] * num_pages
        self._contents = contents
        self._pins: Counter[int] = Counter()
        self._blank = list(range(num_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can hand out, blank or cached."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free pages whose contents can still be hit."""
        return len(self._cached)

    @property
    def usage(self) -> float:
        """Share of the pages in use, 0 to 1."""
        return 1 - self.num_free / self.num_pages

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-num_tokens // self.page_size)

    def check_fits(self, max_model_len: int) -> None:
        """Raise PoolTooSmallError unless one sequence of the model's length fits: then none can be stuck for ever."""
        capacity = self.num_pages * self.page_size
        if capacity < max_model_len:
            raise PoolTooSmallError(
                f"the KV cache holds {capacity} tokens ({self.num_pages} pages of {self.page_size}), but one sequence "
                f"may have {max_model_len}: raise --kv-cache-memory (or --gpu-memory-utilization), or set "
                f"--max-model-len to at most {capacity}"
            )

    def allocate(self) -> int:
        """A page of one's own: a blank one, else the least recently used. The caller knows that num_free > 0."""
        if self._blank:
            page = self._blank.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            if self._contents is not None:
                self._contents.forget(page)
        self.references[page] = 1
        return page

    def acquire(self, page: int) -> None:
        """Use a page together with those who use it already, or bring a cached one back."""
        if not self.references[page]:
            del self._cached[page]
        self.references[page] += 1

    def num_unused(self, pages: Sequence[int]) -> int:
        """How many of these pages nobody uses."""
        return list(map(self.references.__getitem__, pages)).count(0)

    def acquire_all(self, pages: Sequence[int]) -> None:
        """`acquire` of each, in one loop: a first token waits for it, and a long prompt has dozens of pages."""
        references = self.references
        for page in pages:
            if not references[page]:
                del self._cached[page]
            references[page] += 1

    def release(self, page: int) -> None:
        """Give up one use. The last one out leaves the page cached if its contents are wanted, else blank."""
        self.release_all((page,))

    def release_all(self, pages: Iterable[int]) -> None:
        """`release` of each, in this order: the first is given away first."""
        references, contents = self.references, self._contents
        for page in pages:
            references[page] -= 1
            if references[page]:
                continue
            if contents is not None and contents.wants(page):
                self._cached[page] = None
            else:
                self._blank.append(page)

    def pin(self, pages: Sequence[int]) -> None:
        """Uses each of these pages for a transfer to or from another engine, together with whoever else uses it."""
        self.acquire_all(pages)
        self._pins.update(pages)

    def unpin(self, pages: Sequence[int]) -> None:
        """Ends the use of these pages that began with `pin`. The last one is the first to be given away."""
        self._pins.subtract(pages)
        for page in pages:
            if not self._pins[page]:
                del self._pins[page]
        self.release_all(reversed(pages))

    @property
    def num_only_pinned(self) -> int:
        """Pages that nothing but transfers uses: no sequence that ends or is preempted sets them free."""
        return sum(self.references[page] == pins for page, pins in self._pins.items())

    def touch(self, page: int) -> None:
        """Make a page the most recently used one, if it is free."""
        if page in self._cached:
            self._cached.move_to_end(page)
