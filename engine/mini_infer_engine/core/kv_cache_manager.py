"""Manages the pages of sequences: allocates, shares, copies, swaps and frees them, and finds cached prefixes.

It is the only user of the page allocator and the prefix cache. It takes sequences one at a time and knows nothing of
queues, slots, token budgets or whose turn it is: the scheduler decides, and calls it.
"""

from array import array
from collections import Counter
from collections.abc import Sequence as Items

from mini_infer_contract.blocks import BLOCK_SIZE_TOKENS
from mini_infer_contract.events import BlockStored, KVEvent
from mini_infer_engine.core.batch import NO_SWAP, PageCopy, PageSwap, SwapSpace
from mini_infer_engine.core.block_store import BlockStore
from mini_infer_engine.core.kv_eviction import NEVER, next_compaction
from mini_infer_engine.core.kv_tiers.load_choice import CopyCost
from mini_infer_engine.core.kv_tiers.stats import TierStats
from mini_infer_engine.core.kv_tiers.tier import Tier
from mini_infer_engine.core.page_allocator import PageAllocator
from mini_infer_engine.core.prefix_cache import MISS, Hit, NoPrefixCache, PrefixCache
from mini_infer_engine.core.sequence import Sequence, State
from mini_infer_engine.core.state_checkpoints import StateCheckpoints
from mini_infer_engine.core.step import Step

SWAP = "swap"
"""Name of main memory for preempted sequences, for logs and metrics."""


