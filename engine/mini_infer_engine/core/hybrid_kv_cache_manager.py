"""Manages pages where a model has several KV groups, or a window behind which pages are freed while a sequence runs.

As in vLLM's hybrid KV cache manager, all groups allocate pages of one size from one pool. A sequence has a page table
for each group; `num_pages`, which is no page of the pool, stands in it for a page that the group does not retain.

Passes run in the order of their launch. So a page behind the window of the next row is free at once, though a launched
pass may still read it: whatever is written to it is written by a later pass. Beams share pages and go back to the end
of their prompt after a preemption, so that groups of sequences retain all pages.
"""

from array import array
from collections.abc import Sequence as Items

from mini_infer_contract.blocks import BLOCK_SIZE_TOKENS
from mini_infer_engine.config.model.kv_groups import KVCacheConfig
from mini_infer_engine.core.batch import PageCopy, Runner
from mini_infer_engine.core.hybrid_prefix_cache import HybridPrefixCache
from mini_infer_engine.core.kv_cache_manager import KVCacheManager
from mini_infer_engine.core.page_allocator import PoolTooSmallError
from mini_infer_engine.core.prefix_cache import Hit
from mini_infer_engine.core.recurrent_kv_cache_manager import RecurrentKVCacheManager
from mini_infer_engine.core.sequence import Sequence
from mini_infer_engine.core.step import Step


