"""Loads blocks of lower tiers for prompts that are not scheduled yet: they wait here or at the gateway, or will come.

A prefetch is a load without slot and rows. Its pages are published as soon as they are there, and have a lease until
the prompt is expected: it hits them on the device. It takes pages that nobody wants, or whose leases end later, as far
as a lower tier has their blocks too, and no more than a share of all. What no prompt hits in time is evicted first.
"""

from collections import Counter
from collections.abc import Sequence as Items
from copy import copy
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from mini_infer_contract.blocks import BLOCK_SIZE_TOKENS
from mini_infer_engine.core.kv_tiers.loads import Loaded, Loads, TierPage
from mini_infer_engine.core.kv_tiers.page_record import group_key, page_key
from mini_infer_engine.core.kv_tiers.tier_search import TierSearch
from mini_infer_engine.core.prefix_cache import Hit, PrefixCache
from mini_infer_engine.core.sequence import Sequence, State
from mini_infer_engine.core.state_checkpoints import StateCheckpoints

MOST_SHARE = 0.25
"""Largest share of the pages without a user that may have prefetched blocks which no prompt has hit yet. The others are
left for those that run, whose pages would otherwise push out what has not been copied.
"""
READ_AHEAD_S = 10.0
"""Seconds for which the blocks of a waiting sequence are kept for it."""
READ_AHEAD_EVERY_S = 0.1
"""Seconds between two looks at a waiting sequence: each costs a lookup of its blocks."""
MAX_READ_AHEAD = 4
"""Waiting sequences whose blocks are read ahead, the first in line."""


@dataclass(slots=True, eq=False)
class _Prefetch:
    carrier: Sequence
    """Has the pages until the load has ended."""
    pages: Items[TierPage]
    until_s: float
    is_loading: bool = True


