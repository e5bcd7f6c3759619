"""Brings pages of lower tiers back to the device, for sequences that wait for them with slot and pages of their own.

Pages on the disk are read into main memory first, where they stay. A page whose digest is not that with which it left
the device ends the load before it: the sequence computes the tokens from there on. With recurrent state a load ends
with the state after its last page, and is void unless all of its pages and the state are valid.

A load from main memory may go with the pass that computes the tokens behind it, which follows it layer by layer. It
ends with that pass, and is void unless all of its pages are valid: the pass has read them.
"""

from collections import Counter
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec

from mini_infer_engine.core.kv_tiers.copies import Copies
from mini_infer_engine.core.kv_tiers.host_blocks import HostBlocks
from mini_infer_engine.core.kv_tiers.page_record import PageRecord, state_key
from mini_infer_engine.core.kv_tiers.tier import DISK, HOST, Tier
from mini_infer_engine.core.kv_tiers.tier_index import DiskIndex
from mini_infer_engine.core.kv_tiers.tier_memory import (
    DiskMoved,
    LayerwiseLoad,
    Moved,
    PageMove,
    StateMove,
    sealed,
)
from mini_infer_engine.core.page_allocator import PageAllocator
from mini_infer_engine.core.sequence import Sequence
from mini_infer_engine.core.state_checkpoints import StateCheckpoints

_WAIT_S = 1.0
"""Seconds between two looks at copies that a committed pass has followed."""


class TierPage(NamedTuple):
    """A page that a tier has for a waiting sequence."""

    tier: Tier
    record: PageRecord
    location: int = -1
    """The page's location on the disk; -1 in main memory."""

    def source(self, host_page: int) -> str:
        """Returns a description of where the page is, if its page of main memory was this one."""
        return f"page {host_page}" if self.location < 0 else f"location {self.location}"


@dataclass(slots=True, frozen=True)
class TierState:
    """The recurrent state after the last page that a waiting sequence loads."""

    key: bytes
    """The key of the block that it follows."""
    parts: tuple[TierPage, ...]
    """Places of its parts; none if the state is on the device."""


@dataclass(slots=True, frozen=True)
class Loaded:
    """Event: the pages of a sequence have been loaded, or as many of them as were valid."""

    sequence: Sequence
    num_tokens: int
    """Tokens at its beginning that are on the device now, in all KV groups."""
    tokens_by_tier: dict[str, int]
    """The tokens among them that came from each tier."""
    is_first: bool
    """True if this was the sequence's first admission."""
    is_void: bool = False
    """True if the sequence cannot go on from what was loaded, as something that it needs has not come."""
    state_key: bytes | None = None
    """The key of the block that a recurrent state which was to be loaded follows; None if there was to be none."""
    checkpoint: int | None = None
    """The slot of that state, whose user the receiver is from now on; None if there is none or the load is void."""


def count_loaded(loaded: Loaded) -> int:
    """Counts what was loaded among the cached tokens of its sequence, if this was its first admission. Returns the
    number of tokens that were added.
    """
    sequence, by_tier = loaded.sequence, loaded.tokens_by_tier
    before = sequence.cached_tokens
    if not loaded.is_first or before is None:
        return 0
    host, disk = before.host + by_tier.get(HOST, 0), before.disk + by_tier.get(DISK, 0)
    sequence.cached_tokens = msgspec.structs.replace(before, host=host, disk=disk)
    sequence.num_cached = loaded.num_tokens
    return sum(by_tier.values())


