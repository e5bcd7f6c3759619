"""Requests that wait at the gateway, by the endpoint that they wait for, in the order in which they are served.

Flows share an endpoint fairly; within a flow, priority, deadline and arrival decide. Pure data: it does not know why a
request waits for one endpoint and not for another.
"""

from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass
from operator import attrgetter

from mini_infer_gateway.fleet.fair_shares import NO_KEY, FairShares, Flow
from mini_infer_gateway.fleet.placement_pauses import PlacementPauses

Order = tuple[int, float, int]
"""(priority, deadline on the monotonic clock, arrival number): the lowest of a flow goes first."""

_order = attrgetter("order")


@dataclass(slots=True, eq=False)
class Entry:
    """A waiting request."""

    order: Order
    pool: str
    """The unit to which the queue limit applies: the endpoints of one model."""
    endpoint: str = ""
    """The endpoint that the request waits for; "" if it does not wait."""
    uncached_tokens: int = 0
    """Prompt tokens that this endpoint would have to compute, by the latest decision."""
    flow: Flow = NO_KEY


class _Line:
    """The requests of one flow that wait for one endpoint."""

    __slots__ = ("entries", "flow", "tokens")

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.entries: list[Entry] = []
        self.tokens = 0

    def ahead(self, order: Order) -> tuple[int, int]:
        """Returns the number of requests that go before `order`, and their tokens."""
        if self.entries[-1].order < order:
            return len(self.entries), self.tokens
        count = bisect_left(self.entries, order, key=_order)
        return count, sum(entry.uncached_tokens for entry in self.entries[:count])


