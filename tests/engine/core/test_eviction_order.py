"""The order in which unused cached pages are reused, as tables and against a plain model."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_infer_engine.core.eviction_order import EvictionOrder
from mini_infer_engine.core.page_allocator import PageAllocator


class AllWanted:
    """Contents that wants every page."""

    def retains(self, page: int) -> bool:
        return True

    def evict(self, page: int) -> None:
        pass


def emptied(order: EvictionOrder) -> list[int]:
    pages = []
    while len(order):
        pages.append(order.popitem()[0])
    return pages


def unused(order: EvictionOrder, *pages: int) -> None:
    for page in pages:
        order[page] = None


def test_leases_give_up_pages_last_when_others_have_none() -> None:
    order = EvictionOrder()
    order.lease([3, 2], 10.0)
    order.lease([5, 4], 20.0)
    unused(order, 3, 2, 5, 4, 1, 0)
    assert list(order) == [1, 0, 5, 4, 3, 2], "what is wanted again latest goes first, from its end on"
    assert emptied(order) == [1, 0, 5, 4, 3, 2]
    assert not order.has_leases


def test_pages_go_as_just_used_when_their_lease_ends() -> None:
    order = EvictionOrder()
    order.lease([3, 2], 10.0)
    unused(order, 3, 2, 1)
    order.advance(9.9)
    assert list(order) == [1, 3, 2]
    order.advance(10.0)
    unused(order, 0)
    assert list(order) == [1, 3, 2, 0]
    assert not order.has_leases


def test_pages_of_a_session_go_first_when_it_gives_up() -> None:
    order = EvictionOrder()
    order.lease([2, 1], 10.0)
    unused(order, 2, 1, 9)
    order.give_up([0, 1, 2], ends_lease=True)  # page 0 is in use
    assert list(order) == [2, 1, 9]
    unused(order, 0)
    assert emptied(order) == [2, 1, 0, 9]
    assert not order.has_leases


def test_pages_with_a_lease_of_another_session_stay_when_one_gives_up() -> None:
    order = EvictionOrder()
    order.lease([2, 1], 10.0)
    order.lease([3, 0], 12.0)
    unused(order, 2, 1, 3, 0, 9)
    order.give_up([0, 1, 2], ends_lease=True)
    assert list(order) == [2, 1, 9, 3, 0]
    order.give_up([0, 3, 9], ends_lease=False)
    assert list(order) == [2, 1, 9, 3, 0], "9 goes before all that are wanted, and leases stay"
    unused(order, 8)
    assert list(order) == [2, 1, 9, 8, 3, 0]
    order.give_up([], ends_lease=True)


def test_pages_that_go_before_a_lease_are_counted() -> None:
    order = EvictionOrder()
    order.lease([2], 10.0)
    order.lease([3], 20.0)
    order.lease([4], 30.0, is_pinned=True)
    unused(order, 2, 3, 4, 5, 6)
    order.give_up([6], ends_lease=True)
    assert [order.num_before(until_s) for until_s in (5.0, 10.0, 20.0, 50.0)] == [4, 3, 2, 2]


def test_the_later_lease_counts_when_sessions_share_a_beginning() -> None:
    order = EvictionOrder()
    order.lease([2, 0], 10.0)
    unused(order, 2, 0)
    del order[0]  # the second session hits the first page
    order.lease([3, 0], 12.0)
    unused(order, 3, 0)
    assert list(order) == [3, 0, 2]
    order.advance(11.0)
    assert list(order) == [2, 3, 0]
    order.advance(12.0)
    assert emptied(order) == [2, 3, 0]


def test_a_lease_of_a_page_in_use_stays_when_a_shorter_one_is_given() -> None:
    order = EvictionOrder()
    order.lease([0], 12.0)
    order.lease([1, 0], 10.0)
    unused(order, 1, 0)
    order.advance(10.0)
    assert list(order) == [1, 0]
    unused(order, 2)
    assert list(order) == [1, 2, 0]


def test_a_lease_stays_when_its_pages_are_copied_to_a_lower_tier() -> None:
    contents = AllWanted()
    pool = PageAllocator(4, 16, contents)
    pages = [pool.allocate() for _ in range(4)]
    pool.lease(pages[2:], 10.0, is_pinned=False)
    pool.release_all(pages)
    copied = pool.begin_eviction(4)
    assert copied == pages
    pool.end_eviction(copied, retain=True)
    pool.release_all([pool.allocate()])
    assert [pool.allocate() for _ in range(4)] == [pages[1], pages[0], *pages[2:]]


def test_pinned_pages_go_after_all_leases_until_their_time_has_passed() -> None:
    order = EvictionOrder()
    order.lease([1], 50.0, is_pinned=True)
    order.lease([2], 10.0)
    order.lease([3], 60.0)
    unused(order, 1, 2, 3)
    assert (list(order), order.num_pinned) == ([3, 2, 1], 1)
    order.lease([3], 55.0, is_pinned=True)
    assert (list(order), order.num_pinned) == ([2, 3, 1], 2)
    order.advance(50.0)
    assert (list(order), order.num_pinned) == ([2, 1, 3], 1)


def test_pages_of_a_session_that_is_done_go_first_from_their_end_on() -> None:
    order = EvictionOrder()
    order.lease([0], 10.0)  # shared with another session
    unused(order, 9)
    order.mark_done([2, 1, 0])
    unused(order, 2, 1, 0)
    assert list(order) == [2, 1, 9, 0]
    del order[1]
    unused(order, 1)
    assert list(order) == [2, 9, 1, 0], "a new user makes it a page as any other"


def test_leases_are_forgotten_when_a_page_is_reused() -> None:
    order = EvictionOrder()
    order.lease([1], 10.0)
    order.lease([1], 20.0)
    unused(order, 1)
    assert order.popitem() == (1, None)
    unused(order, 0, 1)
    assert list(order) == [0, 1]
    order.advance(30.0)
    assert emptied(order) == [0, 1]
    with pytest.raises(KeyError):
        order.popitem()


@dataclass
class Model:
    """Every page's leases, and the pages without a user in the order in which they lost it."""

    leases: dict[int, list[float]] = field(default_factory=dict)
    unused: list[int] = field(default_factory=list)

    def live(self, page: int, now_s: float) -> bool:
        return any(until_s > now_s for until_s in self.leases.get(page, []))