class Prefetches:
    """The prefetches of one engine that are being loaded, or wait for their prompt."""

    def __init__(
        self,
        cache: PrefixCache,
        loads: Loads,
        search: TierSearch,
        checkpoints: StateCheckpoints | None = None,
    ) -> None:
        """Loads what `search` finds. States that were loaded go to `checkpoints`."""
        self._checkpoints = checkpoints
        self._cache, self._pool, self._loads, self._search = cache, cache.pool, loads, search
        self._page_size = cache.pool.page_size
        self._loading: dict[Sequence, _Prefetch] = {}
        self._unused: dict[bytes, tuple[_Prefetch, TierPage]] = {}
        """Prefetched pages that no prompt has hit yet, by key."""
        self._ends: list[tuple[float, int, _Prefetch]] = []
        self._serials = count()
        self._now_s = 0.0

    def begin(self, sequence: Sequence, until_s: float, *, num_headroom_pages: int = 0) -> bool:
        """Begins to load the blocks of a sequence that has no pages, which is expected before `until_s`. Returns False
        if there is nothing to load, or no room that leaves `num_headroom_pages` free.
        """
        pool = self._pool
        most = int(MOST_SHARE * pool.num_free) - len(self._unused)
        if most <= 0 or until_s <= self._now_s or pool.num_copied_out:
            return False
        match = self._search.to_prefetch(sequence)
        hit, pages, state = match.hit, match.pages[:most], match.state
        if hit is None or not match.is_load:
            return False
        on_device = self._retained([one.pages for one in (hit, *hit.others)])
        pool.retain_all(on_device)  # a parent outlives its children
        room = self._room(len(pages), until_s, num_headroom_pages) if pages else 0
        if room < len(match.pages) if match.needs_all else room <= 0:
            pool.release_all(reversed(on_device))
            return False
        pages = pages[:room]
        prefetch = _Prefetch(self._carrier(sequence, hit, match.places or [(0, 0)] * len(pages)), pages, until_s)
        self._loading[prefetch.carrier] = prefetch
        for page in pages:
            self._unused[page.record.key] = prefetch, page
            if page.record.is_reported:
                page.tier.prefetched(self._page_size)
        heappush(self._ends, (until_s, next(self._serials), prefetch))
        self._loads.begin(
            prefetch.carrier,
            pages,
            state,
            is_first=False,
            is_prefetch=True,
            places=match.places,
            num_pages=match.num_pages,
        )
        return True

    def _retained(self, tables: Items[list[int]]) -> list[int]:
        """Returns the pages of the KV groups' tables, without places whose pages a group does not retain."""
        return [page for table in tables for page in table if page != self._pool.num_pages]

    def _room(self, num_wanted: int, until_s: float, num_headroom_pages: int) -> int:
        """Returns how many pages may be taken: blank ones, and those that are evicted first and lose nothing by it."""
        pool = self._pool
        most = min(num_wanted, pool.num_reusable(until_s) - num_headroom_pages)
        found = min(most, pool.num_blank)
        for page in pool.least_recently_used(max(0, most - found)):
            blocks = self._cache.whole_page(page)
            if blocks is not None and not self._search.has(page_key(blocks)):
                break
            found += 1
        return found

    def _carrier(self, sequence: Sequence, hit: Hit, places: Items[tuple[int, int]]) -> Sequence:
        """Returns a copy of a sequence with pages for its prefix: those of the hit, and new ones behind them in the KV
        group of each of these places, which are in order.
        """
        carrier, tables = copy(sequence), [list(one.pages) for one in (hit, *hit.others)]
        num_before = min(map(len, tables))
        for group, _ in places:
            tables[group].append(self._pool.allocate())
        carrier.state, carrier.slot = State.LOADING, -1
        carrier.pages, *carrier.more_page_tables = tables
        carrier.num_computed = hit.num_tokens
        carrier.num_published = num_before * self._page_size // BLOCK_SIZE_TOKENS
        return carrier

    def _release(self, carrier: Sequence) -> None:
        self._pool.release_all(reversed(self._retained(carrier.page_tables)))

    def loaded(self, loaded: Loaded) -> bool:
        """Takes a load that has ended. Returns False if it is none of a prefetch."""
        prefetch = self._loading.pop(loaded.sequence, None)
        if prefetch is None:
            return False
        carrier = prefetch.carrier
        carrier.num_computed, prefetch.is_loading = loaded.num_tokens, False
        if loaded.is_void:
            self._release(carrier)
            for page in prefetch.pages:
                self._waste(page, prefetch)
            return True
        self._cache.publish(carrier)
        if self._checkpoints is not None and loaded.state_key is not None and loaded.checkpoint is not None:
            self._checkpoints.publish(loaded.checkpoint, loaded.state_key)
        num_pages = loaded.num_tokens // self._page_size
        leased = self._retained([table[:num_pages][::-1] for table in carrier.page_tables])
        self._pool.lease(leased, prefetch.until_s - self._now_s, is_pinned=False)
        self._release(carrier)
        for page in prefetch.pages[len(prefetch.pages) - (len(carrier.pages) - num_pages) :]:
            self._waste(page, prefetch)
        return True

    def used(self, sequence: Sequence, num_tokens: int) -> Counter[str]:
        """Counts the prefetched pages among the cached tokens of an admitted sequence. Returns their tokens by tier."""
        found = Counter[str]()
        if not self._unused:
            return found
        per_page = self._page_size // BLOCK_SIZE_TOKENS
        for place in range(num_tokens // self._page_size):
            key = sequence.key((place + 1) * per_page - 1)
            for group in range(self._cache.num_groups):
                entry = self._unused.pop(group_key(key, group), None)
                if entry is not None and entry[1].record.is_reported:
                    tier = entry[1].tier
                    tier.prefetch_used(self._page_size)
                    tier.hit(self._page_size)
                    found[tier.name] += self._page_size
        return found

    @property
    def next_end_s(self) -> float:
        """The time at which `advance` has something to do; infinite if it has nothing."""
        return self._ends[0][0] if self._ends else float("inf")

    def advance(self, now_s: float) -> None:
        """Ends the prefetches whose time has passed: what is still loading is cancelled, what was not hit is evicted
        first.
        """
        self._now_s = now_s
        while self._ends and self._ends[0][0] <= now_s:
            self._end(heappop(self._ends)[2])

    def _end(self, prefetch: _Prefetch) -> None:
        keys = [page.record.key for page in prefetch.pages]
        unused = [key for key in keys if (entry := self._unused.get(key)) is not None and entry[0] is prefetch]
        if prefetch.is_loading:
            self._cancel(prefetch)
        else:
            self._pool.give_up(self._cache.pages_of(unused), ends_lease=False)
        for page in prefetch.pages:
            self._waste(page, prefetch)

    def _cancel(self, prefetch: _Prefetch) -> None:
        """Frees the pages of a load that nobody waits for. They stay pinned for as long as they may be written to."""
        prefetch.is_loading = False
        del self._loading[prefetch.carrier]
        self._loads.cancel(prefetch.carrier)
        self._release(prefetch.carrier)

    def _waste(self, page: TierPage, prefetch: _Prefetch) -> None:
        """Counts a page as wasted unless a prompt has hit it."""
        entry = self._unused.get(page.record.key)
        if entry is not None and entry[0] is prefetch:
            del self._unused[page.record.key]
            if page.record.is_reported:
                page.tier.prefetch_wasted(self._page_size)

    def clear(self) -> None:
        """Cancels all loads, and forgets what has been loaded: the device's contents cannot be relied on."""
        for prefetch in list(self._loading.values()):
            self._cancel(prefetch)
        for prefetch, page in list(self._unused.values()):
            self._waste(page, prefetch)
        self._ends.clear()
