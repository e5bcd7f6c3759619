"""Tracks which pages of prefixes are in a pool that several engines share, as `HostIndex` does for one engine alone.

What is in the pool stands in its file: each slot has a state and a record of its page. A record is written while its
slot is being filled, and the state last, so that a process that is killed at any moment leaves a whole page or none;
bytes are checked by their digest when they are loaded, whatever a state says. Nor is anything else in the file relied
on: numbers there may have changed as bytes of pages may, which costs pages, and no process. Each engine has a copy of
the records in its own memory, and brings it up to date once a step: that reads one number if nothing has changed. The
copy may name pages that others have evicted meanwhile, so a page is only used after `acquire`, which looks at the
file.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from mini_infer_contract.events import MEDIUM_HOST
from mini_infer_engine.core.kv_tiers.page_record import PageRecord
from mini_infer_engine.core.kv_tiers.tier_events import TierEvents
from mini_infer_engine.kv_disk.page_header import decode_header, encode_header
from mini_infer_engine.kv_host.pool_file import MOST_ROWS, REGION_SLOTS, PoolFile

FREE, FILLING, VALID = 0, 1, 2
"""The status of a slot: the lowest bits of its state."""
_STATUS, _GENERATION = 3, 4
_NO_USERS = bytes(2 * MOST_ROWS)
_UNKNOWN = 2**64 - 1
"""A state that no slot has."""
_MOST_USERS = 2**16 - 1
_MOST_IN_ORDER = 1024
_REAP_S = 10.0
"""Seconds between two looks for processes that have ended."""


class SharedHostIndex:
    """The pages of a shared pool by the key of their last block, and this engine's users of them.

    Pages of which no engine is a user are evicted, the least recently used of all engines first.
    """

    def __init__(self, file: PoolFile, *, record_events: bool) -> None:
        """Finds all pages that other engines, or former ones, have left."""
        self._file, self._row = file, file.row
        self.num_pages = file.layout.num_slots
        self.events = TierEvents(MEDIUM_HOST, are_recorded=record_events)
        self.num_changes = 0
        """Pages that have come or gone since the start, as far as this engine knows."""
        self._pages: dict[bytes, int] = {}
        self._records: list[PageRecord | None] = [None] * self.num_pages
        self._states = np.zeros(self.num_pages, np.uint64)
        # Single items are read and written through views, which are faster than arrays there.
        self._state, self._known_state = file.states.data, self._states.data
        self._used_at, self._owner = file.used_at.data, file.owners.data
        self._users_here, self._users = file.users[:, file.row].data, file.users.data.cast("B")
        self._region_changes = np.zeros_like(file.region_changes)
        self._changes = -1
        self.num_blank = self.num_pages
        """Slots without contents."""
        self._order: deque[tuple[int, int]] = deque()
        """Slots to be evicted next, each with the time of its last use."""
        self._to_free: list[int] = []
        """Slots of ours without contents that could not be freed yet."""
        self._num_users = 0
        """Users that this engine is, of all pages."""
        self._too_long: set[bytes] = set()
        """Keys of pages whose salts have thousands of characters: they seem to be here, so that nobody copies them."""
        self._is_detached = False
        self._reap_at_s = 0.0
        self._reap(file.row)
        self.sync()
        if file.is_void:
            self.clear()

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can return at most: all of which this engine is no user."""
        return 0 if self._is_detached else max(0, self.num_pages - self._num_users)

    def __contains__(self, key: bytes) -> bool:
        return key in self._pages or key in self._too_long

    def __len__(self) -> int:
        return len(self._pages)

    def page(self, key: bytes) -> int | None:
        """Returns the page with this key, or None. It may be evicted at any time before it is acquired."""
        return self._pages.get(key)

    def record(self, page: int) -> PageRecord | None:
        """Returns what is in a page, or None if that is nothing that can be hit."""
        return self._records[page]

    @property
    def records(self) -> list[PageRecord]:
        """The records of all pages that can be hit."""
        return [record for record in self._records if record is not None]

    # What this engine learns from the file.

    def sync(self) -> None:
        """Takes in what other engines have changed. Costs a microsecond if that is nothing."""
        if self._is_detached:
            return
        now_s = time.monotonic()
        if now_s >= self._reap_at_s:
            self._reap_at_s = now_s + _REAP_S
            self._reap_dead()
        self._update()

    def _update(self) -> None:
        changes = int(self._file.changes[0])
        if changes == self._changes:
            return
        counts, new = self._file.region_changes.copy(), list[tuple[int, int]]()
        for region in np.flatnonzero(counts != self._region_changes).tolist():
            first = region * REGION_SLOTS
            states = self._file.states[first : first + REGION_SLOTS].copy()
            changed = np.flatnonzero(states != self._states[first : first + REGION_SLOTS])
            new += [(first + place, int(states[place])) for place in changed.tolist()]
        for slot, state in new:  # all that went, before what came: a page may have come to another slot
            self._set_state(slot, state)
            self._forget_record(slot)
        for slot, state in new:
            if state & _STATUS == VALID:
                self._read(slot, state)
        self._region_changes, self._changes = counts, changes

    def _read(self, slot: int, state: int) -> None:
        """Takes in the contents of a slot that has this state."""
        record = decode_header(bytes(self._file.record(slot)))
        if self._state[slot] != state:
            self._set_state(slot, _UNKNOWN)  # it was evicted meanwhile, which is counted, too
        elif record is not None:
            self._know(slot, record)

    def _set_state(self, slot: int, state: int) -> None:
        was, is_ = self._known_state[slot] & _STATUS, state & _STATUS
        self.num_blank += (is_ == FREE) - (was == FREE)
        self._known_state[slot] = state

    def _know(self, slot: int, record: PageRecord) -> None:
        if record.key not in self._pages:
            self._pages[record.key] = slot
            self._records[slot] = record
            self.num_changes += 1
            self.events.stored(record)

    def _forget_record(self, slot: int) -> None:
        record = self._records[slot]
        if record is not None:
            self._records[slot] = None
            del self._pages[record.key]
            self.num_changes += 1
            self.events.removed(record)

    # What it changes there.

    def _change(self, slots: Sequence[int], status: int, *, is_new: bool = False) -> None:
        """Sets the status of slots, and counts that last. The guard must be held."""
        for slot in slots:
            state = ((self._state[slot] & ~_STATUS) + status + _GENERATION * is_new) & _UNKNOWN
            if status != VALID:
                self._forget_record(slot)
            self._state[slot] = state
            self._set_state(slot, state)
        for region in {slot // REGION_SLOTS for slot in slots}:
            self._file.region_changes[region] += np.uint64(1)
        self._file.changes[0] += np.uint64(1)

    def acquire(self, keys: Sequence[bytes]) -> list[int | None]:
        """Adds a user to the pages with these keys, and returns them; None for those that are not here any more."""
        slots = [self._pages.get(key) for key in keys]
        found: list[int | None] = [None] * len(keys)
        with self._file.guarded() as is_guarded:
            for place, slot in enumerate(slots):
                if slot is not None and is_guarded and self._state[slot] == self._known_state[slot]:
                    self._add_user(slot)
                    found[place] = slot
        return found

    def _add_user(self, slot: int) -> None:
        self._users_here[slot] = min(self._users_here[slot] + 1, _MOST_USERS)
        self._num_users += 1

    def _remove_user(self, slot: int) -> int:
        """Returns how many users this engine is still."""
        left = max(self._users_here[slot] - 1, 0)
        self._users_here[slot] = left
        self._num_users -= 1
        return left

    def allocate(self, count: int) -> list[int]:
        """Returns up to `count` pages, each with this engine as its only user: those without contents first, then the
        least recently used of all.
        """
        taken: list[int] = []
        with self._file.guarded() as is_guarded:
            if not is_guarded or not count or self._is_detached:
                return []
            self._free_all()
            self._update()
            candidates = chain(self._blank(count), self._evictable())
            while len(taken) < count and (slot := next(candidates, None)) is not None:
                if not self._is_used(slot):
                    self._owner[slot], self._users_here[slot] = self._row, 1
                    taken.append(slot)
            self._change(taken, FILLING, is_new=True)
        self._num_users += len(taken)
        if len(taken) < count:
            self._reap_at_s = 0.0
        return taken

    def _is_used(self, slot: int) -> bool:
        return self._users[slot * 2 * MOST_ROWS : (slot + 1) * 2 * MOST_ROWS] != _NO_USERS

    def _blank(self, count: int) -> list[int]:
        if self.num_blank <= 0:
            return []
        blank: list[int] = np.flatnonzero(self._states & np.uint64(_STATUS) == FREE)[: count + MOST_ROWS].tolist()
        return blank

    def _evictable(self) -> Iterator[int]:
        """Yields slots in the order of their last use, by an order that is made anew when it is used up."""
        for _ in range(2):
            while self._order:
                slot, used_at = self._order.popleft()
                if self._used_at[slot] == used_at and self._known_state[slot] & _STATUS == VALID:
                    yield slot
            self._order.extend(self._in_order(_MOST_IN_ORDER))

    def _in_order(self, count: int) -> list[tuple[int, int]]:
        is_used = self._file.users.any(axis=1)
        slots = np.flatnonzero((self._states & np.uint64(_STATUS) == VALID) & ~is_used)
        used_at = self._file.used_at[slots]
        if len(slots) > count:
            first = np.argpartition(used_at, count)[:count]
            slots, used_at = slots[first], used_at[first]
        order = np.argsort(used_at, kind="stable")
        return list(zip(slots[order].tolist(), used_at[order].tolist(), strict=True))

    def add_all(self, contents: Sequence[tuple[int, PageRecord]]) -> None:
        """Registers the contents of pages that this engine has filled, unless they are in another page already."""
        with self._file.guarded() as is_guarded:
            if not is_guarded or self._is_detached:
                return
            self._update()
            new: dict[bytes, tuple[int, PageRecord]] = {}
            for slot, record in contents:
                header = encode_header(record)
                if len(header) > self._file.layout.record_bytes:
                    self._too_long.add(record.key)
                if record.key in self or record.key in new:
                    continue
                self._file.record(slot)[: len(header)] = header
                self._used_at[slot] = _now_us()
                new[record.key] = slot, record
            self._change([slot for slot, _ in new.values()], VALID)
            for slot, record in new.values():
                self._know(slot, record)

    def evict(self, page: int) -> None:
        """Forgets a page that cannot be relied on, for all engines."""
        with self._file.guarded() as is_guarded:
            if is_guarded and self._state[page] == self._known_state[page]:
                self._change([page], FREE, is_new=True)
        self._forget_record(page)

    def clear(self) -> None:
        """Forgets all pages, for all engines. Those in use are not allocated before their users have released them."""
        with self._file.guarded() as is_guarded:
            if is_guarded and not self._is_detached:
                self._update()
                valid = np.flatnonzero(self._states & np.uint64(_STATUS) == VALID)
                self._change(valid.tolist(), FREE, is_new=True)
        for slot in list(self._pages.values()):
            self._forget_record(slot)

    def detach(self) -> None:
        """Forgets all pages for this engine alone, for good: others rely on them."""
        self._is_detached = True
        for slot in list(self._pages.values()):
            self._forget_record(slot)

    # Users of pages.

    def release_all(self, pages: Iterable[int]) -> None:
        """Removes a user from each page, in this order: the first is reused first."""
        now_us = _now_us()
        for number, slot in enumerate(pages):
            self._used_at[slot] = now_us + number
            left = self._remove_user(slot)
            if not left and self._state[slot] & _STATUS == FILLING and self._owner[slot] == self._row:
                self._to_free.append(slot)
        if self._to_free:
            with self._file.guarded() as is_guarded:
                if is_guarded:
                    self._free_all()

    def _free_all(self) -> None:
        """Frees slots that were allocated and got no contents. The guard must be held."""
        if self._to_free:
            self._change(self._to_free, FREE)
            self._to_free = []

    def begin_eviction(self, count: int, is_wanted: Callable[[int], bool]) -> list[int]:
        """Returns those of the next `count` pages to be evicted that this engine has filled and wants, with a user."""
        pages: list[int] = []
        with self._file.guarded() as is_guarded:
            if is_guarded and not self._is_detached:
                self._update()
                if len(self._order) < min(count, len(self._pages)):
                    self._order = deque(self._in_order(max(count, _MOST_IN_ORDER)))
                for slot, _ in islice(self._order, count):
                    if self._records[slot] is not None and self._owner[slot] == self._row and is_wanted(slot):
                        self._add_user(slot)
                        pages.append(slot)
        return pages

    def end_eviction(self, pages: Sequence[int]) -> None:
        """Removes the user that `begin_eviction` added; the pages stay the next to be evicted."""
        for slot in pages:
            self._remove_user(slot)

    # Processes that have ended.

    def _reap_dead(self) -> None:
        """Gives back what processes that have ended were using and filling."""
        users, owners = self._file.users, self._file.owners[_are_filling(self._file.states)]
        rows = {*np.flatnonzero(users.any(axis=0)).tolist(), *np.unique(owners).tolist()}
        for row in sorted(rows - {self._row}):
            if not self._file.is_alive(row):
                self._reap(row)

    def _reap(self, row: int) -> None:
        """Gives back what the last process of a row was using and filling, and adopts its pages."""
        with self._file.guarded() as is_guarded:
            if not is_guarded or (row != self._row and self._file.is_alive(row)):
                return
            file = self._file
            if row < MOST_ROWS:  # no process has a row beyond, whatever an owner says
                file.users[:, row] = 0
            filling = np.flatnonzero(_are_filling(file.states) & (file.owners == row))
            self._change(filling.tolist(), FREE, is_new=True)
            file.owners[file.owners == row] = self._row
            file.region_changes[:] += np.uint64(1)  # for changes that the process did not come to count
            file.changes[0] += np.uint64(1)


def _are_filling(states: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Returns True for each slot that is being filled, or whose status is none that there is."""
    return ~np.isin(states & np.uint64(_STATUS), (FREE, VALID))


def _now_us() -> int:
    return time.monotonic_ns() // 1000
