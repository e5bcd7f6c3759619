"""Puts the tiers below one engine's prefix cache together: main memory, and perhaps a disk below it.

Blocks that the device will evict soon are written behind while they are cached. A waiting sequence whose prefix goes on
in a tier is given pages, and no rows until they have been loaded, if that is faster than computing them. Where the
runner can, a load from main memory goes with the pass of the tokens behind it.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from math import inf

from mini_infer_contract.blocks import BLOCK_SIZE_TOKENS
from mini_infer_contract.events import BlockStored, KVEvent
from mini_infer_engine.core.kv_tiers.copies import Copies
from mini_infer_engine.core.kv_tiers.host_blocks import HostBlocks
from mini_infer_engine.core.kv_tiers.load_choice import CopyCost, FirstPass, loads_with_pass
from mini_infer_engine.core.kv_tiers.loads import Loaded, Loads
from mini_infer_engine.core.kv_tiers.page_record import state_key
from mini_infer_engine.core.kv_tiers.prefetches import MAX_READ_AHEAD, READ_AHEAD_EVERY_S, READ_AHEAD_S, Prefetches
from mini_infer_engine.core.kv_tiers.returning_sessions import ReturningSessions
from mini_infer_engine.core.kv_tiers.stats import NO_TIER_STATS, KVTierStats
from mini_infer_engine.core.kv_tiers.tier import DISK, HOST, Tier
from mini_infer_engine.core.kv_tiers.tier_index import DiskIndex, HostIndex
from mini_infer_engine.core.kv_tiers.tier_match import NO_MATCH, TierMatch
from mini_infer_engine.core.kv_tiers.tier_memory import DiskMemory, HostMemory, LayerwiseLoad
from mini_infer_engine.core.kv_tiers.tier_search import TierSearch
from mini_infer_engine.core.kv_tiers.write_behind import WriteBehind
from mini_infer_engine.core.prefix_cache import Hit, NoPrefixCache, PrefixCache
from mini_infer_engine.core.sequence import Sequence, State
from mini_infer_engine.core.state_checkpoints import StateCheckpoints

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
            if disk.fault:
                self._disk_tier.failed(disk.fault)
        self._is_shared = shared is not None
        if shared is None:
            shared = HostIndex(host.num_pages, page_size, record_events=record_events)
        self._host: HostBlocks = shared
        self._disk = DiskIndex(record_events=record_events)
        self._checkpoints = checkpoints
        self._loads = Loads(cache.pool, self._host, self._disk, self._host_tier, self._copies, checkpoints)
        tiers = (self._host_tier, self._disk_tier)
        self._write_behind = WriteBehind(cache, self._host, self._disk, tiers, self._copies, checkpoints)
        self._search = TierSearch(
            cache,
            self._host,
            self._disk,
            tiers,
            self._loads,
            checkpoints,
            pages_per_state=host.pages_per_state,
            compute_tokens_per_s=compute_tokens_per_s,
        )
        self._cache, self._pool = cache, cache.pool
        self._prefetches = Prefetches(cache, self._loads, self._search, checkpoints)
        self._sessions = ReturningSessions()
        self._now_s, self._num_running = 0.0, 0

    # Calls of the scheduler.

    def match(self, sequence: Sequence, hit: Hit) -> TierMatch:
        """Returns the pages with which the prefix of a waiting sequence continues after the whole pages of `hit`."""
        return self._search.match(sequence, hit)

    def load(self, sequence: Sequence, match: TierMatch, *, is_first: bool) -> None:
        """Loads the pages of a match behind the computed tokens of a sequence, which has pages for them."""
        self._loads.begin(
            sequence, match.pages, match.state, is_first=is_first, places=match.places, num_pages=match.num_pages
        )

    def load_layerwise(
        self, sequence: Sequence, match: TierMatch, first_pass: FirstPass, *, is_first: bool
    ) -> LayerwiseLoad | None:
        """Loads the pages of a match while the pass computes the tokens behind them. Returns None, and begins nothing,
        if they are to be loaded before it: what comes is proved only when the pass is committed.
        """
        layerwise = self._copies.host.layerwise
        load_s = self._host_tier.cost.seconds(len(match.pages) * self._page_size)
        in_memory = all(page.tier is self._host_tier for page in match.pages)
        if layerwise is None or match.state is not None or not in_memory or not sequence.may_be_proved_late:
            return None
        if not loads_with_pass(load_s, layerwise.least_load_s, first_pass, self._search.compute_tokens_per_s):
            return None
        return self._loads.begin_layerwise(
            sequence, match.pages, is_first=is_first, places=match.places, num_pages=match.num_pages
        )

    def take_before_pass(self, sequence: Sequence) -> None:
        """Has a load that `load_layerwise` has just begun precede the pass, which has no row of its sequence."""
        self._loads.take_before_pass(sequence)

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
        search, num_pages = self._search, len(self._search.resumable(sequence).pages)
        ends = range(num_pages + 1, len(sequence.token_ids) // self._page_size + 1)
        if self._checkpoints is None:
            return any(self._loads.is_loading(search.key(sequence, end)) for end in ends[:1])
        return self.are_loading and any(self._loads.is_loading(state_key(search.key(sequence, end))) for end in ends)

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
        self._search.compute_tokens_per_s = compute_tokens_per_s or self._search.compute_tokens_per_s
        self._copies.take()
        self._host.sync()
        if (disk := self._copies.disk) is not None:
            for page in disk.take_recovered():
                self._disk.add(page)
            for location in disk.take_dropped():
                self._disk.forget(location)
        if not self._host_tier.is_on and len(self._host):
            self._host.detach()
        if not self._disk_tier.is_on and disk is not None and (len(self._disk) or disk.used_bytes):
            self._disk.clear()
            disk.clear()  # a full disk gets its room back
        self._prefetches.advance(now_s)
        loaded = [one for one in self._loads.take() if not self._prefetches.loaded(one)]
        while (due := self._sessions.due(now_s)) is not None:
            if self._pool.usage <= MOST_USAGE:
                self._begin(*due)
        return loaded

    def end_layerwise(self, sequence: Sequence) -> Loaded:
        """Returns what has been loaded for a sequence while the committed pass computed."""
        return self._loads.end_layerwise(sequence)

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

    def load_layerwise(
        self, sequence: Sequence, match: TierMatch, first_pass: FirstPass, *, is_first: bool
    ) -> LayerwiseLoad | None:
        """Is never called: nothing matches."""
        raise AssertionError("there is no tier to load from")

    def take_before_pass(self, sequence: Sequence) -> None:
        """Is never called: nothing is loaded."""

    def end_layerwise(self, sequence: Sequence) -> Loaded:
        """Is never called: nothing is loaded."""
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
