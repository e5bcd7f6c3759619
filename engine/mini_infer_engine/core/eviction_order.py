"""Orders unused cached pages by when they are reused: least recently used first, and those of leases last. Pure.

A lease says that a session will return before a time. Until then its pages are reused after all others. If every page
has a lease, the one that ends last gives up its pages first, from its end on: leases of like sessions differ by when
the session left, so this evicts what is wanted again latest (Belady's rule with predicted times), and leaves other
sessions whole. Least recently used first would be the worst order there: it evicts whoever returns next. A lease that
has ended leaves its pages as if they had just been used, so that leases that are too short lose nothing against LRU.
Time is passed in.
"""

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from math import inf

PINNED = -inf
_FEW_LEASES = 64
"""Number of leases that may have no page left."""


class _Lease:
    """The pages of one lease."""

    __slots__ = ("is_pinned", "members", "until_s", "unused")

    def __init__(self, until_s: float, *, is_pinned: bool) -> None:
        self.until_s, self.is_pinned = until_s, is_pinned
        self.members: set[int] = set()
        """All its pages, used ones too."""
        self.unused: OrderedDict[int, None] = OrderedDict()
        """The pages without a user, in the order in which they are reused."""

    @property
    def rank(self) -> float:
        """The place in the order in which leases give up pages: the highest first."""
        return PINNED if self.is_pinned else self.until_s


