"""Plans the next pass: decodes first, then prefill chunks, under one token budget. Decides who waits and who is
preempted.

It plans on upper bounds: rows of launched passes count as computed though their tokens are not known yet. Pages of a
sequence are released only when no launched pass has a row of it. The scheduler knows no tokens' meaning and no runner.
"""

from array import array
from bisect import bisect_left, insort
from copy import copy
from operator import attrgetter

from mini_infer_contract.blocks import BLOCK_SIZE_TOKENS
from mini_infer_engine.core.batch import NO_SWAP, Batch, PageCopy, PageSwap, Row, SwapSpace
from mini_infer_engine.core.page_allocator import PageAllocator
from mini_infer_engine.core.pipeline_turns import PipelineTurns
from mini_infer_engine.core.prefix_cache import MISS, NEVER, Hit, NoPrefixCache, PrefixCache
from mini_infer_engine.core.sequence import Sequence, State
from mini_infer_engine.core.speculation.planner import NoSpeculation, SpeculationPlanner
from mini_infer_engine.core.step import Step

HELD_BACK_LIMIT = 8
"""Most waiting sequences that one plan skips because a running one is computing what they need: bounds the search."""

HASHED_AHEAD = 512
"""Tokens of prompts in transfer whose keys are hashed in one step: about 0.1 ms."""


_order = attrgetter("order")