class HybridKVCacheManager(KVCacheManager):
    """A `KVCacheManager` of several KV groups. It neither swaps pages to main memory nor pins them for transfers."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        kv_cache: KVCacheConfig,
        *,
        chunk_tokens: int,
        enable_caching: bool = True,
        record_events: bool = True,
    ) -> None:
        """Creates a pool of free pages, for prompt chunks of at most `chunk_tokens`."""
        super().__init__(num_pages, page_size, enable_caching=False)
        self._groups = kv_cache.groups
        self._config = kv_cache
        self._chunk_tokens = chunk_tokens
        self._null_page = num_pages
        self._hybrid_cache: HybridPrefixCache | None = None
        if enable_caching:
            self._hybrid_cache = HybridPrefixCache(num_pages, page_size, kv_cache.groups, record_events=record_events)
            self.cache, self.pool = self._hybrid_cache, self._hybrid_cache.pool

    def check_fits(self, max_model_len: int) -> None:
        """Raises PoolTooSmallError unless one sequence of the model's length fits: then none can be stuck forever."""
        if self._config.most_pages(max_model_len, self.page_size, self._chunk_tokens) > self.num_pages:
            capacity = self._config.most_tokens(self.num_pages, self.page_size, self._chunk_tokens)
            raise PoolTooSmallError(
                f"the KV cache holds one sequence of {capacity} tokens ({self.num_pages} pages of {self.page_size} for "
                f"{len(self._groups)} groups of layers), but one may have {max_model_len}: raise --kv-cache-memory (or "
                f"--gpu-memory-utilization), or set --max-model-len to at most {capacity}"
            )

    def check_beams_fit(self, width: int, num_shared: int, num_tokens: int) -> None:
        """Raises ValueError if so many sequences, which share their first tokens, have more pages than the pool."""
        num_pages = num_shared // self.page_size
        num_pages += width * (self.pages_for(num_tokens) - num_pages)
        num_pages *= len(self._groups)
        if num_pages > self.num_pages:
            raise ValueError(
                f"max_tokens allows {width} beams of {num_tokens} tokens, prompt included, which take {num_pages} "
                f"pages of the KV cache, and it has {self.num_pages}: ask for fewer tokens, or a smaller n"
            )

    # Pages of one sequence.

    def allocate_slots(self, step: Step, sequence: Sequence, hit: Hit, *, num_headroom_tokens: int) -> bool:
        """Allocates pages for a waiting sequence: those of groups that retain all tokens at once, those of
        windows chunk by chunk. It notes in `step` what is copied into them.

        Returns False, and allocates nothing, if the sequence at its largest would leave fewer pages than those of
        `num_headroom_tokens`.
        """
        pool, headroom = self.pool, len(self._groups) * self.pages_for(num_headroom_tokens)
        hits = self._hits(hit)
        tails = [one.tail_page for one in hits if one.tail_page is not None]
        if tails and self._num_needed(sequence, hits) + headroom + pool.num_unused(tails) > pool.num_free:
            assert self._hybrid_cache is not None
            hits, tails = self._hits(self._hybrid_cache.match_whole_pages(sequence)), []
        if self._num_needed(sequence, hits) + headroom > pool.num_free:
            return False
        for one in hits:
            pool.acquire_all(self._retained(one.pages))
        pool.acquire_all(tails)
        step.pinned_pages += tails
        num_all = self.pages_for(len(sequence.token_ids) + 1)
        tables = []
        for group, one in zip(self._groups, hits, strict=True):
            is_eager = group.window is None or sequence.group is not None
            num_new = num_all - len(one.pages) if is_eager else int(one.tail_page is not None)
            table = one.pages + [pool.allocate() for _ in range(num_new)]
            if one.tail_page is not None:
                num_copied = one.num_tokens % self.page_size
                step.batch.transfers.copies.append(PageCopy(one.tail_page, table[len(one.pages)], num_copied))
            tables.append(table)
        sequence.pages, *sequence.more_page_tables = tables
        sequence.num_computed = hits[0].num_tokens
        sequence.num_published = min(len(one.pages) for one in hits) * self.page_size // BLOCK_SIZE_TOKENS
        if sequence.num_cached is None:
            sequence.num_cached = hits[0].num_tokens
        return True

    def allocate_to_load(self, sequence: Sequence, num_pages: int) -> None:
        """Allocates the pages of windows up to `num_pages`, which `allocate_slots` has found room for."""
        for table in sequence.page_tables:
            table += [self.pool.allocate() for _ in range(num_pages - len(table))]

    def allocate_chunk(self, sequence: Sequence, end: int) -> bool:
        """Allocates pages for the tokens up to `end`, and one more after the last chunk, in groups with a window.

        Pages wholly behind the window are freed first. Returns False if too few are free.
        """
        if sequence.group is not None:
            return True
        self._free_skipped(sequence)
        num_pages = self.pages_for(end + (end == sequence.num_prefill))
        tables = sequence.page_tables
        if sum(max(0, num_pages - len(table)) for table in tables) > self.pool.num_free:
            return False
        for table in tables:
            table += [self.pool.allocate() for _ in range(num_pages - len(table))]
        return True

    def append_page(self, sequence: Sequence) -> bool:
        """Allocates one more page of each group for a running sequence, and frees those behind the window. Returns
        False if too few are free.
        """
        self._free_skipped(sequence)
        if self.pool.num_free < len(self._groups):
            return False
        for table in sequence.page_tables:
            table.append(self.pool.allocate())
        return True

    def allocate_lookahead(self, sequences: Items[Sequence], ends: Items[int]) -> bool:
        """Allocates pages up to the token count of each sequence in `ends`, for draft tokens. Returns False, and
        allocates nothing, if too few are free.
        """
        missing = [max(0, self.pages_for(end) - len(one.pages)) for one, end in zip(sequences, ends, strict=True)]
        if sum(missing) * len(self._groups) > self.pool.num_free:
            return False
        for sequence, count in zip(sequences, missing, strict=True):
            for table in sequence.page_tables:
                table += [self.pool.allocate() for _ in range(count)]
        return True

    def free(self, sequence: Sequence) -> None:
        """Frees the pages of a sequence of which no launched pass has a row."""
        for table in sequence.page_tables:
            self.pool.release_all(reversed(self._retained(table)))
        sequence.pages = []
        super().free(sequence)
        sequence.more_page_tables = []

    def complete(self, step: Step) -> None:
        """Adds the page tables of all groups but the first to the rows of a pass that will be launched."""
        if len(self._groups) > 1:
            for row, sequence in zip(step.batch.rows, step.sequences, strict=True):
                row.more_page_tables = sequence.more_page_tables

    # Pages that members of a group share.

    def fork(self, fork: Sequence, source: Sequence, token_ids: "array[int]", num_shared: int) -> None:
        """Gives `fork` the first `num_shared` tokens of `source`, in all groups, and then `token_ids`."""
        num_pages, tables = num_shared // self.page_size, source.page_tables
        fork.pages, *fork.more_page_tables = (table[:num_pages] for table in tables)
        for table in fork.page_tables:
            self.pool.acquire_all(self._retained(table))
        fork.forked_pages = [table[num_pages] for table in tables] if num_shared % self.page_size else []
        self._begin_fork(fork, source, token_ids, num_shared)

    def move(self, member: Sequence, source: Sequence, token_ids: "array[int]", num_shared: int) -> None:
        """Replaces the pages of `member` by those of a fork of `source`, and keeps the pages that only it uses as
        targets of the copies.
        """
        tables = member.page_tables
        self.fork(member, source, token_ids, num_shared)
        place = len(member.pages)
        if member.forked_pages and all(place < len(table) and self._may_write(table[place]) for table in tables):
            for new, table in zip(member.page_tables, tables, strict=True):
                new.append(table.pop(place))
        for table in tables:
            self.pool.release_all(reversed(self._retained(table)))

    def _may_hit(self, sequence: Sequence) -> bool:
        """True if a waiting sequence may take a cached prefix. Beams may not: a group shares pages from its first token
        on, and a hit has none of those behind the window.
        """
        return sequence.group is None and super()._may_hit(sequence)

    def _hits(self, hit: Hit) -> tuple[Hit, ...]:
        """Returns the hit in each group."""
        return (hit, *hit.others) if hit.others else (hit,) * len(self._groups)

    def _retained(self, table: list[int]) -> list[int]:
        """Returns the pages of a table that are the sequence's."""
        return [page for page in table if page != self._null_page]

    def _num_needed(self, sequence: Sequence, hits: tuple[Hit, ...]) -> int:
        """Returns how many free pages a sequence takes at its largest, those of the hit that nothing uses included."""
        num_tokens, needed = len(sequence.token_ids) + 1, 0
        for group, hit in zip(self._groups, hits, strict=True):
            num_new = self.pages_for(num_tokens) - len(hit.pages) + self.pool.num_unused(self._retained(hit.pages))
            if sequence.group is None:
                num_new = min(num_new, group.most_pages(num_tokens, self.page_size, self._chunk_tokens))
            needed += num_new
        return needed

    def _free_skipped(self, sequence: Sequence) -> None:
        """Frees the pages that no row from the next one on reads, unless the sequence shares them with its group."""
        if sequence.group is not None:
            return
        num_computed = sequence.num_computed - sequence.num_uncertain
        for group, table in zip(self._groups, sequence.page_tables, strict=True):
            if group.window is None:
                continue
            place = min(group.num_skipped_tokens(num_computed) // self.page_size, len(table))
            freed = []
            while place and table[place - 1] != self._null_page:
                place -= 1
                freed.append(table[place])
                table[place] = self._null_page
            self.pool.release_all(freed)


def make_kv_cache_manager(
    runner: Runner, *, chunk_tokens: int, enable_caching: bool, record_events: bool
) -> KVCacheManager:
    """Returns the manager of a runner's pages, for prompt chunks of at most `chunk_tokens`."""
    if runner.kv_cache.state_group is not None:
        return RecurrentKVCacheManager(
            runner.num_pages,
            runner.page_size,
            runner.kv_cache.num_checkpoints,
            enable_caching=enable_caching,
            record_events=record_events,
            swap_space=runner.swap_space,
            drafts=runner.max_speculative_rows > 0,
        )
    if runner.kv_cache.is_uniform:
        return KVCacheManager(
            runner.num_pages,
            runner.page_size,
            enable_caching=enable_caching,
            record_events=record_events,
            swap_space=runner.swap_space,
        )
    return HybridKVCacheManager(
        runner.num_pages,
        runner.page_size,
        runner.kv_cache,
        chunk_tokens=chunk_tokens,
        enable_caching=enable_caching,
        record_events=record_events,
    )
