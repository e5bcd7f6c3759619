"""Puts the tiers below one engine's prefix cache together: main memory, and perhaps a disk below it.

Blocks that the device will evict soon are written behind while they are cached. A waiting sequence whose prefix goes on
in a tier is given pages, and no rows until they have been loaded, if that is faster than computing them.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from math import inf

from mini_infer_contract.blocks import BLOCK_SIZE_TOKENS
from mini_infer_contract.events import BlockStored, KVEvent
from mini_infer_engine.core.hybrid_prefix_cache import HybridPrefixCache
from mini_infer_engine.core.kv_tiers.copies import Copies
from mini_infer_engine.core.kv_tiers.host_blocks import HostBlocks
from mini_infer_engine.core.kv_tiers.load_choice import CopyCost, pages_to_load, pages_to_resume_after
from mini_infer_engine.core.kv_tiers.loads import Loaded, Loads, TierPage, TierState
from mini_infer_engine.core.kv_tiers.page_record import group_key, later_part_keys, state_key
from mini_infer_engine.core.kv_tiers.prefetches import MAX_READ_AHEAD, READ_AHEAD_EVERY_S, READ_AHEAD_S, Prefetches
from mini_infer_engine.core.kv_tiers.returning_sessions import ReturningSessions
from mini_infer_engine.core.kv_tiers.stats import NO_TIER_STATS, KVTierStats
from mini_infer_engine.core.kv_tiers.tier import Tier
from mini_infer_engine.core.kv_tiers.tier_index import DiskIndex, HostIndex
from mini_infer_engine.core.kv_tiers.tier_match import NO_MATCH, TierMatch
from mini_infer_engine.core.kv_tiers.tier_memory import DiskMemory, HostMemory
from mini_infer_engine.core.kv_tiers.write_behind import WriteBehind
from mini_infer_engine.core.prefix_cache import Hit, NoPrefixCache, PrefixCache
from mini_infer_engine.core.sequence import Sequence, State
from mini_infer_engine.core.state_checkpoints import StateCheckpoints

HOST = "host"
DISK = "disk"
MOST_USAGE = 0.5
"""Share of pages in use above which no blocks are loaded for sessions that are only expected: on a full device most of
them would be evicted before they are hit, and push out others in main memory (benchmarks/kv_sessions.py).
"""


class KVTiers:
    """The tiers of one engine."""

    is_present = True

    def __init__(
        self,
        cache: PrefixCache,
        host: HostMemory,
        disk: DiskMemory | None,
        *,
        compute_tokens_per_s: float,
        record_events: bool,
        shared: HostBlocks | None = None,
        checkpoints: StateCheckpoints | None = None,
    ) -> None:
        """Creates empty tiers. `compute_tokens_per_s` is an estimate that holds until `take` has a measured one.

        `shared` has the pages of `host` if other engines use them, too, and what they have stored there. `checkpoints`
        are those of a model with recurrent state.
        """
        page_size = cache.pool.page_size
        self._page_size, self._blocks_per_page = page_size, page_size // BLOCK_SIZE_TOKENS
        self._copies = Copies(host, disk)
        bytes_per_token = host.page_bytes / page_size
        self._host_tier = Tier(HOST, CopyCost(host.latency_s, bytes_per_token / host.bytes_per_s))
        self._disk_tier = Tier(DISK, CopyCost(0.0, 0.0))
        if disk is None:
            self._disk_tier.is_on = False
        else:
            disk_s = bytes_per_token * (1 / disk.bytes_per_s + 1 / host.bytes_per_s)
            self._disk_tier.cost = CopyCost(disk.latency_s, disk_s)
        self._is_shared = shared is not None
        if shared is None:
            shared = HostIndex(host.num_pages, page_size, record_events=record_events)
        self._host: HostBlocks = shared
        self._disk = DiskIndex(record_events=record_events)
        self._checkpoints = checkpoints
        self._loads = Loads(cache.pool, self._host, self._disk, self._host_tier, self._copies, checkpoints)
        tiers = (self._host_tier, self._disk_tier)
        self._write_behind = WriteBehind(cache, self._host, self._disk, tiers, self._copies, checkpoints)
        self._compute_tokens_per_s = compute_tokens_per_s
        self._cache, self._pool = cache, cache.pool
        self._prefetches = Prefetches(cache, self._loads, self._to_prefetch, self._has, checkpoints)
        self._sessions = ReturningSessions()
        self._now_s, self._num_running = 0.0, 0

    # Calls of the scheduler.

    def match(self, sequence: Sequence, hit: Hit) -> TierMatch:
        """Returns the pages with which the prefix of a waiting sequence continues after the whole pages of `hit`.

        The last known token is never among theirs: it must be computed for its logits.
        """
        return self._match(sequence, hit, counts_declined=True)

    def _match(self, sequence: Sequence, hit: Hit, *, counts_declined: bool) -> TierMatch:
        if sequence.group is not None or not sequence.may_hit or not sequence.may_load or not self._host_tier.is_on:
            return NO_MATCH
        if isinstance(self._cache, HybridPrefixCache):
            return self._match_groups(self._cache, sequence, hit, counts_declined=counts_declined)
        on_device = hit.without_tail(self._page_size)
        if self._checkpoints is not None:  # pages of a hit end with a checkpoint; the prefix may have more
            on_device = self._cache.match(sequence).without_tail(self._page_size)
        found = self._continuation(sequence, len(on_device.pages))
        if found is None:
            return TierMatch(is_awaited=True)
        if self._checkpoints is not None:
            return self._match_with_state(sequence, len(hit.pages), on_device, found, counts_declined=counts_declined)
        count = self._num_worth_loading(found)
        if counts_declined:
            self._decline(found[count:])
        return TierMatch(tuple(found[:count]), hit=on_device) if count else NO_MATCH

    def _match_with_state(
        self, sequence: Sequence, num_resumable: int, on_device: Hit, found: Items[TierPage], *, counts_declined: bool
    ) -> TierMatch:
        """Returns the pages and the state that are worth loading, for a model with recurrent state."""
        num_on_device = len(on_device.pages)
        limit = min(num_on_device + len(found), self._most_pages(sequence))
        states: dict[int, TierState] = {}
        for end in range(num_resumable + 1, limit + 1):
            key = self._key(sequence, end)
            if self._loads.is_loading(state_key(key)):
                return TierMatch(is_awaited=True)
            state = self._find_state(key)
            if state is not None:
                states[end] = state
        media = [page.tier.name for page in found]
        parts = {end: [part.tier.name for part in state.parts] for end, state in states.items()}
        end = pages_to_resume_after(
            num_resumable, num_on_device, media, parts, self._page_size, self._costs, self._compute_tokens_per_s
        )
        if counts_declined and states:
            self._decline(found[max(0, end - num_on_device) : max(0, max(states) - num_on_device)])
        if end == num_resumable:
            return NO_MATCH
        hit = Hit(min(end, num_on_device) * self._page_size, on_device.pages[:end], None)
        return TierMatch(tuple(found[: max(0, end - num_on_device)]), hit=hit, state=states[end])

    def _match_groups(
        self, cache: HybridPrefixCache, sequence: Sequence, hit: Hit, *, counts_declined: bool
    ) -> TierMatch:
        """Returns the pages of all KV groups that make the longest prefix, if they are worth loading: of groups with a
        window the last ones alone.
        """
        num_resumable, end = hit.num_tokens // self._page_size, self._most_pages(sequence)
        while True:
            end = cache.longest_with_tiers(sequence, end, lambda group, key: self._has(group_key(key, group)))
            if end <= num_resumable:
                return NO_MATCH
            on_device, places = cache.hit_before_load(sequence, end)
            keys = [group_key(self._key(sequence, place + 1), group) for group, place in places]
            found = self._find_first(keys)
            if len(found) == len(keys):
                break
            end = places[len(found)][1]
        if any(map(self._loads.is_loading, keys)):
            return TierMatch(is_awaited=True)
        media = {end: [page.tier.name for page in found]}
        arguments = (num_resumable, end, (), media, self._page_size, self._costs, self._compute_tokens_per_s)
        if pages_to_resume_after(*arguments) == num_resumable:
            if counts_declined:
                self._decline([page for page, (group, _) in zip(found, places, strict=True) if not group])
            return NO_MATCH
        return TierMatch(tuple(found), hit=on_device, places=tuple(places), num_pages=end)

    def _find_state(self, key: bytes) -> TierState | None:
        """Returns where the state after the block of this key is; None if not all of it is anywhere."""
        assert self._checkpoints is not None
        if key in self._checkpoints:
            return TierState(key, ())
        if not self._checkpoints.num_free:
            return None
        for first in (self._find_on_host(state_key(key)), self._find_on_disk(state_key(key))):
            if first is not None:
                keys = later_part_keys(key, first.record.digest, self._copies.host.pages_per_state)
                parts = [first, *(part for part in map(self._find, keys) if part is not None)]
                if len(parts) == 1 + len(keys):
                    return TierState(key, tuple(parts))
        return None

    def _most_pages(self, sequence: Sequence) -> int:
        """Returns the most pages of a sequence that may be cached."""
        return (len(sequence.token_ids) - 1) // self._page_size

    def _key(self, sequence: Sequence, num_pages: int) -> bytes:
        return sequence.key(num_pages * self._blocks_per_page - 1)

    def _continuation(self, sequence: Sequence, num_on_device: int) -> list[TierPage] | None:
        """Returns the pages of lower tiers that continue a prefix; None if the first of them is being loaded."""
        ends = range(num_on_device + 1, self._most_pages(sequence) + 1)
        if ends and self._loads.is_loading(self._key(sequence, ends[0])):
            return None
        return self._find_first(self._key(sequence, end) for end in ends)

    @property
    def _costs(self) -> dict[str, CopyCost]:
        return {tier.name: tier.cost for tier in (self._host_tier, self._disk_tier)}

    def _num_worth_loading(self, found: Items[TierPage]) -> int:
        media = [page.tier.name for page in found]
        return pages_to_load(media, self._page_size, self._costs, self._compute_tokens_per_s)

    def _decline(self, pages: Items[TierPage]) -> None:
        for page in pages:
            page.tier.declined(self._page_size)

    def _has(self, key: bytes) -> bool:
        return key in self._host or key in self._disk

    def _to_prefetch(self, sequence: Sequence) -> TierMatch:
        return self._match(sequence, self._resumable(sequence), counts_declined=False)

    def _resumable(self, sequence: Sequence) -> Hit:
        """Returns the whole pages from which a sequence could go on without any load."""
        hit = self._cache.match(sequence).without_tail(self._page_size)
        if self._checkpoints is None:
            return hit
        ends = range(len(hit.pages), 0, -1)
        count = next((end for end in ends if self._key(sequence, end) in self._checkpoints), 0)
        return Hit(count * self._page_size, hit.pages[:count], None)

    def _find(self, key: bytes) -> TierPage | None:
        return self._find_on_host(key) or self._find_on_disk(key)

    def _find_first(self, keys: Iterable[bytes]) -> list[TierPage]:
        """Returns the pages with these keys up to the first that no lower tier has."""
        found: list[TierPage] = []
        for key in keys:
            page = self._find(key)
            if page is None:
                break
            found.append(page)
        return found

    def _find_on_host(self, key: bytes) -> TierPage | None:
        page = self._host.page(key)
        record = None if page is None else self._host.record(page)
        return None if record is None else TierPage(self._host_tier, record)

    def _find_on_disk(self, key: bytes) -> TierPage | None:
        page = self._disk.page(key) if self._disk_tier.is_on else None
        return None if page is None else TierPage(self._disk_tier, page.record, page.location)

    def load(self, sequence: Sequence, match: TierMatch, *, is_first: bool) -> None:
        """Loads the pages of a match behind the computed tokens of a sequence, which has pages for them."""
        self._loads.begin(
            sequence, match.pages, match.state, is_first=is_first, places=match.places, num_pages=match.num_pages
        )

    def cancel(self, sequence: Sequence) -> None:
        """Loads nothing more for a sequence. Its pages stay pinned for as long as they may be written to."""
        self._loads.cancel(sequence)

    def read_ahead(self, waiting: Items[Sequence], num_running: int) -> None:
        """Begins to load blocks of the first waiting sequences, which this plan could not admit. A page for each
        running sequence stays free.
        """
        self._num_running, now_s = num_running, self._now_s
        for sequence in waiting[:MAX_READ_AHEAD]:
            may_load = sequence.state is State.WAITING and sequence.kv_source is None and sequence.may_load
            if may_load and now_s >= sequence.next_read_ahead_s:
                sequence.next_read_ahead_s = now_s + READ_AHEAD_EVERY_S
                self._prefetches.begin(sequence, now_s + READ_AHEAD_S, num_headroom_pages=num_running)

    def ended(self, sequence: Sequence) -> None:
        """Remembers the session of a sequence that ends, if it has a lease: its blocks can be prefetched."""
        self._sessions.ended(sequence, self._now_s)

    # Calls of the engine for single requests.

    def used(self, sequence: Sequence) -> dict[str, int]:
        """Counts the prefetched blocks that a newly admitted sequence has hit. Returns their tokens by tier."""
        return self._prefetches.used(sequence, sequence.num_cached or 0)

    def prefetch(self, request_ids: Items[str], ttl_s: float) -> None:
        """Begins to load the blocks of sessions, named by their last requests' ids as clients have them, that return
        within `ttl_s` seconds. Unknown ids are ignored.
        """
        for name in request_ids:
            if (sequence := self._sessions.named(name)) is not None:
                self._begin(sequence, self._now_s + ttl_s)

    def bring(self, sequence: Sequence, keep_s: float) -> bool:
        """Begins to load the blocks of a prompt that another engine asks for, which are kept for so many seconds.
        Returns False if there is nothing to load, or no room.
        """
        return self._begin(sequence, self._now_s + keep_s) or self.is_bringing(sequence)

    def is_bringing(self, sequence: Sequence) -> bool:
        """Returns True while the blocks with which a prompt's prefix continues are on their way to the device."""
        num_pages = len(self._resumable(sequence).pages)
        ends = range(num_pages + 1, len(sequence.token_ids) // self._page_size + 1)
        if self._checkpoints is None:
            return any(self._loads.is_loading(self._key(sequence, end)) for end in ends[:1])
        return self.are_loading and any(self._loads.is_loading(state_key(self._key(sequence, end))) for end in ends)

    def used_by_peer(self, sequence: Sequence) -> None:
        """Counts the prefetched blocks of a prompt as used: they go to another engine."""
        self._prefetches.used(sequence, self._cache.match(sequence).num_tokens)

    def forget_session(self, sequence: Sequence) -> None:
        """Forgets the session that a sequence continues: it does not return."""
        self._sessions.forget(sequence)

    def _begin(self, sequence: Sequence, until_s: float) -> bool:
        return self._prefetches.begin(sequence, until_s, num_headroom_pages=self._num_running)

    # Calls of the engine, once a step.

    def take(self, compute_tokens_per_s: float, now_s: float) -> list[Loaded]:
        """Takes in the copies that have ended, and returns the sequences whose pages have been loaded. A rate of 0 is
        none that was measured. Prefetches begin and end by `now_s`.
        """
        self._now_s = now_s
        self._pool.advance(now_s)
        self._compute_tokens_per_s = compute_tokens_per_s or self._compute_tokens_per_s
        self._copies.take()
        self._host.sync()
        if (disk := self._copies.disk) is not None:
            for page in disk.take_recovered():
                self._disk.add(page)
            for location in disk.take_dropped():
                self._disk.forget(location)
        if not self._host_tier.is_on and len(self._host):
            self._host.detach()
        if not self._disk_tier.is_on and len(self._disk):
            self._disk.clear()
        self._prefetches.advance(now_s)
        loaded = [one for one in self._loads.take() if not self._prefetches.loaded(one)]
        while (due := self._sessions.due(now_s)) is not None:
            if self._pool.usage <= MOST_USAGE:
                self._begin(*due)
        return loaded

    @property
    def next_due_s(self) -> float:
        """The time at which `take` has something to do though no copy has ended; infinite if there is none."""
        return min(self._sessions.next_due_s, self._prefetches.next_end_s)

    def write_behind(self, *, is_idle: bool = False) -> bool:
        """Requests the next copies to lower tiers, more of them if the engine `is_idle`. Returns False if there are
        none.
        """
        return self._write_behind.run(is_idle=is_idle)

    def wait(self, timeout_s: float) -> None:
        """Waits until a copy has ended, at most so long. Returns at once if none is under way."""
        self._copies.wait(timeout_s)

    @property
    def are_copying(self) -> bool:
        """True if copies are under way, whose pages cannot be used for anything else."""
        return self._copies.are_under_way

    @property
    def are_loading(self) -> bool:
        """True if `take` will return a sequence."""
        return self._loads.are_under_way

    def distrust_device(self) -> None:
        """Forgets pages that are on their way from the device, and prefetches: a pass has failed."""
        self._write_behind.forget()
        self._prefetches.clear()

    def clear(self) -> None:
        """Forgets all pages of all tiers, and all prefetches."""
        self._write_behind.forget()
        self._prefetches.clear()
        self._sessions.clear()
        self._host.clear()
        self._disk.clear()
        if self._copies.disk is not None:
            self._copies.disk.clear()

    # Reports.

    def take_events(self) -> list[KVEvent]:
        """Returns the changes of all tiers since the last call."""
        return self._host.events.take() + self._disk.events.take()

    def snapshot(self) -> list[BlockStored]:
        """Returns all blocks of each tier."""
        return self._host.events.snapshot(self._host.records) + self._disk.events.snapshot(self._disk.records)

    @property
    def tokens_per_s(self) -> tuple[float, float]:
        """The measured rates of loads from main memory and from the disk; 0 if none was measured."""
        return self._host_tier.cost.tokens_per_s, self._disk_tier.cost.tokens_per_s

    @property
    def stats(self) -> KVTierStats:
        """The counters and gauges of all tiers."""
        host, disk, page_bytes = self._copies.host, self._copies.disk, self._copies.host.page_bytes
        num_pages = len(self._host)
        num_block_pages = self._host.events.num_pages
        tiers = {
            HOST: self._host_tier.stats(
                capacity_bytes=host.num_pages * page_bytes,
                used_bytes=num_pages * page_bytes,
                blocks=num_block_pages * self._blocks_per_page,
                is_shared=self._is_shared,
            )
        }
        if disk is not None:
            tiers[DISK] = self._disk_tier.stats(
                capacity_bytes=disk.capacity_bytes,
                used_bytes=disk.used_bytes,
                blocks=self._disk.events.num_pages * self._blocks_per_page,
            )
        return KVTierStats(tiers)


class NoTiers:
    """Stands in for `KVTiers` where the prefix cache has no tiers: nothing is found, copied or reported."""

    is_present = False
    are_copying = False
    are_loading = False
    tokens_per_s = (0.0, 0.0)
    next_due_s = inf
    stats = NO_TIER_STATS

    def match(self, sequence: Sequence, hit: Hit) -> TierMatch:
        """Returns no pages."""
        del sequence, hit
        return NO_MATCH

    def load(self, sequence: Sequence, match: TierMatch, *, is_first: bool) -> None:
        """Is never called: nothing matches."""
        raise AssertionError("there is no tier to load from")

    def cancel(self, sequence: Sequence) -> None:
        """Does nothing: nothing is loaded."""

    def read_ahead(self, waiting: Items[Sequence], num_running: int) -> None:
        """Does nothing: there is nothing to load."""

    def ended(self, sequence: Sequence) -> None:
        """Does nothing: nothing could be prefetched."""

    def prefetch(self, request_ids: Items[str], ttl_s: float) -> None:
        """Does nothing: there is nothing to load."""

    def bring(self, sequence: Sequence, keep_s: float) -> bool:
        """Returns False: there is nothing to load."""
        del sequence, keep_s
        return False

    def is_bringing(self, sequence: Sequence) -> bool:
        """Returns False: nothing is loaded."""
        del sequence
        return False

    def used_by_peer(self, sequence: Sequence) -> None:
        """Does nothing: nothing was loaded."""

    def forget_session(self, sequence: Sequence) -> None:
        """Does nothing: no session is remembered."""

    def used(self, sequence: Sequence) -> dict[str, int]:
        """Returns no tokens."""
        del sequence
        return {}

    def take(self, compute_tokens_per_s: float, now_s: float) -> Iterable[Loaded]:
        """Returns no sequences."""
        del compute_tokens_per_s, now_s
        return ()

    def write_behind(self, *, is_idle: bool = False) -> bool:
        """Returns False: there is nothing to copy."""
        del is_idle
        return False

    def wait(self, timeout_s: float) -> None:
        """Returns at once."""

    def distrust_device(self) -> None:
        """Does nothing: nothing is on its way."""

    def clear(self) -> None:
        """Forgets nothing, for nothing is known."""

    def take_events(self) -> list[KVEvent]:
        """Returns no events."""
        return []

    def snapshot(self) -> list[BlockStored]:
        """Returns no blocks."""
        return []


NO_TIERS = NoTiers()


def make_kv_tiers(
    cache: PrefixCache | NoPrefixCache,
    host: HostMemory | None,
    disk: DiskMemory | None,
    *,
    compute_s_per_token: float,
    record_events: bool,
    shared: HostBlocks | None = None,
    checkpoints: StateCheckpoints | None = None,
) -> KVTiers | NoTiers:
    """Returns the tiers of an engine, or `NO_TIERS` if it has no memory for them or caches no prefixes. `checkpoints`
    are those of a model with recurrent state.
    """
    if host is None or not isinstance(cache, PrefixCache):
        return NO_TIERS
    rate = 1 / compute_s_per_token if compute_s_per_token else 1.0
    return KVTiers(
        cache,
        host,
        disk,
        compute_tokens_per_s=rate,
        record_events=record_events,
        shared=shared,
        checkpoints=checkpoints,
    )