class EvictionOrder:
    """A set of pages that have no user and can be hit, in the order in which they are reused."""

    def __init__(self) -> None:
        self._done: OrderedDict[int, None] = OrderedDict()
        """Pages of sessions that will not return."""
        self._plain: OrderedDict[int, None] = OrderedDict()
        self._leases: list[_Lease] = []
        """Leases that have not ended, by rank."""
        self._lease_of: dict[int, _Lease] = {}
        self._marked_done: set[int] = set()
        self._num_leased = 0
        self._next_end_s = inf
        """A time before which no lease ends."""
        self._num_kept = 0
        """Number of leases after those without pages were dropped last."""
        self.now_s = 0.0
        self.num_left = 0
        """Pages that were reused, or got a user, or another place in the order since the start."""

    def __len__(self) -> int:
        return len(self._done) + len(self._plain) + self._num_leased

    def __contains__(self, page: object) -> bool:
        if page in self._plain or page in self._done:
            return True
        lease = self._lease_of.get(page) if self._lease_of else None  # type: ignore[call-overload]
        return lease is not None and page in lease.unused

    def __iter__(self) -> Iterator[int]:
        """Yields the pages, the one that is reused first first."""
        leased = chain.from_iterable(lease.unused for lease in reversed(self._leases))
        return chain(self._done, self._plain, leased)

    def __setitem__(self, page: int, value: None) -> None:
        """Adds a page, which has lost its last user."""
        if not self.has_leases:
            self._plain[page] = None
        elif (lease := self._lease_of.get(page)) is not None:
            lease.unused[page] = None
            self._num_leased += 1
        elif page in self._marked_done:
            self._marked_done.discard(page)
            self._done[page] = None
        else:
            self._plain[page] = None

    def __delitem__(self, page: int) -> None:
        """Removes a page that gets a user. Its lease ends with that, as its session has returned."""
        if page in self._plain:  # it has no lease
            del self._plain[page]
            self.num_left += 1
            return
        self.suspend(page)
        if (lease := self._lease_of.pop(page, None)) is not None:
            lease.members.discard(page)

    def suspend(self, page: int) -> None:
        """Removes a page that gets a user who copies it elsewhere. Its lease stays."""
        self.num_left += 1
        if page in self._plain:
            del self._plain[page]
        elif page in self._done:
            del self._done[page]
        else:
            del self._lease_of[page].unused[page]
            self._num_leased -= 1

    def popitem(self, *, last: bool = False) -> tuple[int, None]:
        """Removes the page that is reused first, with its lease. Raises KeyError if there is none."""
        assert not last, "pages are reused from the front"
        for pages in (self._done, self._plain):
            if pages:
                self.num_left += 1
                return pages.popitem(last=False)
        page = next(iter(self), None)
        if page is None:
            raise KeyError("no page")
        del self[page]
        return page, None

    def move_to_end(self, page: int, *, last: bool = True) -> None:
        """Makes a page the last to be reused, or the first, among those of its kind."""
        lease = self._lease_of.get(page)
        pages = lease.unused if lease is not None else self._done if page in self._done else self._plain
        pages.move_to_end(page, last=last)
        self.num_left += 1

    @property
    def has_leases(self) -> bool:
        """True if some pages have leases, or are those of a session that will not return."""
        return bool(self._lease_of or self._marked_done or self._done)

    def num_before(self, until_s: float) -> int:
        """Returns the number of pages that are reused before any whose lease ends by `until_s` or is pinned."""
        later = (len(one.unused) for one in self._leases if one.until_s > until_s and not one.is_pinned)
        return len(self._done) + len(self._plain) + sum(later)

    @property
    def num_pinned(self) -> int:
        """Number of pages whose lease is pinned."""
        return sum(len(lease.members) for lease in self._leases if lease.is_pinned)

    def lease(self, pages: Iterable[int], until_s: float, *, is_pinned: bool = False) -> None:
        """Gives pages, used or not, a lease. If they have one, that which ends later counts, and a pinned one most."""
        lease = _Lease(until_s, is_pinned=is_pinned)
        for page in pages:
            self._marked_done.discard(page)
            present = self._lease_of.get(page)
            if present is not None and (present.is_pinned, present.until_s) > (is_pinned, until_s):
                continue
            if is_unused := page in self:
                del self[page]
            elif present is not None:
                present.members.discard(page)
            self._lease_of[page] = lease
            lease.members.add(page)
            if is_unused:
                self[page] = None
        insort(self._leases, lease, key=lambda one: one.rank)
        self._next_end_s = min(self._next_end_s, until_s)
        if len(self._leases) > 2 * self._num_kept + _FEW_LEASES:
            self._drop_empty()

    def mark_done(self, pages: Iterable[int]) -> None:
        """Has pages without a lease reused first once they have no user, in the order in which they lose it."""
        self._marked_done.update(page for page in pages if page not in self._lease_of)

    def give_up(self, pages: Sequence[int], *, ends_lease: bool) -> None:
        """Has pages of a session, which end its prefix last, reused first, those without a user from now on. Pages with
        a lease stay; with `ends_lease`, the lease of the last page ends: other sessions that share pages keep theirs.
        """
        own = self._lease_of.get(pages[-1]) if ends_lease and pages else None
        for page in reversed(pages):
            if (lease := self._lease_of.get(page)) is not None and lease is not own:
                continue
            is_unused = page in self
            if is_unused:
                del self[page]
            else:
                self.forget(page)
            self._marked_done.add(page)
            if is_unused:
                self[page] = None

    def forget(self, page: int) -> None:
        """Forgets the lease of a used page whose contents are not wanted any more."""
        self._marked_done.discard(page)
        if (lease := self._lease_of.pop(page, None)) is not None:
            lease.members.discard(page)

    def advance(self, now_s: float) -> None:
        """Ends the leases whose time has passed."""
        self.now_s = now_s
        if now_s < self._next_end_s:
            return
        ended = sorted((one for one in self._leases if one.until_s <= now_s), key=lambda one: one.until_s)
        self._leases = [one for one in self._leases if one.until_s > now_s]
        self._drop_empty()
        self._next_end_s = min((one.until_s for one in self._leases), default=inf)
        for lease in ended:
            for page in lease.members:
                del self._lease_of[page]
            self._num_leased -= len(lease.unused)
            self.num_left += len(lease.unused)
            self._plain.update(lease.unused)

    def _drop_empty(self) -> None:
        """Drops the leases whose pages have all been reused, or leased again."""
        self._leases = [lease for lease in self._leases if lease.members]
        self._num_kept = len(self._leases)
