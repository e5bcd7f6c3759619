"""Requests that wait at the gateway, by the endpoint that they wait for, in the order in which they go.

Pure data: it does not know why a request waits for this endpoint and not for another.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from operator import attrgetter

Order = tuple[int, float, int]
"""(priority, deadline on the monotonic clock, number of arrival): the lowest goes first."""

_order = attrgetter("order")


@dataclass(slots=True, eq=False)
class Entry:
    """One waiting request."""

    order: Order
    pool: str
    """What is bounded together: the endpoints of one model."""
    endpoint: str = ""
    """That it waits for; "": it does not wait."""
    uncached_tokens: int = 0
    """Prompt tokens that this endpoint would have to compute, when it was last looked at."""


class Backlog:
    """Entries of all endpoints."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Entry]] = {}
        self._tokens: dict[str, int] = {}
        self._pools: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, entry: Entry, endpoint: str, uncached_tokens: int) -> None:
        """`entry` waits for this endpoint now."""
        entry.endpoint, entry.uncached_tokens = endpoint, uncached_tokens
        insort(self._waiting.setdefault(endpoint, []), entry, key=_order)
        self._tokens[endpoint] = self._tokens.get(endpoint, 0) + uncached_tokens
        self._pools[entry.pool] = self._pools.get(entry.pool, 0) + 1

    def remove(self, entry: Entry) -> None:
        """`entry` waits no more."""
        waiting = self._waiting[entry.endpoint]
        del waiting[bisect_left(waiting, entry.order, key=_order)]
        self._tokens[entry.endpoint] -= entry.uncached_tokens
        self._pools[entry.pool] -= 1
        if not waiting:
            del self._waiting[entry.endpoint], self._tokens[entry.endpoint]
        if not self._pools[entry.pool]:
            del self._pools[entry.pool]
        entry.endpoint = ""

    def waiting(self, endpoint: str) -> list[Entry]:
        """For this endpoint, in order. Not to be changed."""
        return self._waiting.get(endpoint, [])

    def endpoints(self) -> list[str]:
        """Those that something waits for."""
        return list(self._waiting)

    def ahead(self, endpoint: str, order: Order) -> tuple[int, int]:
        """(requests, uncached tokens) that wait for this endpoint and go before `order`."""
        waiting = self._waiting.get(endpoint)
        if not waiting:
            return 0, 0
        if waiting[-1].order < order:
            return len(waiting), self._tokens[endpoint]
        count = bisect_left(waiting, order, key=_order)
        return count, sum(entry.uncached_tokens for entry in waiting[:count])

    def depth(self, pool: str) -> int:
        """Requests that wait in this pool."""
        return self._pools.get(pool, 0)

    def depths(self) -> dict[str, int]:
        """The same of all pools in which something waits."""
        return dict(self._pools)

    def last(self, pool: str) -> Entry | None:
        """The one in this pool that goes last."""
        lasts = (next((e for e in reversed(own) if e.pool == pool), None) for own in self._waiting.values())
        return max(filter(None, lasts), key=_order, default=None)