@dataclass(slots=True, eq=False)
class _Load:
    sequence: Sequence | None
    """None once it was cancelled."""
    num_before: int
    """Tokens of the sequence that were on the device before."""
    pages: Items[TierPage]
    targets: list[int]
    is_first: bool
    is_prefetch: bool = False
    state: TierState | None = None
    checkpoint: int | None = None
    """The slot for the state, which the load uses."""
    num_whole: int | None = None
    """Tokens at the sequence's beginning that are on the device once all pages of all KV groups are; None if pages
    count from the first one on.
    """
    is_layerwise: bool = False
    """True if it goes with a pass."""
    is_first_group: Items[bool] = ()
    """True for each page of the first KV group, where there are several or windows."""
    host_pages: list[int] = field(default_factory=list)
    """Pages of main memory that have its pages, and then the parts of its state."""
    num_reading: int = 0
    """Pages that are still being read from the disk."""
    read_s: float = 0.0
    """Seconds until the last of the pages that were read had come."""
    num_valid: int = 0
    """Pages at its beginning that can be used, counted on with the parts of the state."""

    @property
    def all_pages(self) -> Items[TierPage]:
        """The pages to be copied, with the parts of the state after them."""
        return self.pages if self.state is None else (*self.pages, *self.state.parts)

    @property
    def keys(self) -> list[bytes]:
        """The keys of what is on its way."""
        keys = [page.record.key for page in self.all_pages]
        return keys if self.state is None else [*keys, state_key(self.state.key)]

    @property
    def needs_all(self) -> bool:
        """True if the sequence can go on from all of it alone."""
        return self.state is not None or self.num_whole is not None or self.is_layerwise

    @property
    def is_complete(self) -> bool:
        """True if what can be used is enough to go on from."""
        return not self.needs_all or self.num_valid == len(self.all_pages)


