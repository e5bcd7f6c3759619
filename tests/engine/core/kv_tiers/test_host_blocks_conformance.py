"""What every record of the pages in main memory does, whether one engine has it for itself or several share it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mini_infer_contract.events import BlockRemoved, BlockStored
from mini_infer_engine.core.kv_tiers.host_blocks import HostBlocks
from mini_infer_engine.core.kv_tiers.tier_index import HostIndex
from tests.engine.kv_host.pools import key_of, open_index, record_of

NUM_PAGES = 4
Made = Callable[[Path], HostBlocks]
KINDS: dict[str, Made] = {
    "own": lambda folder: HostIndex(NUM_PAGES, 16, record_events=True),
    "shared": lambda folder: open_index(folder, NUM_PAGES),
}


@pytest.fixture(params=KINDS)
def blocks(request: pytest.FixtureRequest, tmp_path: Path) -> HostBlocks:
    return KINDS[request.param](tmp_path)


def add(blocks: HostBlocks, number: int) -> int:
    (page,) = blocks.allocate(1)
    blocks.add_all([(page, record_of(number))])
    blocks.release_all([page])
    return page


def test_page_is_found_until_it_is_evicted(blocks: HostBlocks) -> None:
    page = add(blocks, 1)
    assert (blocks.page(key_of(1)), blocks.page(key_of(2)), len(blocks)) == (page, None, 1)
    assert key_of(1) in blocks
    record = blocks.record(page)
    assert record is not None
    assert (record.key, blocks.records) == (key_of(1), [record])
    blocks.evict(page)
    assert (blocks.page(key_of(1)), blocks.record(page), len(blocks)) == (None, None, 0)
    assert [type(event) for event in blocks.events.take()] == [BlockStored, BlockRemoved]


def test_least_recently_released_page_is_reused_first(blocks: HostBlocks) -> None:
    for number in range(NUM_PAGES):
        add(blocks, number)
    pages = [page for page in blocks.acquire([key_of(1), key_of(0)]) if page is not None]
    blocks.release_all(pages)
    for number in range(10, 13):
        add(blocks, number)
    assert [number for number in range(NUM_PAGES) if key_of(number) in blocks] == [0]


def test_page_is_not_reused_while_it_has_a_user(blocks: HostBlocks) -> None:
    for number in range(NUM_PAGES):
        add(blocks, number)
    assert None not in blocks.acquire([key_of(0), key_of(0), key_of(2)])
    assert len(blocks.allocate(NUM_PAGES)) == 2
    assert blocks.allocate(1) == []
    blocks.release_all([page for page in [blocks.page(key_of(0))] if page is not None])
    assert blocks.allocate(1) == []  # it has one more user


def test_missing_pages_are_none_when_some_are_acquired(blocks: HostBlocks) -> None:
    page = add(blocks, 1)
    assert blocks.acquire([key_of(2), key_of(1), key_of(3)]) == [None, page, None]
    assert blocks.acquire([]) == []


def test_page_is_blank_again_when_it_got_no_contents(blocks: HostBlocks) -> None:
    blocks.release_all(blocks.allocate(3))
    assert (blocks.num_blank, blocks.num_free, len(blocks)) == (NUM_PAGES, NUM_PAGES, 0)


def test_second_copy_of_a_page_is_not_kept(blocks: HostBlocks) -> None:
    first, second = blocks.allocate(2)
    blocks.add_all([(first, record_of(1)), (second, record_of(1))])
    blocks.release_all([first, second])
    assert (len(blocks), blocks.page(key_of(1)), blocks.num_blank) == (1, first, NUM_PAGES - 1)


def test_pages_to_be_written_are_the_next_to_be_evicted_and_stay_so(blocks: HostBlocks) -> None:
    for number in range(NUM_PAGES):
        add(blocks, number)
    wanted = [blocks.page(key_of(number)) for number in (0, 2)]
    pages = blocks.begin_eviction(3, lambda page: page in wanted)
    assert pages == wanted
    assert len(blocks.allocate(NUM_PAGES)) == 2
    blocks.end_eviction(pages)
    assert blocks.allocate(1) == wanted[:1]


def test_nothing_is_found_when_all_is_cleared(blocks: HostBlocks) -> None:
    for number in range(3):
        add(blocks, number)
    changes = blocks.num_changes
    blocks.clear()
    blocks.sync()
    assert (len(blocks), blocks.num_blank, blocks.num_changes) == (0, NUM_PAGES, changes + 3)
    add(blocks, 1)
    blocks.detach()
    assert len(blocks) == 0