class Scheduler:
    """Waiting and running sequences, both sorted by `order`. If there is a cache, it is the pool's."""

    def __init__(
        self,
        pool: PageAllocator,
        cache: PrefixCache | None,
        *,
        max_num_seqs: int,
        token_budget: int,
        chunk_limit: int,
        swap_space: SwapSpace = NO_SWAP,
        speculation: SpeculationPlanner | NoSpeculation | None = None,
        num_stages: int = 1,
        chunk_alignment: int = 1,
    ) -> None:
        """Creates a scheduler for passes through a pipeline of `num_stages` stages.

        Prompt chunks end at multiples of `chunk_alignment` tokens, as far as a pass has room for so many, or with their
        prompt.
        """
        self.pool = pool
        self.cache = NoPrefixCache() if cache is None else cache
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.receiving: list[Sequence] = []
        """Sequences with slot and pages that get no rows before their transfer has ended."""
        self.num_preemptions = 0
        self.num_swaps = 0
        """Preemptions whose pages went to main memory."""
        self._speculation = NoSpeculation() if speculation is None else speculation
        self._swap_space = swap_space
        self._free_host_pages = list(range(swap_space.num_pages - 1, -1, -1))
        self._swapping: list[Sequence] = []
        self._swap_out: list[PageSwap] = []
        """Pages of `_swapping` that the next launched pass copies out before anything may write to them."""
        self._max_num_seqs = max_num_seqs
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._token_budget = token_budget
        self._chunk_limit = max(chunk_limit, chunk_alignment)
        self._chunk_alignment = chunk_alignment
        self._refused: tuple[Sequence, int, int] | None = None
        self._turns = PipelineTurns(num_stages) if num_stages > 1 else None

    @property
    def num_queued_tokens(self) -> int:
        """Known tokens that are not computed yet, less those that waiting sequences should find in the cache."""
        waiting = sum(len(sequence.token_ids) - self._expected_cached(sequence) for sequence in self.waiting)
        return waiting + sum(max(0, sequence.num_prefill - sequence.num_computed) for sequence in self.running)

    def _expected_cached(self, sequence: Sequence) -> int:
        """Returns the known tokens that a waiting sequence should find in the cache. It is looked up once, and only on
        demand.
        """
        if sequence.num_expected_cached is None:
            num_blocks = self.cache.match_length(sequence) if sequence.may_hit else 0
            sequence.num_expected_cached = num_blocks * BLOCK_SIZE_TOKENS
        return sequence.num_expected_cached

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence."""
        insort(self.waiting, sequence, key=_order)

    def check_group_fits(self, width: int, num_shared: int, num_tokens: int) -> None:
        """Raises ValueError if a group of so many sequences, which share their first tokens, could be stuck forever."""
        if width > self._max_num_seqs:
            raise ValueError(f"n is {width}, and this engine runs {self._max_num_seqs} sequences at most: ask for less")
        num_pages = num_shared // self.pool.page_size
        num_pages += width * (self.pool.pages_for(num_tokens) - num_pages)
        if num_pages > self.pool.num_pages:
            raise ValueError(
                f"max_tokens allows {width} beams of {num_tokens} tokens, prompt included, which take {num_pages} "
                f"pages of the KV cache, and it has {self.pool.num_pages}: ask for fewer tokens, or a smaller n"
            )

    def leave(self, sequence: Sequence, why: State) -> None:
        """Gives a sequence no more rows, and releases its pages as soon as no launched pass uses them.

        `why` is PREEMPTED or FINISHED. A group leaves as a whole.
        """
        group = sequence.group
        if group is None:
            self._leave(sequence, why)
            return
        for member in list(group.members):
            self._leave(member, why)
        del group.members[1:]
        self._free_slots += group.free_slots
        group.free_slots = []

    def _leave(self, sequence: Sequence, why: State) -> None:
        if sequence.is_in_line:
            _remove(self.waiting, sequence)
            self._drop_host_pages(sequence)
            sequence.state = State.ENDED
            return
        if sequence.state is State.RECEIVING:
            self._end_receiving(sequence)
        sequence.state = why
        if not sequence.in_flight:
            self.release(sequence)

    def release(self, sequence: Sequence, *, may_swap: bool = True) -> None:
        """Releases slot and pages of a leaving sequence. A preempted one goes back in line, by its old order.

        `may_swap` is True if its pages have valid contents, so that they may be kept in main memory.
        """
        self._free_slots.append(sequence.slot)
        goes_back = sequence.state is State.PREEMPTED and sequence.leads
        sequence.state = State.ENDED
        if goes_back:
            self.num_preemptions += 1
            may_swap = may_swap and sequence.group is None
            sequence.state = State.SWAPPED if may_swap and self._swaps(sequence) else State.WAITING
        self._give_back(sequence)
        if goes_back:
            sequence.num_expected_cached = sequence.num_computed if self.cache.is_present else 0
            insort(self.waiting, sequence, key=_order)

    def _give_back(self, sequence: Sequence) -> None:
        """Removes a sequence from the running ones and releases its pages. The caller reuses its slot."""
        _remove(self.running, sequence)
        self.pool.release_all(reversed(sequence.pages))  # the end of a prefix is the first to be evicted
        sequence.slot = -1
        sequence.pages = []
        sequence.num_published = 0
        sequence.num_drafted = 0
        sequence.forked_page = None

    def received(self, sequence: Sequence, num_tokens: int) -> None:
        """Runs a sequence from now on: its pages have received the keys and values of its first `num_tokens` tokens."""
        self._end_receiving(sequence)
        sequence.state = State.RUNNING
        sequence.num_received = max(0, num_tokens - sequence.num_computed)
        sequence.num_computed = max(num_tokens, sequence.num_computed)
        self.cache.publish(sequence)

    def not_received(self, sequence: Sequence) -> None:
        """Puts a sequence that received nothing back in line. It is computed here in other pages, as the old ones may
        still be written to.
        """
        self._end_receiving(sequence)
        sequence.state = State.WAITING
        self._free_slots.append(sequence.slot)
        self._give_back(sequence)
        insort(self.waiting, sequence, key=_order)

    def _end_receiving(self, sequence: Sequence) -> None:
        _remove(self.receiving, sequence)
        sequence.kv_source = None
        insort(self.running, sequence, key=_order)

    def fork(self, source: Sequence, token_ids: "array[int]", num_shared: int) -> Sequence:
        """Adds a member to the group of `source`, which runs. It has the first `num_shared` tokens in common with
        `source`.

        Full pages are shared from now on. The page after them is copied before the next chunk, which computes the rest
        of `token_ids`; `source` must stay until that chunk has been launched.
        """
        group = source.group
        assert group is not None
        group.num_forks += 1
        fork = copy(source)
        fork.order = (*source.order[:2], group.num_forks)
        fork.slot = group.free_slots.pop()
        fork.in_flight = 0
        self._share(fork, source, token_ids, num_shared)
        insort(self.running, fork, key=_order)
        return fork

    def move(self, member: Sequence, source: Sequence, token_ids: "array[int]", num_shared: int) -> Sequence:
        """Replaces a member of a group by a fork of `source`, and returns it. None of the member's rows may be in
        flight.

        It keeps its slot, its place among the running sequences and, as target of the copy, the page that only it uses.
        So most moves leave its page table as a runner's device has it.
        """
        assert not member.in_flight
        pages = member.pages
        self._share(member, source, token_ids, num_shared)
        place = len(member.pages)
        if member.forked_page is not None and place < len(pages) and self._may_write(pages[place]):
            member.pages.append(pages.pop(place))
        self.pool.release_all(reversed(pages))
        return member

    def _may_write(self, page: int) -> bool:
        """True if only one sequence uses the page, and the prefix cache knows nothing of it, so that it may be
        overwritten.
        """
        return self.pool.references[page] == 1 and not self.cache.knows(page)

    def _share(self, fork: Sequence, source: Sequence, token_ids: "array[int]", num_shared: int) -> None:
        """Sets pages and tokens of `fork`. Only its group can hit what follows, so its blocks are not published."""
        num_pages = num_shared // self.pool.page_size
        fork.pages = source.pages[:num_pages]
        self.pool.acquire_all(fork.pages)
        fork.forked_page = source.pages[num_pages] if num_shared % self.pool.page_size else None
        fork.token_ids = token_ids
        fork.num_computed = num_shared
        fork.keys = source.keys[: num_shared // BLOCK_SIZE_TOKENS]
        fork.next_block_end = NEVER
        fork.only_known_tokens()

    def drop(self, member: Sequence) -> None:
        """Ends a member of a group. None of its rows may be in flight. The group keeps its slot."""
        assert member.group is not None
        assert not member.in_flight
        member.group.free_slots.append(member.slot)
        member.state = State.ENDED
        self._give_back(member)

    def _swaps(self, sequence: Sequence) -> bool:
        """Has the next pass copy a sequence's pages to main memory, if there is room and recomputing them would cost
        more.
        """
        tokens, space = sequence.num_computed, self._swap_space
        num_pages = self.pool.pages_for(tokens)
        costs_more = tokens * space.compute_s_per_token > 2 * tokens * space.swap_s_per_token
        if not costs_more or not tokens or num_pages > len(self._free_host_pages):
            return False
        sequence.host_pages = [self._free_host_pages.pop() for _ in range(num_pages)]
        pairs = zip(sequence.pages[:num_pages], sequence.host_pages, strict=True)
        self._swap_out += [PageSwap(*pair) for pair in pairs]
        self._swapping.append(sequence)
        self.num_swaps += 1
        return True

    def _drop_host_pages(self, sequence: Sequence) -> None:
        self._free_host_pages += sequence.host_pages
        sequence.host_pages = []

    def forget_swapped(self, step: Step) -> None:
        """Marks the copies to main memory of a failed pass as missing, so that their tokens are recomputed."""
        for sequence in step.swapped:
            if sequence.state is State.SWAPPED:
                self._drop_host_pages(sequence)
                sequence.state = State.WAITING

    def plan(self) -> Step:
        """Returns the next pass, which has no rows if nothing can run before a launched pass is committed."""
        step = Step(Batch([], 0))
        budget, prefills = self._plan_decodes(step)
        computing = _Computing()
        for sequence in prefills:
            if not budget or sequence.state is not State.RUNNING:  # it may have lost its pages to a beam before it
                continue
            if sequence.group is None:
                budget -= self._plan_chunk(step, sequence, budget, computing)
            elif self._has_room(step, sequence):
                if sequence.num_computed + 1 == sequence.num_prefill > sequence.num_prompt:
                    budget -= self._plan_next_token(step, sequence)
                else:
                    budget -= self._plan_chunk(step, sequence, budget, computing)
        self._hash_ahead()
        self._plan_admissions(step, budget, computing)
        self._speculation.plan(step.batch, step.sequences, self.pool)
        if step.batch.rows:
            step.swapped, self._swapping = self._swapping, []
            step.batch.transfers.swap_out, self._swap_out = self._swap_out, []
        return step

    def launched(self, step: Step) -> None:
        """Publishes what the prefill chunks of a launched pass compute: later passes can hit it."""
        if self._turns is not None:
            self._turns.launched(step)
        for sequence in step.sequences[step.batch.num_decodes :]:
            if sequence.num_computed >= sequence.next_block_end:
                self.cache.publish(sequence)

    def append(self, sequence: Sequence, token: int) -> None:
        """Appends a sampled token. A block that it completes can be hit as soon as a launched pass computes it."""
        sequence.token_ids.append(token)
        if sequence.num_computed >= sequence.next_block_end:
            self.publish(sequence)

    def publish(self, sequence: Sequence) -> None:
        """Publishes the blocks of known tokens that launched passes compute: they can be hit from now on."""
        self.cache.publish(sequence)

    def unpin(self, step: Step) -> None:
        """Releases the sources of a finished pass's copies.

        Call it before any of its sequences leaves: the pages before a source, which those use, are to be evicted after
        it.
        """
        self.pool.release_all(step.pinned_pages)
        if self._turns is not None:
            self._turns.ended(step)

    def _plan_decodes(self, step: Step) -> tuple[int, list[Sequence]]:
        """Plans a row for each sequence that decodes. Returns the budget left and the sequences that still prefill."""
        rows, sequences, prefills = step.batch.rows, step.sequences, []
        budget, page_size = self._token_budget, self.pool.page_size
        running = State.RUNNING
        candidates = self.running if self._turns is None else self._turns.take(self.running)
        for sequence in candidates:  # a row may preempt itself or the last in order, so no row planned before it
            start = sequence.num_computed
            if sequence.state is not running or start > sequence.last_position:
                continue
            if start < sequence.num_prefill:
                prefills.append(sequence)
                continue
            if not budget:
                break
            if start == len(sequence.pages) * page_size and not self._grow(sequence):
                continue
            request, output_index = sequence.request, start + 1 - sequence.num_prompt
            row = Row(sequence.slot, start, 1, None, sequence.pages, request.sampling, request.noise_seed, output_index)
            if sequence.excludes_tokens:
                row.suppressed_token_ids = sequence.suppressed_at(output_index - sequence.num_uncertain)
                row.banned = sequence.banned(start + 1)
            rows.append(row)
            sequences.append(sequence)
            sequence.num_computed = start + 1
            sequence.in_flight += 1
            budget -= 1
        step.batch.num_decodes = len(rows)
        return budget, prefills

    def _grow(self, sequence: Sequence) -> bool:
        """Adds a page, preempting the last sequence in order if none is free. Returns False if the sequence sits this
        pass out.
        """
        while not self.pool.num_free:
            if any(other.is_leaving for other in self.running):
                return False  # pages come with the next commit
            victim = self.running[-1]
            self.leave(victim, State.PREEMPTED)
            if sequence.state is not State.RUNNING:  # it was the victim, or of its group
                return False
        sequence.pages.append(self.pool.allocate())
        return True

    def _has_room(self, step: Step, sequence: Sequence) -> bool:
        """Allocates pages for the next chunk of a group's member, and has a shared page copied. Returns False if it
        sits out.
        """
        pool, start = self.pool, sequence.num_computed
        while len(sequence.pages) * pool.page_size < sequence.num_prefill:
            if not self._grow(sequence):
                return False
        if sequence.forked_page is not None:
            pool.acquire(sequence.forked_page)
            step.pinned_pages.append(sequence.forked_page)
            target = sequence.pages[start // pool.page_size]
            step.batch.transfers.copies.append(PageCopy(sequence.forked_page, target, start % pool.page_size))
            sequence.forked_page = None
        return True

    def _plan_chunk(self, step: Step, sequence: Sequence, budget: int, computing: "_Computing") -> int:
        """Plans the next chunk of a prefill. Returns its number of tokens, and records the block that it fills first in
        `computing`.

        Returns 0, and plans nothing, if there is no room for tokens up to the next multiple of the alignment.
        """
        start = sequence.num_computed
        count = min(sequence.num_prefill - start, budget, self._chunk_limit)
        if self._chunk_alignment > 1:
            count = self._aligned(sequence, count, is_alone=not step.batch.rows)
            if not count:
                return 0
        if start < sequence.num_prompt_told:
            count = min(count, sequence.num_prompt_told - start)  # what follows is still to be told
        end = start + count
        is_last = end == sequence.num_prefill
        request, sampling = sequence.request, sequence.request.sampling
        output_index = sequence.num_prefill - sequence.num_prompt
        row = Row(
            sequence.slot,
            start,
            count,
            sequence.token_ids[start:end],
            sequence.pages,
            sampling if is_last else None,
            request.noise_seed,
            output_index,
        )
        if sequence.excludes_tokens:
            row.suppressed_token_ids = sequence.suppressed_at(output_index)
        if is_last:
            row.embeds = request.embeds
            if sampling.has_penalties:
                row.known_token_ids = sequence.token_ids
            if sampling.bad_words_token_ids:
                row.banned = sequence.banned(end)
        if sampling.prompt_logprobs is not None:
            row.prompt_targets = sequence.prompt_targets(start, end)
            row.num_prompt_logprobs = sampling.prompt_logprobs
        step.batch.rows.append(row)
        step.sequences.append(sequence)
        sequence.num_computed = end
        sequence.in_flight += 1
        block = start // BLOCK_SIZE_TOKENS
        if self.cache.is_present and (block + 1) * BLOCK_SIZE_TOKENS <= sequence.num_prefill:
            computing.add(sequence, block)
        return count

    def _aligned(self, sequence: Sequence, count: int, *, is_alone: bool) -> int:
        """Returns how many of the next `count` tokens make an aligned chunk. One that is alone in its pass is never
        empty, whatever its alignment.
        """
        end = sequence.num_computed + count
        too_many = end % self._chunk_alignment if end < sequence.num_prefill else 0
        if too_many < count:
            return count - too_many
        return count if is_alone else 0

    @staticmethod
    def _plan_next_token(step: Step, sequence: Sequence) -> int:
        """Plans the row of a beam of which only the newest token is to be computed. Faster than a chunk: beams exclude
        no tokens.
        """
        start, request = sequence.num_computed, sequence.request
        token_ids, output_index = sequence.token_ids[start:], start + 1 - sequence.num_prompt
        step.batch.rows.append(
            Row(
                sequence.slot,
                start,
                1,
                token_ids,
                sequence.pages,
                request.sampling,
                request.noise_seed,
                output_index,
            )
        )
        step.sequences.append(sequence)
        sequence.num_computed = start + 1
        sequence.in_flight += 1
        return 1

    def _plan_admissions(self, step: Step, budget: int, computing: "_Computing") -> None:
        """Admits waiting sequences in order. None overtakes one that lacks pages, or long ones would starve.

        A sequence that waits for pages that other engines pin is overtaken: those pages come back whatever runs here.
        """
        index = 0
        while budget and self._free_slots and index < len(self.waiting) and index < HELD_BACK_LIMIT:
            sequence = self.waiting[index]
            if self._was_refused(sequence):
                return
            is_swapped = sequence.state is State.SWAPPED
            hit = self.cache.match(sequence) if sequence.may_hit and not is_swapped else MISS
            if sequence.kv_source is not None:
                self._prefer_own(sequence, hit)
            if sequence.kv_source is not None:
                hit = hit.without_tail(self.pool.page_size)  # pages are received whole
            is_awaited = sequence.kv_source is not None and self._is_being_received(sequence)
            if not is_swapped and (is_awaited or self._is_being_computed(sequence, hit, computing)):
                index += 1
            elif self._place(step, sequence, hit):
                del self.waiting[index]
                if sequence.kv_source is None:
                    insort(self.running, sequence, key=_order)
                    budget -= self._plan_chunk(step, sequence, budget, computing)
                else:
                    sequence.state = State.RECEIVING
                    insort(self.receiving, sequence, key=_order)
                    step.receiving.append(sequence)
            elif self._is_kept_out_by_pins(sequence):
                step.kept_out.append(sequence)
                index += 1
            else:
                self._refused = (sequence, self.pool.num_free, len(self.running))
                return

    def _prefer_own(self, sequence: Sequence, hit: Hit) -> None:
        """Cancels a transfer if all but less than a page is cached: computing the rest is faster."""
        if len(sequence.token_ids) - hit.without_tail(self.pool.page_size).num_tokens <= self.pool.page_size:
            sequence.kv_source = None

    def _is_being_received(self, sequence: Sequence) -> bool:
        """True if another sequence with the same prompt receives all of its blocks, so that it will hit them soon."""
        num_tokens = len(sequence.token_ids) // BLOCK_SIZE_TOKENS * BLOCK_SIZE_TOKENS
        if not self.cache.is_present or not num_tokens or not sequence.may_hit:
            return False
        # Tokens, not their keys: those are hashed while they are on their way.
        return any(
            other.root == sequence.root and other.token_ids[:num_tokens] == sequence.token_ids[:num_tokens]
            for other in self.receiving
        )

    @property
    def lacks_keys(self) -> bool:
        """True if keys of prompts in transfer can be hashed meanwhile."""
        return self.cache.is_present and any(sequence.lacks_keys for sequence in self.receiving)

    def _hash_ahead(self) -> None:
        """Hashes some keys of prompts in transfer in each step: all at once they would delay others' next tokens."""
        if not self.cache.is_present:
            return
        waiting = next((sequence for sequence in self.receiving if sequence.lacks_keys), None)
        if waiting is not None:
            waiting.add_keys(HASHED_AHEAD)

    def _is_kept_out_by_pins(self, sequence: Sequence) -> bool:
        """True if pages that only transfers use leave fewer than the sequence needs when nothing else runs."""
        num_needed = self.pool.pages_for(len(sequence.token_ids) + 1)
        return num_needed > self.pool.num_pages - self.pool.num_only_pinned

    def _was_refused(self, sequence: Sequence) -> bool:
        """True if it lacked pages before and nothing has improved since: saves a prefix lookup in every step."""
        if self._refused is None:
            return False
        refused, num_free, num_running = self._refused
        return refused is sequence and self.pool.num_free <= num_free and len(self.running) == num_running

    def _is_being_computed(self, sequence: Sequence, hit: Hit, computing: "_Computing") -> bool:
        """True if a row of this pass computes the first block that the sequence lacks, so that it will hit it one pass
        later.
        """
        block = hit.num_tokens // BLOCK_SIZE_TOKENS
        if not computing or (block + 1) * BLOCK_SIZE_TOKENS >= len(sequence.token_ids):
            return False
        return computing.includes(sequence.key(block))

    def _place(self, step: Step, sequence: Sequence, hit: Hit) -> bool:
        """Allocates a slot and pages for all known tokens and the next one. Returns False if too few are free."""
        if sequence.num_slots > len(self._free_slots):
            return False
        pool = self.pool
        num_new = pool.pages_for(len(sequence.token_ids) + 1) - len(hit.pages)
        num_needed = num_new + pool.num_unused(hit.pages) + self._headroom()
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
        sequence.slot = self._free_slots.pop()
        if sequence.group is not None:
            sequence.group.free_slots = [self._free_slots.pop() for _ in range(sequence.num_slots - 1)]
        sequence.num_prefill = len(sequence.token_ids)
        if sequence.state is State.SWAPPED:
            pairs = zip(sequence.pages, sequence.host_pages, strict=False)  # the first pages, as many as were swapped
            step.batch.transfers.swap_in += [PageSwap(*pair) for pair in pairs]
            self._drop_host_pages(sequence)  # nothing is written to them before this pass has read them
        else:
            sequence.num_computed = hit.num_tokens
        sequence.state = State.RUNNING
        sequence.kept_out_s = None
        sequence.num_published = len(hit.pages) * pool.page_size // BLOCK_SIZE_TOKENS
        if sequence.num_cached is None:
            sequence.num_cached = hit.num_tokens
            step.admitted.append(sequence)
        return True

    def _headroom(self) -> int:
        """Returns the free pages that an admission must leave: sixteen more tokens for each running sequence.

        Without them the newcomer would be preempted a few steps later, and its prefill would have been for nothing.
        """
        return self.pool.pages_for(len(self.running) * BLOCK_SIZE_TOKENS)


def _remove(ordered: list[Sequence], sequence: Sequence) -> None:
    del ordered[bisect_left(ordered, sequence.order, key=_order)]


class _Computing:
    """The block that each prompt chunk of a pass fills first. Keys are computed once another sequence may want the
    block.

    A new prompt that is alone in its pass does not wait for its keys.
    """

    __slots__ = ("_chunks", "_keys")

    def __init__(self) -> None:
        self._chunks: list[tuple[Sequence, int]] = []
        self._keys: set[bytes] = set()

    def __bool__(self) -> bool:
        return bool(self._chunks or self._keys)

    def add(self, sequence: Sequence, block: int) -> None:
        """Records that a chunk of this sequence begins in this block, and fills it."""
        self._chunks.append((sequence, block))

    def includes(self, key: bytes) -> bool:
        """Returns True if some chunk fills the block with this key."""
        self._keys.update(sequence.key(block) for sequence, block in self._chunks)
        self._chunks.clear()
        return key in self._keys
