"""What every `BlockStore` does: references, reuse in LRU order, and eviction that can write behind."""

from collections.abc import Callable

import pytest

from mini_infer_engine.core.block_store import BlockStore
from mini_infer_engine.core.page_allocator import PageAllocator


class Written:
    """Contents that are wanted until they are forgotten: the page's own number."""

    def __init__(self) -> None:
        self.contents: dict[int, str] = {}

    def retains(self, page: int) -> bool:
        return page in self.contents

    def evict(self, page: int) -> None:
        self.contents.pop(page, None)


def device_store(contents: Written) -> BlockStore:
    return PageAllocator(4, 16, contents)


STORES: dict[str, Callable[[Written], BlockStore]] = {"device": device_store}


@pytest.fixture(params=STORES)
def stored(request: pytest.FixtureRequest) -> tuple[BlockStore, Written]:
    contents = Written()
    return STORES[request.param](contents), contents


def fill(stored: tuple[BlockStore, Written]) -> list[int]:
    """All pages, written and released in order: the first is the least recently used."""
    store, written = stored
    pages = [store.allocate() for _ in range(store.num_pages)]
    written.contents = {page: f"contents of {page}" for page in pages}
    store.release_all(pages)
    return pages


def test_least_recently_used_page_is_evicted_when_none_is_blank(stored: tuple[BlockStore, Written]) -> None:
    store, written = stored
    pages = fill(stored)
    assert (store.num_free, store.num_blank) == (4, 0)
    assert store.allocate() == pages[0]
    assert sorted(written.contents) == sorted(pages[1:])


def test_page_is_reused_only_after_its_last_user_when_several_share_it(stored: tuple[BlockStore, Written]) -> None:
    store, _ = stored
    pages = fill(stored)
    store.acquire_all(pages[:1])
    store.acquire_all(pages[:1])
    store.release_all(pages[:1])
    assert [store.allocate() for _ in range(store.num_free)] == pages[1:]
    store.release_all(pages[:1])
    assert store.allocate() == pages[0]


def test_evicted_pages_are_not_reused_until_they_are_written_to_a_lower_tier(
    stored: tuple[BlockStore, Written],
) -> None:
    store, written = stored
    pages = fill(stored)
    lower_tier: dict[int, str] = {}
    evicting = store.begin_eviction(2)
    assert evicting == pages[:2]
    assert store.allocate() == pages[2], "those that are being written are not reused"
    lower_tier.update({page: written.contents[page] for page in evicting})
    assert store.end_eviction(evicting) == evicting
    assert store.num_blank == 2
    assert {store.allocate(), store.allocate()} == set(evicting)
    assert not written.contents.keys() & set(evicting)
    assert lower_tier == {page: f"contents of {page}" for page in evicting}


def test_page_stays_cached_when_it_is_hit_while_it_is_written_behind(stored: tuple[BlockStore, Written]) -> None:
    store, written = stored
    pages = fill(stored)
    evicting = store.begin_eviction(2)
    store.acquire_all(pages[:1])
    assert store.end_eviction(evicting) == [pages[1]]
    assert pages[0] in written.contents
    store.release_all(pages[:1])
    assert (store.num_free, store.num_blank) == (4, 1)


def test_eviction_takes_only_cached_unreferenced_pages(stored: tuple[BlockStore, Written]) -> None:
    store, _ = stored
    pages = fill(stored)
    store.acquire_all(pages[:3])
    assert store.begin_eviction(9) == pages[3:]
    assert store.begin_eviction(9) == []
