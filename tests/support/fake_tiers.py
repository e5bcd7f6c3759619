"""The tiers' memory without bytes, for a fake runner whose pages are lists of cells: copies that take their time,
fail, and come back changed when a test says so.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mini_infer_engine.core.kv_tiers.page_record import PageRecord
from mini_infer_engine.core.kv_tiers.tier_memory import DiskMoved, DiskPage, Moved, PageMove, StateMove

Cells = list[int | None]
DIGESTS = 1 << 64
NUM_LAYERS = 3
"""Layers of a page, for loads by layer."""


def digest_of(cells: Cells) -> int:
    return hash(tuple(cells)) % DIGESTS


@dataclass
class FakeHostMemory:
    """Each copy ends at a later `take`, in the order of requests; what is loaded is garbage until then."""

    cells: list[Cells]
    """The contents of the device's pages, which the runner reads and writes."""
    num_pages: int
    draw: random.Random
    page_bytes: int = 8 << 20
    identity: bytes = b"fake"
    latency_s: float = 0.0
    bytes_per_s: float = 1e15
    pages: dict[int, Cells] = field(default_factory=dict)
    error: str = ""
    """Fails the next copy."""
    num_loads: int = 0
    num_state_loads: int = 0
    checkpoints: list[int | None] = field(default_factory=list)
    """The device's checkpoints of recurrent state, which the runner reads and writes."""
    pages_per_state: int = 0
    loads_by_layer: bool = False
    least_load_s: float = 0.0
    num_layerwise_loads: int = 0
    flipped: set[int] = field(default_factory=set)
    """Pages that have changed since they were stored."""
    void_pages: set[int] = field(default_factory=set)
    """Pages of the device that a pass may read with other contents than those that had left it."""
    _jobs: deque[tuple[int, Callable[[], list[int]]]] = field(default_factory=deque)

    def store(self, ticket: int, moves: Sequence[PageMove], states: Sequence[StateMove] = ()) -> None:
        before = [list(self.cells[move.source]) for move in moves]
        states_before = [self.checkpoints[state.checkpoint] for state in states]

        def copy() -> list[int]:
            for move, cells in zip(moves, before, strict=True):
                now = self.cells[move.source]  # another sequence's by now if the page was evicted meanwhile
                middle = len(now) // 2
                self.pages[move.target] = cells[:middle] + now[middle:]
                self.flipped.discard(move.target)
            for state, value in zip(states, states_before, strict=True):
                assert len(state.pages) == self.pages_per_state
                for place, page in enumerate(state.pages):
                    self.pages[page] = [self.checkpoints[state.checkpoint] if place % 2 else value, place]
            return [digest_of(cells) for cells in before] + [
                digest_of(self._parts_of(value)) for value in states_before
            ]

        self._jobs.append((ticket, copy))

    def _parts_of(self, value: int | None) -> Cells:
        return [cell for place in range(self.pages_per_state) for cell in (value, place)]

    def load(self, ticket: int, moves: Sequence[PageMove], states: Sequence[StateMove] = ()) -> None:
        self.num_loads += 1
        self.num_state_loads += len(states)
        for move in moves:
            self.cells[move.target][:] = [None] * len(self.cells[move.target])
        for state in states:
            self.checkpoints[state.checkpoint] = None

        def copy() -> list[int]:
            for move in moves:
                self.cells[move.target][:] = self.pages[move.source]
                self.void_pages.discard(move.target)
            digests = [digest_of(self.cells[move.target]) for move in moves]
            for state in states:
                parts = [cell for page in state.pages for cell in self.pages[page]]
                self.checkpoints[state.checkpoint] = parts[0] if parts == self._parts_of(parts[0]) else hash(str(parts))
                digests.append(digest_of(parts))
            return digests

        self._jobs.append((ticket, copy))

    @property
    def layerwise(self) -> "FakeHostMemory | None":
        return self if self.loads_by_layer else None

    def load_layerwise(self, ticket: int, moves: Sequence[PageMove]) -> "FakeLayerwiseLoad":
        self.num_loads += 1
        self.num_layerwise_loads += 1
        load = FakeLayerwiseLoad(self, moves)
        self._jobs.append((ticket, load.digests))
        return load

    def take(self) -> list[Moved]:
        ended = []
        while self._jobs and self.draw.random() < 0.8:
            ticket, copy = self._jobs.popleft()
            try:
                self.fail_if_told()
                ended.append(Moved(ticket, 1e-9, copy()))
            except OSError as error:
                ended.append(Moved(ticket, 1e-9, error=str(error)))
        return ended

    def fail_if_told(self) -> None:
        error, self.error = self.error, ""
        if error:
            raise OSError(error)

    def wait(self, timeout_s: float) -> None:
        assert self._jobs, "nothing to wait for"

    def page_memory(self, page: int) -> memoryview:
        raise AssertionError("the fake disk copies cells")

    def flip(self) -> bool:
        """Changes one cell of some page in main memory. Returns False if there is none."""
        if not self.pages:
            return False
        page = self.draw.choice(sorted(self.pages))
        self.flipped.add(page)
        cells = self.pages[page]
        place = self.draw.randrange(len(cells))
        cells[place] = (cells[place] or 0) ^ (1 << self.draw.randrange(60))
        return True