class Backlog:
    """The waiting requests of all endpoints."""

    def __init__(self) -> None:
        self.shares = FairShares()
        self._lines: dict[str, dict[str, _Line]] = {}
        """Lines by endpoint and name of the flow."""
        self._flows: Counter[Flow] = Counter()
        self._pools: dict[str, Counter[Flow]] = {}
        self.pauses = PlacementPauses()

    def __bool__(self) -> bool:
        return bool(self._lines)

    def add(self, entry: Entry, endpoint: str, uncached_tokens: int) -> None:
        """Adds `entry` to the requests that wait for this endpoint."""
        entry.endpoint, entry.uncached_tokens = endpoint, uncached_tokens
        flow = entry.flow
        lines = self._lines.setdefault(endpoint, {})
        line = lines.get(flow.name)
        if line is None:
            line = lines[flow.name] = _Line(flow)
        insort(line.entries, entry, key=_order)
        line.tokens += uncached_tokens
        if not self._flows[flow]:
            self.shares.join(flow)
        self._flows[flow] += 1
        self._pools.setdefault(entry.pool, Counter())[flow] += 1

    def remove(self, entry: Entry) -> None:
        """Removes `entry`, which waits no more."""
        lines = self._lines[entry.endpoint]
        line = lines[entry.flow.name]
        del line.entries[bisect_left(line.entries, entry.order, key=_order)]
        line.tokens -= entry.uncached_tokens
        if not line.entries:
            del lines[entry.flow.name]
        if not lines:
            del self._lines[entry.endpoint]
        pool = self._pools[entry.pool]
        for counts in (self._flows, pool):
            counts[entry.flow] -= 1
            if not counts[entry.flow]:
                del counts[entry.flow]
        if not pool:
            del self._pools[entry.pool]
        entry.endpoint = ""

    def first(self, endpoint: str) -> Entry | None:
        """Returns the entry that goes first among those that wait for this endpoint."""
        lines = self._lines.get(endpoint)
        if lines is None:
            return None
        return min((line.entries[0] for line in lines.values()), key=self.rank) if len(lines) > 1 else _only(lines, 0)

    def final(self, endpoint: str) -> Entry | None:
        """Returns the entry that goes last among those that wait for this endpoint."""
        lines = self._lines.get(endpoint)
        if lines is None:
            return None
        return max((line.entries[-1] for line in lines.values()), key=self.rank) if len(lines) > 1 else _only(lines, -1)

    def rank(self, entry: Entry) -> tuple[float, Order]:
        """Returns a sort key; among the first entries of several flows, the lowest goes first."""
        return self.shares.level(entry.flow), entry.order

    def goes_before(self, entry: Entry, other: Entry) -> bool:
        """True if `entry` goes before `other` in the current state."""
        if entry.flow == other.flow:
            return entry.order < other.order
        level = self.shares.level(entry.flow)
        if not self._flows[entry.flow]:
            level = max(level, self.shares.virtual_time)
        return (level, entry.order) < self.rank(other)

    def waiting(self, endpoint: str) -> list[Entry]:
        """Returns the entries that wait for this endpoint, flow by flow, each in order. Do not change the list."""
        lines = sorted(self._lines.get(endpoint, {}).values(), key=lambda line: self.shares.level(line.flow))
        if len(lines) == 1:
            return lines[0].entries
        return [entry for line in lines for entry in line.entries]

    def count(self, endpoint: str) -> int:
        """Returns the number of requests that wait for this endpoint."""
        return sum(len(line.entries) for line in self._lines.get(endpoint, {}).values())

    def endpoints(self) -> list[str]:
        """Returns the endpoints for which a request waits."""
        return list(self._lines)

    def flows(self) -> list[Flow]:
        """Returns the flows that have a waiting request."""
        return list(self._flows)

    def ahead(self, endpoint: str, order: Order, flow: Flow = NO_KEY) -> tuple[int, int]:
        """Returns (requests, uncached tokens) that wait for this endpoint and go before a request of this order and
        flow.

        The part of other flows is an estimate: what they are served until this flow's counter has passed theirs.
        """
        lines = self._lines.get(endpoint)
        if not lines:
            return 0, 0
        own = lines.get(flow.name)
        requests, tokens = own.ahead(order) if own else (0, 0)
        if len(lines) == 1 and own:
            return requests, tokens
        finish_level = max(self.shares.level(flow), self.shares.virtual_time) + tokens / flow.weight
        for line in lines.values():
            if line is not own and (earlier := (finish_level - self.shares.level(line.flow)) * line.flow.weight) >= 0:
                share = min(1.0, earlier / line.tokens) if line.tokens else 1.0
                requests += max(1, int(len(line.entries) * share))
                tokens += int(line.tokens * share)
        return requests, tokens

    def depth(self, pool: str) -> int:
        """Returns the number of requests that wait in this pool."""
        return self._pools[pool].total() if pool in self._pools else 0

    def depths(self) -> dict[str, int]:
        """Returns the number of waiting requests by pool, for pools that have any."""
        return {pool: counts.total() for pool, counts in self._pools.items()}

    def waiting_tokens(self) -> dict[str, int]:
        """Returns the uncached prompt tokens of waiting requests by pool."""
        tokens: Counter[str] = Counter()
        for lines in self._lines.values():
            for line in lines.values():
                for entry in line.entries:
                    tokens[entry.pool] += entry.uncached_tokens
        return dict(tokens)

    def depth_of(self, pool: str, flow: Flow) -> int:
        """Returns the number of requests of this flow that wait in this pool."""
        return self._pools[pool][flow] if pool in self._pools else 0

    def longest(self, pool: str) -> Flow | None:
        """Returns the flow with the most requests in this pool for its weight; None if nothing waits."""
        counts = self._pools.get(pool)
        return max(counts, key=lambda flow: counts[flow] / flow.weight) if counts else None

    def last(self, pool: str, flow: Flow | None = None) -> Entry | None:
        """Returns the entry of this pool that goes last, of this flow if one is given."""
        lines = (line for lines in self._lines.values() for line in lines.values() if flow in (None, line.flow))
        lasts = (next((e for e in reversed(line.entries) if e.pool == pool), None) for line in lines)
        return max(filter(None, lasts), key=_order, default=None)


def _only(lines: dict[str, _Line], index: int) -> Entry:
    return next(iter(lines.values())).entries[index]
