"""The page pool: counts, and the order in which pages are given away."""

from mini_infer_engine.core.page_allocator import PageAllocator


class FakeContents:
    """Contents that wants some pages and notes which were forgotten."""

    def __init__(self, retained: set[int]) -> None:
        self.retained = retained
        self.evicted: list[int] = []

    def retains(self, page: int) -> bool:
        return page in self.retained

    def evict(self, page: int) -> None:
        self.evicted.append(page)


def test_blank_pages_are_allocated_first_and_then_the_least_recently_used() -> None:
    contents = FakeContents({0, 1, 2, 3})
    pool = PageAllocator(6, 16, contents)
    for page in [pool.allocate() for _ in range(6)]:
        assert pool.references[page] == 1
    for page in (2, 5, 0, 3, 4, 1):
        pool.release(page)
    assert (pool.num_free, pool.num_cached) == (6, 4)
    pool.touch(2)
    pool.acquire(0)
    pool.release(0)
    assert {pool.allocate(), pool.allocate()} == {4, 5}
    assert contents.evicted == []
    assert [pool.allocate() for _ in range(4)] == contents.evicted == [3, 1, 2, 0]
    assert (pool.num_free, pool.usage) == (0, 1.0)


def test_a_page_is_free_when_its_last_user_leaves() -> None:
    pool = PageAllocator(2, 16)
    page = pool.allocate()
    pool.acquire(page)
    pool.release(page)
    assert (pool.references[page], pool.num_free) == (1, 1)
    pool.release(page)
    assert (pool.references[page], pool.num_free, pool.num_cached) == (0, 2, 0)


def test_pages_are_only_pinned_when_no_sequence_uses_them() -> None:
    pool = PageAllocator(4, 16)
    pages = [pool.allocate() for _ in range(3)]
    pool.pin(pages)
    pool.pin(pages[:1])
    assert (pool.num_only_pinned, pool.num_free) == (0, 1)
    pool.release_all(pages)
    assert (pool.num_only_pinned, pool.num_free, pool.usage) == (3, 1, 0.75)
    pool.unpin(pages)
    assert (pool.num_only_pinned, pool.num_free) == (1, 3)
    pool.unpin(pages[:1])
    assert (pool.num_only_pinned, pool.num_free) == (0, 4)