class FakeLayerwiseLoad:
    """A layer has each third cell of a page. All are garbage until their layer is waited for."""

    def __init__(self, host: FakeHostMemory, moves: Sequence[PageMove]) -> None:
        self.moves = list(moves)
        self._host, self._error = host, ""
        self._num_copied = 0
        for move in moves:
            host.cells[move.target][:] = [None] * len(host.cells[move.target])

    def wait_for_layer(self, layer: int) -> None:
        while self._num_copied <= layer:
            self._copy_layer(self._num_copied)
            self._num_copied += 1

    def _copy_layer(self, layer: int) -> None:
        if not self._error:
            try:
                self._host.fail_if_told()
            except OSError as error:
                self._error = str(error)
        for move in self.moves:
            is_void = self._error or move.source in self._host.flipped
            (self._host.void_pages.add if is_void else self._host.void_pages.discard)(move.target)
            cells, count = self._host.pages[move.source], len(range(layer, len(self._host.cells[0]), NUM_LAYERS))
            garbage: Cells = [hash((layer, number)) for number in range(count)]
            self._host.cells[move.target][layer::NUM_LAYERS] = garbage if self._error else cells[layer::NUM_LAYERS]

    def digests(self) -> list[int]:
        self.wait_for_layer(NUM_LAYERS - 1)
        if self._error:
            raise OSError(self._error)
        return [digest_of(self._host.cells[move.target]) for move in self.moves]


@dataclass
class FakeDisk:
    """A list of pages, of which the oldest are dropped; reads and writes end in any order."""

    host: FakeHostMemory
    capacity: int
    draw: random.Random
    latency_s: float = 0.0
    bytes_per_s: float = 1e15
    fault: str = ""
    pages: dict[int, Cells] = field(default_factory=dict)
    records: dict[int, PageRecord] = field(default_factory=dict)
    error: str = ""
    num_reads: int = 0
    _jobs: list[tuple[int, Callable[[], int]]] = field(default_factory=list)
    _dropped: list[int] = field(default_factory=list)
    _next: int = 0

    @property
    def capacity_bytes(self) -> int:
        return self.capacity * self.host.page_bytes

    @property
    def used_bytes(self) -> int:
        return len(self.pages) * self.host.page_bytes

    def take_recovered(self) -> list[DiskPage]:
        return []

    def write(self, ticket: int, host_page: int, record: PageRecord) -> None:
        def copy() -> int:
            location, self._next = self._next, self._next + 1
            self.pages[location], self.records[location] = list(self.host.pages[host_page]), record
            while len(self.pages) > self.capacity:
                oldest = min(self.pages)
                del self.pages[oldest]
                self._dropped.append(oldest)
            return location

        self._jobs.append((ticket, copy))

    def read(self, ticket: int, location: int, host_page: int) -> None:
        self.num_reads += 1

        def copy() -> int:
            if location not in self.pages:
                raise OSError("this file was dropped")
            self.host.pages[host_page] = list(self.pages[location])
            self.host.flipped.discard(host_page)
            return location

        self._jobs.append((ticket, copy))

    def take(self) -> list[DiskMoved]:
        ended = []
        self.draw.shuffle(self._jobs)
        while self._jobs and self.draw.random() < 0.5:
            ticket, copy = self._jobs.pop()
            error, self.error = self.error, ""
            if error:
                ended.append(DiskMoved(ticket, 1e-6, error=error))
                continue
            try:
                ended.append(DiskMoved(ticket, 1e-9, copy()))
            except OSError:
                ended.append(DiskMoved(ticket, 1e-6, is_gone=True))
        return ended

    def take_dropped(self) -> list[int]:
        dropped, self._dropped = self._dropped, []
        return dropped

    def wait(self, timeout_s: float) -> None:
        assert self._jobs, "nothing to wait for"

    def clear(self) -> None:
        self.pages.clear()