class Loads:
    """The loads under way, and those that have ended."""

    def __init__(
        self,
        pool: PageAllocator,
        host: HostBlocks,
        disk: DiskIndex,
        host_tier: Tier,
        copies: Copies,
        checkpoints: StateCheckpoints | None = None,
    ) -> None:
        self._checkpoints = checkpoints
        self._pool, self._host, self._disk, self._copies = pool, host, disk, copies
        self._host_tier = host_tier
        self._loads: dict[Sequence, _Load] = {}
        self._under_way: list[_Load] = []
        """All loads whose copies have not ended, cancelled ones too."""
        self._keys: Counter[bytes] = Counter()
        self._ended: list[Loaded] = []
        self._ended_layerwise: dict[Sequence, Loaded] = {}
        """Ended loads that went with a pass which has not ended."""

    @property
    def are_under_way(self) -> bool:
        """True if `take` will return something later."""
        return bool(self._loads or self._ended)

    def is_loading(self, key: bytes) -> bool:
        """True if a page or a state with this key is on its way to the device."""
        return key in self._keys

    @property
    def host_pages(self) -> list[int]:
        """Pages of main memory that loads use; a page that several use is there several times."""
        return [page for load in self._under_way for page in load.host_pages]

    def take(self) -> list[Loaded]:
        """Returns the loads that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    @property
    def checkpoints_in_use(self) -> list[int]:
        """Slots of recurrent state that loads use, those that have ended included."""
        loads, ended = (load.checkpoint for load in self._under_way), (loaded.checkpoint for loaded in self._ended)
        return [slot for slot in (*loads, *ended) if slot is not None]

    def begin(
        self,
        sequence: Sequence,
        pages: Items[TierPage],
        state: TierState | None = None,
        *,
        is_first: bool,
        is_prefetch: bool = False,
        places: Items[tuple[int, int]] = (),
        num_pages: int = 0,
    ) -> None:
        """Loads pages behind the computed tokens of a sequence, which has been given pages for them, and the state
        after them. With `places` they are those of its KV groups, for the first `num_pages` pages of a prefix. What a
        prefetch loads is a hit only once a prompt uses it.
        """
        load = self._new_load(sequence, pages, places, num_pages, is_first=is_first)
        load.is_prefetch, load.state, load.checkpoint = is_prefetch, state, self._take_checkpoint(state)
        self._register(sequence, load)
        if state is not None and load.checkpoint is None:
            self._end(load, 0)
            return
        on_disk = self._acquire_host_pages(load)
        load.num_valid = len(load.host_pages)
        load.num_reading = len(on_disk)
        for place in on_disk:
            location = load.all_pages[place].location
            self._copies.read(location, load.host_pages[place], partial(self._read, load, place))
        if not on_disk:
            self._copy(load)

    def begin_layerwise(
        self,
        sequence: Sequence,
        pages: Items[TierPage],
        *,
        is_first: bool,
        places: Items[tuple[int, int]] = (),
        num_pages: int = 0,
    ) -> LayerwiseLoad | None:
        """Loads pages of main memory behind the computed tokens of a sequence as `begin` does, for the next pass, which
        follows the load. Returns None, and begins nothing, if they are not all there any more.
        """
        found = [page for page in self._host.acquire([page.record.key for page in pages]) if page is not None]
        if len(found) < len(pages):
            self._host.release_all(reversed(found))
            return None
        load = self._new_load(sequence, pages, places, num_pages, is_first=is_first)
        load.is_layerwise, load.host_pages, load.num_valid = True, found, len(found)
        self._register(sequence, load)
        moves = [PageMove(*pair) for pair in zip(found, load.targets, strict=True)]
        return self._copies.load_layerwise(moves, partial(self._copied, load))

    def take_before_pass(self, sequence: Sequence) -> None:
        """Has `take` return a load that has just begun layer by layer: the pass has no row of its sequence."""
        self._loads[sequence].is_layerwise = False

    def end_layerwise(self, sequence: Sequence) -> Loaded:
        """Waits for the end of the load that went with a pass, and returns it: the pass has ended."""
        while sequence not in self._ended_layerwise:
            self._copies.wait(_WAIT_S)
            self._copies.take()
        return self._ended_layerwise.pop(sequence)

    def _new_load(
        self,
        sequence: Sequence,
        pages: Items[TierPage],
        places: Items[tuple[int, int]],
        num_pages: int,
        *,
        is_first: bool,
    ) -> _Load:
        """Returns a load of pages to those of a sequence behind its computed tokens, or at these `places`."""
        first = sequence.num_computed // self._pool.page_size
        load = _Load(sequence, sequence.num_computed, pages, sequence.pages[first : first + len(pages)], is_first)
        if places:
            load.targets = [sequence.page_tables[group][place] for group, place in places]
            load.num_whole = num_pages * self._pool.page_size
            load.is_first_group = [not group for group, _ in places]
        return load

    def _register(self, sequence: Sequence, load: _Load) -> None:
        self._loads[sequence] = load
        self._under_way.append(load)
        self._pool.pin(load.targets)
        self._keys.update(load.keys)

    def _take_checkpoint(self, state: TierState | None) -> int | None:
        """Returns a slot with a user: that of a state which is on the device, or one for a state that is to come. None
        if there is none.
        """
        if state is None or self._checkpoints is None:
            return None
        if state.parts:
            return self._checkpoints.reserve()
        return self._checkpoints.acquire(state.key) if state.key in self._checkpoints else None

    def _acquire_host_pages(self, load: _Load) -> list[int]:
        """Adds a user to the pages in main memory, and allocates those that are read from the disk, as far as any are
        free. Returns the places of the latter. The load has no pages after the first that can be had from nowhere.
        """
        wanted = load.all_pages
        pages = self._host.acquire([page.record.key for page in wanted])
        places = [place for place, page in enumerate(pages) if page is None]
        end = next((place for place in places if wanted[place].location < 0), len(pages))
        places = [place for place in places if place < end]
        targets = self._host.allocate(len(places))
        if len(targets) < len(places):
            end = places[len(targets)]
        for place, target in zip(places, targets, strict=False):
            pages[place] = target
        load.host_pages = [page for page in pages[:end] if page is not None]
        self._host.release_all(page for page in reversed(pages[end:]) if page is not None)
        return places[: len(targets)]

    def cancel(self, sequence: Sequence) -> None:
        """Loads nothing more for a sequence. Its pages stay pinned for as long as they may be written to."""
        for loaded in self._ended:
            if loaded.sequence is sequence:
                self._release(loaded.checkpoint)
        self._ended = [loaded for loaded in self._ended if loaded.sequence is not sequence]
        self._ended_layerwise.pop(sequence, None)
        load = self._loads.pop(sequence, None)
        if load is not None:
            load.sequence = None

    def _release(self, checkpoint: int | None) -> None:
        if checkpoint is not None and self._checkpoints is not None:
            self._checkpoints.release(checkpoint)

    def _read(self, load: _Load, place: int, moved: DiskMoved) -> None:
        page = load.all_pages[place]
        if moved.error:
            page.tier.failed(moved.error)
        if moved.error or moved.is_gone:
            self._disk.forget(page.location)
            load.num_valid = min(load.num_valid, place)
        load.read_s = max(load.read_s, moved.seconds)
        load.num_reading -= 1
        if not load.num_reading:
            self._copy(load)

    def _copy(self, load: _Load) -> None:
        """Copies pages of main memory to the device, unless there are none or nobody waits for them any more."""
        if load.sequence is None or not load.is_complete or not load.host_pages or not load.num_valid:
            self._end(load, 0)
            return
        count, states = min(load.num_valid, len(load.pages)), list[StateMove]()
        if load.state is not None and load.state.parts and load.checkpoint is not None:
            states.append(StateMove(load.checkpoint, tuple(load.host_pages[len(load.pages) :])))
        pairs = zip(load.host_pages, load.targets[:count], strict=False)
        self._copies.load([PageMove(*pair) for pair in pairs], states, partial(self._copied, load))

    def _copied(self, load: _Load, moved: Moved) -> None:
        if moved.error:
            self._host_tier.failed(moved.error)
            self._end(load, 0)
            return
        self._measure(load.all_pages[: load.num_valid], load.read_s, moved.seconds)
        load.num_valid = self._num_as_they_were(load, moved.digests)
        valid = zip(load.all_pages[: load.num_valid], load.host_pages, strict=False)
        if new := [(host_page, page.record) for page, host_page in valid if page.location >= 0]:
            self._host.add_all(new)
        self._end(load, load.num_valid if load.is_complete else 0)

    def _num_as_they_were(self, load: _Load, digests: Items[int]) -> int:
        """Returns the number of pages at the beginning, and of parts of the state after them, whose digests are right.
        What is not as it was is forgotten.
        """
        identity = self._copies.host.identity
        for place, (page, digest) in enumerate(zip(load.pages, digests, strict=False)):
            if sealed(digest, page.record.key, identity) != page.record.digest:
                page.tier.mismatch(page.source(load.host_pages[place]))
                self._forget(page, load.host_pages[place])
                return place
        num_pages = min(len(load.pages), len(digests))
        if load.state is None or not load.state.parts:
            return num_pages
        parts = load.state.parts
        if sealed(digests[-1], parts[0].record.key, identity) == parts[0].record.digest:
            return num_pages + len(parts)
        parts[0].tier.mismatch(f"a recurrent state, {parts[0].source(load.host_pages[num_pages])} and on,")
        for part, host_page in zip(parts, load.host_pages[num_pages:], strict=True):
            self._forget(part, host_page)
        return num_pages

    def _measure(self, pages: Items[TierPage], read_s: float, copy_s: float) -> None:
        """Reports to each tier what its pages took: the read of those on the disk, and their share of the copy."""
        page_bytes, page_size = self._copies.host.page_bytes, self._pool.page_size
        for tier, number in Counter(page.tier for page in pages).items():
            seconds = copy_s * number / len(pages) + (0.0 if tier is self._host_tier else read_s)
            tier.loaded(number * page_size, number * page_bytes, seconds)

    def _forget(self, page: TierPage, host_page: int) -> None:
        """Forgets a page that is not what it was."""
        if page.location >= 0:
            self._disk.forget(page.location)
        elif self._host.record(host_page) is page.record:
            self._host.evict(host_page)

    def _end(self, load: _Load, num_valid: int) -> None:
        """Ends a load of which so many pages can be used, or none if its state cannot be."""
        self._under_way.remove(load)
        for each in load.keys:
            self._keys[each] -= 1
            if not self._keys[each]:
                del self._keys[each]
        self._host.release_all(reversed(load.host_pages))
        self._pool.unpin(load.targets)
        sequence, checkpoint = load.sequence, load.checkpoint
        if sequence is None or num_valid < len(load.all_pages):
            self._release(checkpoint)
            checkpoint = None
        if sequence is None:
            return
        del self._loads[sequence]
        page_size, counts = self._pool.page_size, Counter[str]()
        used = load.pages[:num_valid]
        for place, page in enumerate(used):
            if not load.is_first_group or load.is_first_group[place]:
                counts[page.tier.name] += page_size
                if not load.is_prefetch:
                    page.tier.hit(page_size)
        is_void = load.needs_all and num_valid < len(load.all_pages)
        num_tokens = load.num_before + len(used) * page_size
        if load.num_whole is not None:
            num_tokens = 0 if is_void else load.num_whole
        key = None if load.state is None else load.state.key
        ended = Loaded(sequence, num_tokens, dict(counts), load.is_first, is_void, key, checkpoint)
        if load.is_layerwise:
            self._ended_layerwise[sequence] = ended
        else:
            self._ended.append(ended)