class KVCacheManager:
    """The page pool of one engine, its prefix cache, and the main memory for pages of preempted sequences."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        enable_caching: bool = True,
        record_events: bool = True,
        swap_space: SwapSpace = NO_SWAP,
    ) -> None:
        """Creates a pool of free pages. Pass `record_events=False` if you never call `take_events`."""
        self.cache: PrefixCache | NoPrefixCache
        if enable_caching:
            self.cache = PrefixCache(num_pages, page_size, record_events=record_events)
            self.pool = self.cache.pool
        else:
            self.cache = NoPrefixCache()
            self.pool = PageAllocator(num_pages, page_size)
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_swaps = 0
        """Preemptions whose pages went to main memory."""
        self._swap_space = swap_space
        self.host_pages: BlockStore = PageAllocator(swap_space.num_pages, page_size)
        self.swap_tier = Tier(SWAP, CopyCost(0.0, 0.0))
        """Main memory for preempted sequences, as far as it can be relied on."""
        self._unproved: Counter[Sequence] = Counter()
        """Launched passes of each sequence before which something came back that is not proved yet."""
        self._distrusted: set[Sequence] = set()
        """Sequences whose pages are to be forgotten when they leave."""
        self._swapping: list[Sequence] = []
        self._swap_out: list[PageSwap] = []
        """Pages of `_swapping` that the next launched pass copies out before anything may write to them."""

    @property
    def is_caching(self) -> bool:
        """True if blocks can be hit by later sequences."""
        return self.cache.is_present

    @property
    def num_free_pages(self) -> int:
        """Pages that can be allocated, those with cached blocks included."""
        return self.pool.num_free

    @property
    def usage(self) -> float:
        """Share of the pages in use, 0 to 1."""
        return self.pool.usage

    def pages_for(self, num_tokens: int) -> int:
        """Returns the number of pages for this many tokens."""
        return self.pool.pages_for(num_tokens)

    def check_fits(self, max_model_len: int) -> None:
        """Raises PoolTooSmallError unless one sequence of the model's length fits: then none can be stuck forever."""
        self.pool.check_fits(max_model_len)

    def check_beams_fit(self, width: int, num_shared: int, num_tokens: int) -> None:
        """Raises ValueError if so many sequences, which share their first tokens, have more pages than the pool."""
        num_pages = num_shared // self.page_size
        num_pages += width * (self.pool.pages_for(num_tokens) - num_pages)
        if num_pages > self.num_pages:
            raise ValueError(
                f"max_tokens allows {width} beams of {num_tokens} tokens, prompt included, which take {num_pages} "
                f"pages of the KV cache, and it has {self.num_pages}: ask for fewer tokens, or a smaller n"
            )

    # Cached blocks.

    def get_computed_blocks(self, sequence: Sequence) -> Hit:
        """Returns the longest cached prefix of a waiting sequence, and acquires nothing. A swapped one has its own."""
        return self.cache.match(sequence) if self._may_hit(sequence) and sequence.state is not State.SWAPPED else MISS

    def num_expected_cached(self, sequence: Sequence) -> int:
        """Returns the known tokens that a waiting sequence should find in the cache. It is looked up once, and only on
        demand.
        """
        if sequence.num_expected_cached is None:
            num_blocks = self.cache.match_length(sequence) if self._may_hit(sequence) else 0
            sequence.num_expected_cached = num_blocks * BLOCK_SIZE_TOKENS
        return sequence.num_expected_cached

    def _may_hit(self, sequence: Sequence) -> bool:
        """True if a waiting sequence may take a cached prefix."""
        return sequence.may_hit

    def cache_blocks(self, sequence: Sequence) -> None:
        """Publishes the blocks of known tokens that launched passes compute: they can be hit from now on."""
        if sequence not in self._unproved:
            self.cache.publish(sequence)

    def longest_cached(self, token_ids: Items[int], root: bytes) -> tuple[list[int], int]:
        """Returns the pages of the longest cached prefix of any tokens, and its number of tokens. Acquires nothing."""
        return self.cache.longest(token_ids, root)

    def reset_prefix_cache(self) -> None:
        """Forgets all cached blocks. Nothing may be running, as it would use them."""
        self.cache.clear()

    def take_events(self) -> list[KVEvent]:
        """Returns the changes of the prefix cache since the last call, in order."""
        return self.cache.take_events()

    def snapshot(self) -> list[BlockStored]:
        """Returns all blocks that are cached now, parents before children."""
        return self.cache.snapshot()

    # Pages of one sequence.

    def allocate_slots(self, step: Step, sequence: Sequence, hit: Hit, *, num_headroom_tokens: int) -> bool:
        """Allocates pages for all known tokens of a waiting sequence and the next one, `hit` included, and notes in
        `step` what is copied into them.

        Returns False, and allocates nothing, if fewer pages than those of `num_headroom_tokens` would be left.
        """
        pool = self.pool
        if sequence.state is not State.SWAPPED:
            sequence.num_evicted = 0
        num_new = pool.pages_for(len(sequence.token_ids) - sequence.num_evicted + 1) - len(hit.pages)
        num_needed = num_new + pool.num_unused(hit.pages) + pool.pages_for(num_headroom_tokens)
        if hit.tail_page is not None and num_needed + (not pool.references[hit.tail_page]) > pool.num_free:
            hit = hit.without_tail(pool.page_size)  # its source, pinned, could be the page that is missing
        if num_needed > pool.num_free:
            return False
        pool.acquire_all(hit.pages)
        if hit.tail_page is not None:
            pool.acquire(hit.tail_page)
            step.pinned_pages.append(hit.tail_page)
        sequence.pages = hit.pages + [pool.allocate() for _ in range(num_new)]
        if hit.tail_page is not None:
            target = sequence.pages[len(hit.pages)]
            step.batch.transfers.copies.append(PageCopy(hit.tail_page, target, hit.num_tokens % pool.page_size))
        if sequence.state is State.SWAPPED:
            self._swap_in(step, sequence)
        else:
            sequence.num_computed = hit.num_tokens
        sequence.num_published = len(hit.pages) * pool.page_size // BLOCK_SIZE_TOKENS
        self._expect_compaction(sequence)
        if sequence.num_cached is None:
            sequence.num_cached = hit.num_tokens
        return True

    def allocate_to_load(self, sequence: Sequence, num_pages: int) -> None:
        """Allocates the first `num_pages` pages of a sequence that loads them, where `allocate_slots` has not."""

    def allocate_chunk(self, sequence: Sequence, end: int) -> bool:
        """Allocates pages for the tokens of the next chunk, up to `end`, where `allocate_slots` has not. Returns False
        if too few are free.
        """
        missing = self.pool.pages_for(end - sequence.num_evicted) - len(sequence.pages)
        if missing > self.pool.num_free:
            return False
        sequence.pages += [self.pool.allocate() for _ in range(missing)]
        return True

    def append_page(self, sequence: Sequence) -> bool:
        """Allocates one more page for a running sequence. Returns False if none is free."""
        if not self.pool.num_free:
            return False
        sequence.pages.append(self.pool.allocate())
        return True

    def allocate_lookahead(self, sequences: Items[Sequence], ends: Items[int]) -> bool:
        """Allocates pages up to the token count of each sequence in `ends`, for draft tokens. Returns False, and
        allocates nothing, if too few are free.
        """
        pool = self.pool
        missing = [max(0, pool.pages_for(end) - len(one.pages)) for one, end in zip(sequences, ends, strict=True)]
        if sum(missing) > pool.num_free:
            return False
        for sequence, count in zip(sequences, missing, strict=True):
            sequence.pages += [pool.allocate() for _ in range(count)]
        return True

    def lease(self, sequence: Sequence) -> None:
        """Has the pages of a sequence that ends evicted late or first, as its request says."""
        request, null_page = sequence.request, self.num_pages
        pages = [page for table in sequence.page_tables for page in reversed(table) if page != null_page]
        self.pool.lease(pages, request.lease_s, is_pinned=request.pins)

    def hint(self, sequence: Sequence) -> None:
        """Gives the cached pages with which a sequence begins, which does not run, the lease that its request says."""
        hit, request = self.get_computed_blocks(sequence), sequence.request
        for group in (hit, *hit.others):
            pages = [page for page in group.pages if page != self.num_pages]
            if group.tail_page is not None:
                pages.append(group.tail_page)
            if request.lease_s < 0:
                self.pool.give_up(pages)
            elif pages:
                self.pool.lease(pages[::-1], request.lease_s, is_pinned=request.pins)

    def free(self, sequence: Sequence) -> None:
        """Frees the pages of a sequence of which no launched pass has a row."""
        self.pool.release_all(reversed(sequence.pages))  # the end of a prefix is the first to be evicted
        self.pool.release_all(reversed(sequence.target_pages))
        sequence.pages, sequence.target_pages = [], []
        sequence.num_published = 0
        self._distrusted.discard(sequence)
        sequence.num_drafted = 0
        sequence.forked_pages = []

    def release_sources(self, step: Step) -> None:
        """Releases the sources of a finished pass's copies.

        Call it before any of its sequences is freed: the pages before a source, which those use, are to be evicted
        after it.
        """
        self.pool.release_all(step.pinned_pages)
        self.pool.num_copied_out -= len(step.swapped)
        for sequence in dict.fromkeys([*step.resumed, *step.loading_layerwise]):
            self._unproved[sequence] -= 1
        if step.resumed or step.loading_layerwise:
            self._unproved = +self._unproved

    # Sequences that lose tokens of their cache.

    def begin_compaction(self, sequence: Sequence) -> bool:
        """Allocates pages for the tokens that a sequence keeps by its policy. Returns False if too few are free.

        They are free ones, so that its own may serve other prompts. Where too few are free, the last of its own that
        nothing else uses are forgotten by the prefix cache and written to; from then on it publishes no more blocks.
        """
        assert sequence.kv_policy is not None
        pool, missing = self.pool, self.pool.pages_for(sequence.kv_policy.budget)
        targets = [pool.allocate() for _ in range(min(missing, pool.num_free))]
        own = [page for page in reversed(sequence.pages) if pool.references[page] == 1][: missing - len(targets)]
        if len(targets) + len(own) < missing:
            pool.release_all(reversed(targets))
            return False
        if own:
            self.cache.forget(own)
            sequence.next_block_end = NEVER
        pool.acquire_all(own)
        sequence.target_pages = targets + own
        return True

    def end_compaction(self, step: Step, sequence: Sequence) -> None:
        """Gives a sequence whose pass has been launched the pages of the tokens that it keeps. Its other pages are
        released with the pass, which reads them.
        """
        assert sequence.kv_policy is not None
        step.pinned_pages += reversed(sequence.pages)
        sequence.pages, sequence.target_pages = sequence.target_pages, []
        sequence.num_evicted = sequence.num_computed - sequence.kv_policy.budget
        self._expect_compaction(sequence)

    @staticmethod
    def _expect_compaction(sequence: Sequence) -> None:
        """Sets the place of a sequence's next compaction. What follows evicted tokens is no prefix of a prompt."""
        num_prompt, num_computed, num_evicted = sequence.num_prompt, sequence.num_computed, sequence.num_evicted
        sequence.next_compaction = next_compaction(sequence.kv_policy, num_prompt, num_computed, num_evicted)
        if sequence.next_compaction > sequence.last_position:  # nothing would read what is kept
            sequence.next_compaction = NEVER
        if sequence.num_evicted:
            sequence.next_block_end = NEVER

    # Pages that members of a group share.

    def fork(self, fork: Sequence, source: Sequence, token_ids: "array[int]", num_shared: int) -> None:
        """Gives `fork` the first `num_shared` tokens of `source`, which share its full pages, and then `token_ids`.

        The page after them is copied before the next chunk. Only its group can hit what follows, so the blocks of
        `fork` are not published.
        """
        num_pages = num_shared // self.page_size
        fork.pages = source.pages[:num_pages]
        self.pool.acquire_all(fork.pages)
        fork.forked_pages = [source.pages[num_pages]] if num_shared % self.page_size else []
        self._begin_fork(fork, source, token_ids, num_shared)

    @staticmethod
    def _begin_fork(fork: Sequence, source: Sequence, token_ids: "array[int]", num_shared: int) -> None:
        """Sets the state of a fork that has its pages."""
        fork.token_ids = token_ids
        fork.num_computed = num_shared
        fork.keys = source.keys[: num_shared // BLOCK_SIZE_TOKENS]
        fork.next_block_end = NEVER
        fork.only_known_tokens()

    def move(self, member: Sequence, source: Sequence, token_ids: "array[int]", num_shared: int) -> None:
        """Replaces the pages of `member` by those of a fork of `source`. It keeps the page that only it uses as target
        of the copy, so that most moves leave its page table as a runner's device has it.
        """
        pages = member.pages
        self.fork(member, source, token_ids, num_shared)
        place = len(member.pages)
        if member.forked_pages and place < len(pages) and self._may_write(pages[place]):
            member.pages.append(pages.pop(place))
        self.pool.release_all(reversed(pages))

    def copy_forked_page(self, step: Step, sequence: Sequence) -> None:
        """Has the page that a fork shares in part, in each KV group, copied to its own before the pass."""
        if not sequence.forked_pages:
            return
        self.pool.acquire_all(sequence.forked_pages)
        step.pinned_pages += sequence.forked_pages
        place, num_copied = divmod(sequence.num_computed, self.page_size)
        for source, table in zip(sequence.forked_pages, sequence.page_tables, strict=True):
            step.batch.transfers.copies.append(PageCopy(source, table[place], num_copied))
        sequence.forked_pages = []

    def _may_write(self, page: int) -> bool:
        """True if only one sequence uses the page, and the prefix cache knows nothing of it, so that it may be
        overwritten.
        """
        return self.pool.references[page] == 1 and not self.cache.knows(page)

    # Pages in main memory.

    def swap_out(self, sequence: Sequence) -> bool:
        """Has the next pass copy a sequence's pages to main memory, if there is room and recomputing them would cost
        more. Returns False if it does not.
        """
        if sequence.kv_policy is not None and sequence.kv_policy.counts_attention:
            return False  # the sums are on the device alone
        tokens, space = sequence.num_in_cache, self._swap_space
        num_pages = self.pool.pages_for(tokens)
        swap_s = tokens * space.swap_s_per_token + space.swap_s_per_state
        costs_more = tokens * space.compute_s_per_token > 2 * swap_s
        is_sound = self.swap_tier.is_on and sequence.may_be_proved_late and sequence not in self._distrusted
        if not is_sound or not costs_more or not tokens or num_pages > self.host_pages.num_free:
            return False
        sequence.host_pages = [self.host_pages.allocate() for _ in range(num_pages)]
        pairs = zip(sequence.pages[:num_pages], sequence.host_pages, strict=True)
        self._swap_out += [PageSwap(*pair) for pair in pairs]
        self._swapping.append(sequence)
        self.pool.num_copied_out += 1
        self.num_swaps += 1
        return True

    @property
    def is_swapping_out(self) -> bool:
        """True if free pages or slots may have contents that are still to be copied to main memory.

        Passes may use them, for a device does one thing after another; transfers and loads may not.
        """
        return self.pool.num_copied_out > 0

    def _swap_in(self, step: Step, sequence: Sequence) -> None:
        pairs = zip(sequence.pages, sequence.host_pages, strict=False)  # the first pages, as many as were swapped
        swaps = [PageSwap(*pair) for pair in pairs]
        step.batch.transfers.swap_in += swaps
        self._expect_proof(step, sequence, len(swaps))
        self.free_host_pages(sequence)  # nothing is written to them before this pass has read them

    def complete(self, step: Step) -> None:
        """Adds the copies to main memory that are due to a pass that will be launched."""
        step.swapped, self._swapping = self._swapping, []
        step.batch.transfers.swap_out, self._swap_out = self._swap_out, []

    def _expect_proof(self, step: Step, sequence: Sequence, count: int) -> None:
        """Records that so many pages or states of a sequence come back before a pass. Others hit none of its blocks
        until the pass is committed.
        """
        if sequence not in step.resumed:
            self._unproved[sequence] += 1
        step.resumed += [sequence] * count

    def prove(self, step: Step, faults: Items[int]) -> set[Sequence]:
        """Returns the sequences of which something came back changed before a committed pass. What it has computed of
        them is void, and so is what passes in flight compute.
        """
        found = {step.resumed[place] for place in faults}
        for sequence in found:
            self.swap_tier.mismatch("a page or a state")
            self.distrust(sequence)
        return found

    def distrust(self, sequence: Sequence) -> None:
        """Has the pages of a sequence forgotten when it leaves: what a pass has computed of it is void."""
        self._distrusted.add(sequence)

    def expect_load(self, step: Step, sequence: Sequence) -> None:
        """Records that pages of a sequence are loaded while a pass computes. Others hit none of its blocks until the
        pass is committed.
        """
        self._unproved[sequence] += 1
        step.loading_layerwise.append(sequence)

    def drop_swapped(self, step: Step) -> None:
        """Marks the copies to main memory of a failed pass as missing, so that their tokens are recomputed."""
        for sequence in step.swapped:
            if sequence.state is State.SWAPPED:
                self.free_host_pages(sequence)
                sequence.state = State.WAITING

    @property
    def swap_stats(self) -> TierStats | None:
        """Counters of main memory for preempted sequences; None if there is none. Its blocks cannot be hit."""
        store, space = self.host_pages, self._swap_space
        if not store.num_pages:
            return None
        used = (store.num_pages - store.num_free) * space.page_bytes
        return self.swap_tier.stats(capacity_bytes=store.num_pages * space.page_bytes, used_bytes=used, blocks=0)

    def free_host_pages(self, sequence: Sequence) -> None:
        """Frees the main memory of a sequence."""
        self.host_pages.release_all(sequence.host_pages)
        sequence.host_pages = []

    # Pages and recurrent states that transfers to and from other engines use, or loads of lower tiers.

    def resume_after_load(self, sequence: Sequence, checkpoint: int) -> None:
        """Has a sequence go on from a state that was loaded. The manager is the user of its slot from now on."""
        raise AssertionError("this model has no recurrent state")

    @property
    def state_checkpoints(self) -> StateCheckpoints | None:
        """The checkpoints of recurrent state; None if the model has none."""
        return None

    def received(self, sequence: Sequence) -> None:
        """Records that keys and values of the first tokens, and the state after them, have come from another engine."""

    def take_retained_state(self, sequence: Sequence) -> int | None:
        """Returns the checkpoint of the recurrent state before the last token of a prompt with `retains_kv`, whose user
        the caller is from now on; None if there is none.
        """
        del sequence
        return None

    def pin_cached_state(self, token_ids: Items[int], root: bytes, num_tokens: int) -> int | None:
        """Returns the checkpoint of the recurrent state after a prefix that `longest_cached` has found, which is not
        evicted before `unpin_state`; None if there is none.
        """
        del token_ids, root, num_tokens
        return None

    def unpin_state(self, checkpoint: int) -> None:
        """Ends the use of a checkpoint by a transfer."""

    def pin(self, pages: Items[int]) -> None:
        """Retains pages for a transfer, whatever becomes of their sequences."""
        self.pool.pin(pages)

    def unpin(self, pages: Items[int]) -> None:
        """Ends what `pin` began. The last page is the first to be reused."""
        self.pool.unpin(pages)

    def fits_beside_pins(self, sequence: Sequence) -> bool:
        """True if a sequence will fit once nothing else runs, though pages that only transfers use stay in use."""
        return self.pool.pages_for(len(sequence.token_ids) + 1) <= self.num_pages - self.pool.num_only_pinned