steps = st.lists(
    st.one_of(
        st.tuples(st.just("release"), st.integers(0, 7)),
        st.tuples(st.just("acquire"), st.integers(0, 7)),
        st.tuples(st.just("lease"), st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True)),
        st.tuples(st.just("wait"), st.integers(1, 9)),
        st.tuples(st.just("evict"), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(steps)
def test_no_page_is_lost_and_leases_protect_when_others_are_left(actions: list[tuple[str, Any]]) -> None:
    order, model, now_s = EvictionOrder(), Model(), 0.0
    for number, (kind, value) in enumerate(actions):
        match kind:
            case "release" if value not in model.unused:
                order[value] = None
                model.unused.append(value)
            case "acquire" if value in model.unused:
                del order[value]
                model.unused.remove(value)
                model.leases.pop(value, None)
            case "lease":
                until_s = now_s + 5.0 + number % 7
                order.lease(value, until_s)
                for page in value:
                    model.leases.setdefault(page, []).append(until_s)
            case "wait":
                now_s += value
                order.advance(now_s)
            case "evict" if model.unused:
                page, _ = order.popitem()
                free = [one for one in model.unused if not model.live(one, now_s)]
                assert page in (free or model.unused)
                model.unused.remove(page)
                model.leases.pop(page, None)
        assert sorted(order) == sorted(model.unused)
        assert len(order) == len(model.unused)
        assert all((page in order) == (page in model.unused) for page in range(8))
    order.advance(now_s + 100)
    assert not order.has_leases
    assert sorted(emptied(order)) == sorted(model.unused)


def test_pins_count_as_leases_when_half_of_the_pool_is_pinned() -> None:
    pool = PageAllocator(8, 16, AllWanted())
    pages = [pool.allocate() for _ in range(8)]
    pool.advance(1.0)
    pool.lease(pages[:4], 10.0, is_pinned=True)
    pool.lease(pages[4:6], 5.0, is_pinned=True)
    pool.release_all(pages)
    assert [pool.allocate() for _ in range(8)] == pages[6:] + pages[4:6] + pages[:4]
