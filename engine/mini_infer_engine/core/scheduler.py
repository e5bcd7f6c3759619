"""Plans the next pass: decodes first, then prefill chunks, under one token budget. Decides who waits and who is
preempted.

It plans on upper bounds: rows of launched passes count as computed though their tokens are not known yet. Pages of a
sequence are freed only when no launched pass has a row of it. The scheduler knows no tokens' meaning, no runner, and of
pages only that a `KVCacheManager` has some for a sequence, or too few.
"""

from array import array
from bisect import bisect_left, bisect_right, insort
from copy import copy
from heapq import merge
from itertools import chain, islice
from math import inf
from operator import attrgetter

from mini_infer_contract.blocks import BLOCK_SIZE_TOKENS
from mini_infer_engine.core.batch import Compaction, Row
from mini_infer_engine.core.encoder_cache import EncoderCacheManager
from mini_infer_engine.core.kv_cache_manager import KVCacheManager
from mini_infer_engine.core.kv_eviction import chunk_before_compaction
from mini_infer_engine.core.kv_tiers.load_choice import FirstPass
from mini_infer_engine.core.kv_tiers.tier_match import NO_MATCH, TierMatch
from mini_infer_engine.core.kv_tiers.tiers import NO_TIERS, KVTiers, NoTiers
from mini_infer_engine.core.pass_plan import PassPlan
from mini_infer_engine.core.pipeline_schedule import NoPipelineTurns, PipelineSchedule
from mini_infer_engine.core.prefill_rows import beam_row, chunk_row
from mini_infer_engine.core.prefix_cache import Hit
from mini_infer_engine.core.request import NO_TARGETS
from mini_infer_engine.core.scheduling.policy import Pending, PriorityPolicy, SchedulingPolicy
from mini_infer_engine.core.sequence import Sequence, State
from mini_infer_engine.core.slot_allocator import SlotAllocator
from mini_infer_engine.core.speculation.planner import NoSpeculation, SpeculationPlanner
from mini_infer_engine.core.step import Refusal, Step

MAX_SKIPPED = 8
"""Most waiting sequences that one plan skips because a running one is computing what they need: bounds the search."""

HASHED_AHEAD = 512
"""Tokens of prompts in transfer whose keys are hashed in one step: about 0.1 ms."""

MAX_OVERTAKEN = 1
"""Most later sequences that overtake one which lacks pages. With tiers below the device what they evict comes back."""

MAX_FORECAST = 128
"""Prompts that are looked at one by one when a latency target is predicted: some 0.5 ms."""
MAX_REFUSED = 32
"""Sequences that one plan refuses because they have become late: the others are late in the next plan too."""

_order = attrgetter("order")
_DEFAULT_POLICY = PriorityPolicy()


class Scheduler:
    """Waiting and running sequences, both sorted by `order`, and the slots of those that run."""

    def __init__(
        self,
        kv_cache: KVCacheManager,
        *,
        max_num_seqs: int,
        token_budget: int,
        chunk_limit: int,
        policy: SchedulingPolicy = _DEFAULT_POLICY,
        speculation: SpeculationPlanner | NoSpeculation | None = None,
        num_stages: int = 1,
        chunk_alignment: int = 1,
        encoder_cache: EncoderCacheManager | None = None,
        tiers: KVTiers | NoTiers = NO_TIERS,
    ) -> None:
        """Creates a scheduler for passes through a pipeline of `num_stages` stages.

        Prompt chunks end at multiples of `chunk_alignment` tokens, as far as a pass has room for so many, or with their
        prompt.
        """
        self.kv_cache = kv_cache
        self.encoder_cache = EncoderCacheManager(0, 0) if encoder_cache is None else encoder_cache
        self.tiers = tiers
        self.policy = policy
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.receiving: list[Sequence] = []
        """Sequences with slot and pages that get no rows before their transfer, or their load, has ended."""
        self.num_preemptions = 0
        self._speculation = NoSpeculation() if speculation is None else speculation
        self._max_num_seqs = max_num_seqs
        self.slots = SlotAllocator(max_num_seqs)
        self._token_budget = token_budget
        self._chunk_limit = max(chunk_limit, chunk_alignment)
        self._chunk_alignment = chunk_alignment
        self._compacting: list[Step] = []
        """Launched passes after whose commit pages of compacted sequences are free."""
        self._pipeline = PipelineSchedule(num_stages) if num_stages > 1 else NoPipelineTurns()

    @property
    def num_queued_tokens(self) -> int:
        """Known tokens that are not computed yet, less those that waiting sequences should find in the cache."""
        return sum(map(self._num_uncomputed, self.waiting)) + sum(map(self._num_uncomputed, self.running))

    def _num_uncomputed(self, sequence: Sequence) -> int:
        if sequence.is_in_line:
            return len(sequence.token_ids) - self.kv_cache.num_expected_cached(sequence)
        return max(0, sequence.num_prefill - sequence.num_computed)

    # A sequence's way in and out.

    def add(self, sequence: Sequence, now_s: float = 0.0) -> Refusal | None:
        """Queues a new sequence. Returns the reason if the policy refuses it, which ends it."""
        if self.policy.has_targets:
            sequence.order = self.policy.order(sequence, self._num_uncomputed(sequence))
            if (refusal := self._refusal(sequence, now_s)) is not None:
                sequence.state = State.ENDED
                return refusal
        insort(self.waiting, sequence, key=_order)
        return None

    def check_group_fits(self, width: int, num_shared: int, num_tokens: int) -> None:
        """Raises ValueError if a group of so many sequences, which share their first tokens, could be stuck forever."""
        if width > self._max_num_seqs:
            raise ValueError(f"n is {width}, and this engine runs {self._max_num_seqs} sequences at most: ask for less")
        self.kv_cache.check_beams_fit(width, num_shared, num_tokens)

    def leave(self, sequence: Sequence, why: State) -> None:
        """Gives a sequence no more rows, and frees its pages as soon as no launched pass uses them.

        `why` is PREEMPTED or FINISHED. A group leaves as a whole.
        """
        group = sequence.group
        if group is None:
            self._leave(sequence, why)
            return
        for member in list(group.members):
            self._leave(member, why)
        del group.members[1:]
        for slot in group.free_slots:
            self.slots.release(slot)
        group.free_slots = []

    def _leave(self, sequence: Sequence, why: State) -> None:
        if sequence.is_in_line:
            _remove(self.waiting, sequence)
            self.kv_cache.free_host_pages(sequence)
            sequence.state = State.ENDED
            return
        if sequence.state in (State.RECEIVING, State.LOADING):
            self._end_receiving(sequence)
        sequence.state = why
        if why is State.FINISHED and sequence.request.lease_s:
            self.kv_cache.lease(sequence)
            self.tiers.ended(sequence)
        if why is State.FINISHED and self.policy.has_targets:
            self.policy.finished(sequence)
        if not sequence.in_flight:
            self.release(sequence)

    def release(self, sequence: Sequence, *, may_swap: bool = True) -> None:
        """Releases slot and pages of a leaving sequence. A preempted one goes back in line, by its old order.

        `may_swap` is True if its pages have valid contents, so that they may be kept in main memory.
        """
        self.slots.release(sequence.slot)
        goes_back = sequence.state is State.PREEMPTED and sequence.leads
        sequence.state = State.ENDED
        if goes_back:
            self.num_preemptions += 1
            may_swap = may_swap and sequence.group is None
            sequence.state = State.SWAPPED if may_swap and self.kv_cache.swap_out(sequence) else State.WAITING
        self._free(sequence)
        if goes_back:
            sequence.num_expected_cached = sequence.num_computed if self.kv_cache.is_caching else 0
            insort(self.waiting, sequence, key=_order)

    def _free(self, sequence: Sequence) -> None:
        """Removes a sequence from the running ones and frees its pages. The caller reuses its slot."""
        _remove(self.running, sequence)
        self.kv_cache.free(sequence)
        sequence.slot = -1

    # A sequence whose keys and values come from another engine.

    def received(self, sequence: Sequence, num_tokens: int) -> None:
        """Runs a sequence from now on: its pages have received the keys and values of its first `num_tokens` tokens,
        and its slot the recurrent state after them.
        """
        self._end_receiving(sequence)
        sequence.state = State.RUNNING
        sequence.num_received = max(0, num_tokens - sequence.num_computed)
        sequence.num_computed = max(num_tokens, sequence.num_computed)
        self.kv_cache.received(sequence)
        self.kv_cache.cache_blocks(sequence)

    def loaded(self, sequence: Sequence, num_tokens: int, checkpoint: int | None = None) -> None:
        """Runs a sequence from now on: its pages have the first `num_tokens` tokens' cached blocks, and the slot of
        `checkpoint`, which it uses, the recurrent state after them if there is one.
        """
        self._end_receiving(sequence)
        sequence.state = State.RUNNING
        sequence.num_computed = num_tokens
        if checkpoint is not None:
            self.kv_cache.resume_after_load(sequence, checkpoint)
        self.kv_cache.cache_blocks(sequence)

    def not_received(self, sequence: Sequence) -> None:
        """Puts a sequence that received nothing back in line. It is computed here in other pages, as the old ones may
        still be written to.
        """
        self._end_receiving(sequence)
        sequence.state = State.WAITING
        self.slots.release(sequence.slot)
        self._free(sequence)
        insort(self.waiting, sequence, key=_order)

    def _end_receiving(self, sequence: Sequence) -> None:
        _remove(self.receiving, sequence)
        sequence.kv_source = None
        insort(self.running, sequence, key=_order)

    # Members of a group.

    def fork(self, source: Sequence, token_ids: "array[int]", num_shared: int) -> Sequence:
        """Adds a member to the group of `source`, which runs. It has the first `num_shared` tokens in common with
        `source`, which must stay until the pass with the next chunk of the fork has been launched.
        """
        group = source.group
        assert group is not None
        group.num_forks += 1
        fork = copy(source)
        fork.order = (*group.order, group.num_forks)
        fork.slot = group.free_slots.pop()
        fork.in_flight = 0
        self.kv_cache.fork(fork, source, token_ids, num_shared)
        insort(self.running, fork, key=_order)
        return fork

    def move(self, member: Sequence, source: Sequence, token_ids: "array[int]", num_shared: int) -> Sequence:
        """Replaces a member of a group by a fork of `source`, and returns it. None of the member's rows may be in
        flight. It keeps its slot and its place among the running sequences.
        """
        assert not member.in_flight
        self.kv_cache.move(member, source, token_ids, num_shared)
        return member

    def drop(self, member: Sequence) -> None:
        """Ends a member of a group. None of its rows may be in flight. The group keeps its slot."""
        assert member.group is not None
        assert not member.in_flight
        member.group.free_slots.append(member.slot)
        member.state = State.ENDED
        self._free(member)

    # A pass.

    def plan(self, now_s: float = 0.0) -> Step:
        """Returns the next pass, which has no rows if nothing can run before a launched pass is committed."""
        plan = PassPlan(now_s, self._token_budget, self._max_num_seqs)
        self.kv_cache.pool.advance(now_s)
        self._plan_decodes(plan)
        self._apply_targets(plan)
        self._plan_prefills(plan)
        self._hash_ahead()
        self._plan_admissions(plan)
        self.tiers.read_ahead(self.waiting, len(self.running))
        step = plan.step
        self._speculation.plan(step.batch, step.sequences, self.kv_cache)
        if step.batch.rows:
            self.kv_cache.complete(step)
        return step

    def launched(self, step: Step) -> None:
        """Publishes what the prefill chunks of a launched pass compute: later passes can hit it."""
        self._pipeline.launched(step)
        for sequence in step.sequences[step.batch.num_decodes :]:
            if sequence.num_computed >= sequence.next_block_end:
                self.kv_cache.cache_blocks(sequence)
        if step.compacting:
            self._compacting.append(step)
            for sequence in step.compacting:
                self.kv_cache.end_compaction(step, sequence)

    def append(self, sequence: Sequence, token: int) -> None:
        """Appends a sampled token. A block that it completes can be hit as soon as a launched pass computes it."""
        sequence.token_ids.append(token)
        if sequence.num_computed >= sequence.next_block_end:
            self.kv_cache.cache_blocks(sequence)

    def failed(self, step: Step) -> None:
        """Records that a pass has failed, as `ended` does, and forgets what it may have computed besides."""
        self.ended(step)
        self.encoder_cache.reset()
        self.kv_cache.drop_swapped(step)

    def ended(self, step: Step) -> None:
        """Records that a launched pass is committed or has failed. Call it before any of its sequences leaves."""
        self.kv_cache.release_sources(step)
        if step in self._compacting:
            self._compacting.remove(step)
        self._pipeline.ended(step)

    def _plan_decodes(self, plan: PassPlan) -> None:
        """Plans a row for each sequence that decodes, and finds those that still prefill."""
        rows, sequences, prefills = plan.step.batch.rows, plan.step.sequences, plan.prefills
        budget, page_size = plan.token_budget, self.kv_cache.page_size
        running = State.RUNNING
        for sequence in self._pipeline.take(self.running):
            # To grow may preempt this sequence or one after it: never one whose row is planned already.
            position = sequence.num_computed
            if sequence.state is not running or position > sequence.last_position:
                continue
            if position < sequence.num_prefill:
                prefills.append(sequence)
                continue
            if not budget:
                break
            start = position - sequence.num_evicted
            if start == len(sequence.pages) * page_size and not self._grow(plan, sequence):
                continue
            request, output_index = sequence.request, position + 1 - sequence.num_prompt
            row = Row(sequence.slot, start, 1, None, sequence.pages, request.sampling, request.noise_seed, output_index)
            if sequence.is_special:
                row.position_offset = sequence.images.position_offset + sequence.num_evicted
                if sequence.excludes_tokens:
                    row.suppressed_token_ids = sequence.suppressed_at(output_index - sequence.num_uncertain)
                    row.banned = sequence.banned(position + 1)
                if sequence.kv_policy is not None:
                    row.counts_attention = sequence.kv_policy.counts_attention
                if position + 1 == sequence.next_compaction:
                    if not self._allocate_to_compact(plan, sequence):
                        continue
                    row.compaction = self._compaction(plan, sequence)
            rows.append(row)
            sequences.append(sequence)
            sequence.num_computed = position + 1
            sequence.in_flight += 1
            budget -= 1
        plan.step.batch.num_decodes = len(rows)
        plan.token_budget = budget

    def _apply_targets(self, plan: PassPlan) -> None:
        """Limits the rest of the pass so that streams keep their targets, and refuses what waits and would be late."""
        if not self.policy.has_targets:
            return
        limits = self.policy.limits(plan, self.running, self.waiting)
        plan.token_budget = min(plan.token_budget, limits.prefill_tokens)
        plan.max_running = min(plan.max_running, limits.max_running)
        place = 0
        # The first of each priority has the least slack.
        while place < len(self.waiting) and len(plan.step.refused) < MAX_REFUSED:
            sequence = self.waiting[place]
            if self._is_late(sequence, plan.now_s) and (refusal := self._refusal(sequence, plan.now_s)) is not None:
                self.leave(sequence, State.FINISHED)
                plan.step.refused.append((sequence, refusal))
            else:
                place = bisect_left(self.waiting, (sequence.order[0] + 1,), lo=place, key=_order)

    def _is_late(self, sequence: Sequence, now_s: float) -> bool:
        """True if a waiting sequence cannot keep its target any more, though others may have computed its prefix."""
        if not self.policy.is_late(sequence, self._num_uncomputed(sequence), now_s):
            return False
        sequence.num_expected_cached = None
        return self.policy.is_late(sequence, self._num_uncomputed(sequence), now_s)

    def _refusal(self, new: Sequence, now_s: float) -> Refusal | None:
        """Returns the reason why the policy refuses a sequence that waits or is about to; None if it may wait.

        The policy looks at the first MAX_FORECAST prompts that are not computed yet. Those between them and the new one
        are counted as one entry, as long each as the others: thousands may wait, and each costs microseconds.
        """
        if new.targets == NO_TARGETS and not any(
            other.targets != NO_TARGETS for other in chain(self.running, islice(self.waiting, MAX_FORECAST))
        ):
            return None
        uncomputed = (
            self.policy.pending(other, num_tokens, is_running=not other.is_in_line)
            for other in merge(self.running, self.waiting, key=_order)
            if other is not new and (num_tokens := self._num_uncomputed(other))
        )
        pending = list(islice(uncomputed, MAX_FORECAST))
        if len(pending) == MAX_FORECAST and pending[-1].order < new.order:
            last = pending[-1].order
            more = bisect_left(self.waiting, new.order, key=_order) - bisect_right(self.waiting, last, key=_order)
            if more > 0:
                mean = sum(entry.num_tokens for entry in pending) // MAX_FORECAST
                pending.append(Pending((*last, 0), more * mean, inf, count=more))
        return self.policy.admission(new, self._num_uncomputed(new), pending, self.running, now_s)

    def _plan_prefills(self, plan: PassPlan) -> None:
        """Plans the next chunks of running sequences, in order."""
        for sequence in plan.prefills:
            if not plan.token_budget or sequence.state is not State.RUNNING:  # preempted for a beam before it
                continue
            if sequence.group is None:
                self._plan_chunk(plan, sequence)
            elif self._grow_to_prefill(plan, sequence):
                self.kv_cache.copy_forked_page(plan.step, sequence)
                if sequence.num_computed + 1 == sequence.num_prefill > sequence.num_prompt:
                    plan.add(sequence, beam_row(sequence))
                else:
                    self._plan_chunk(plan, sequence)

    def _plan_admissions(self, plan: PassPlan) -> None:
        """Admits waiting sequences in order. At most `MAX_OVERTAKEN` overtake one that lacks pages: long ones would
        starve.

        A sequence that waits for pages that other engines pin is overtaken: those pages come back whatever runs here.
        """
        if self.waiting and self.slots.are_all_kept_out:
            plan.step.kept_out.append(self.waiting[0])
        index, overtaken = 0, list[Sequence]()
        while plan.token_budget and self.slots.num_free and index < len(self.waiting) and index < MAX_SKIPPED:
            if len(self.running) >= plan.max_running:
                return
            sequence = self.waiting[index]
            if overtaken and sequence.order[0] != overtaken[0].order[0]:
                return
            if self._was_refused(sequence):
                overtaken.append(sequence)
                if not self._may_be_overtaken(sequence):
                    return
                index += 1
                continue
            hit = self._computed_blocks(sequence)
            if self._will_hit_more(plan, sequence, hit):
                index += 1
                continue
            match = self._match_tiers(sequence, hit)
            writes_beside = match.is_load or sequence.kv_source is not None
            if match.is_awaited or (writes_beside and self.kv_cache.is_swapping_out):
                index += 1
            elif self._allocate(plan.step, sequence, hit if match.hit is None else match.hit):
                del self.waiting[index]
                self._start(plan, sequence, match)
                for earlier in overtaken:
                    earlier.num_overtaken += 1
                if not all(map(self._may_be_overtaken, overtaken)):
                    return
            elif not self.kv_cache.fits_beside_pins(sequence):
                plan.step.kept_out.append(sequence)
                index += 1
            else:
                sequence.refused_with = self.kv_cache.num_free_pages, len(self.running)

    def _may_be_overtaken(self, sequence: Sequence) -> bool:
        """True if a later sequence of its priority may take the pages that are too few for this one.

        Not without tiers, for what is evicted then has to be computed again; not where targets are predicted by the
        order; and not after a preemption, which shows that those that run need all pages.
        """
        may_evict = self.tiers.is_present and not self.policy.has_targets
        return may_evict and sequence.num_cached is None and sequence.num_overtaken < MAX_OVERTAKEN

    def _grow(self, plan: PassPlan, sequence: Sequence) -> bool:
        """Adds a page, preempting the policy's victim if none is free. Returns False if the sequence has to sit out."""
        while not self.kv_cache.append_page(sequence):
            if not self._preempt_for(plan, sequence):
                return False
        return True

    def _preempt_for(self, plan: PassPlan, sequence: Sequence) -> bool:
        """Preempts the policy's victim for a sequence that lacks a page. Returns False if the sequence has to sit out.

        The victim is the sequence itself or one after it, so that no decode row planned before is lost.
        """
        if self._compacting or any(other.is_leaving for other in self.running):
            return False  # pages come with the next commit
        candidates = self.running[bisect_left(self.running, sequence.order, key=_order) :]
        self.leave(self.policy.victim(candidates, plan.now_s), State.PREEMPTED)
        return sequence.state is State.RUNNING  # else it was the victim, or of its group

    def _allocate_to_compact(self, plan: PassPlan, sequence: Sequence) -> bool:
        """Allocates pages for the tokens that a sequence keeps. Returns False if it has to sit out."""
        while not self.kv_cache.begin_compaction(sequence):
            if not self._preempt_for(plan, sequence):
                return False
        return True

    @staticmethod
    def _compaction(plan: PassPlan, sequence: Sequence) -> Compaction:
        """Returns the compaction at the end of a planned row, for which pages are allocated."""
        assert sequence.kv_policy is not None
        plan.step.compacting.append(sequence)
        return Compaction(sequence.kv_policy.name, sequence.kv_policy.budget, sequence.target_pages)

    def _grow_to_prefill(self, plan: PassPlan, sequence: Sequence) -> bool:
        """Allocates pages for the next chunk of a group's member. Returns False if it sits this pass out."""
        while len(sequence.pages) * self.kv_cache.page_size < sequence.num_prefill:
            if not self._grow(plan, sequence):
                return False
        return True

    def _plan_chunk(self, plan: PassPlan, sequence: Sequence) -> None:
        """Plans the next chunk of a prefill, unless there is no room for tokens up to the next multiple of the
        alignment.
        """
        start = sequence.num_computed
        count = min(sequence.num_prefill - start, plan.token_budget, self._chunk_limit)
        if sequence.kv_policy is not None:
            count = self._before_compaction(plan, sequence, count)
            if not count:
                return
        if sequence.images:
            count = self.encoder_cache.most_tokens(plan.step.batch, sequence, count)
            if not count:
                return
        if self._chunk_alignment > 1 and start + count != sequence.next_compaction:
            count = self._aligned(sequence, count, is_alone=not plan.step.batch.rows)
            if not count:
                return
        if start < sequence.num_prompt_reported:
            count = min(
                count, sequence.num_prompt_reported - start
            )  # prompt log probabilities of the rest are not known
        while not self.kv_cache.allocate_chunk(sequence, start + count):
            if not self._preempt_for(plan, sequence):
                return
        is_compacted = start + count == sequence.next_compaction
        if is_compacted and not self._allocate_to_compact(plan, sequence):
            return
        if self.kv_cache.is_caching and not sequence.num_evicted:
            plan.filled_blocks.add(sequence, start)
        row = chunk_row(sequence, count)
        if is_compacted:
            row.compaction = self._compaction(plan, sequence)
        if sequence.images:
            self.encoder_cache.take(plan.step.batch, row, sequence.images)
        plan.add(sequence, row)

    def _before_compaction(self, plan: PassPlan, sequence: Sequence, count: int) -> int:
        """Returns how many of the next `count` tokens a chunk may have before the sequence's next compaction.

        The tokens that are observed there come together, though a pass that keeps latency targets has room for fewer.
        """
        policy, start, end = sequence.kv_policy, sequence.num_computed, sequence.next_compaction
        assert policy is not None
        num_left = end - start
        if count < num_left <= policy.longest_observed and num_left <= self._token_budget - plan.step.batch.num_tokens:
            return num_left
        return chunk_before_compaction(policy, start, count, end)

    def _aligned(self, sequence: Sequence, count: int, *, is_alone: bool) -> int:
        """Returns how many of the next `count` tokens make an aligned chunk. One that is alone in its pass is never
        empty, whatever its alignment.
        """
        end = sequence.num_computed + count
        too_many = end % self._chunk_alignment if end < sequence.num_prefill else 0
        if too_many < count:
            return count - too_many
        return count if is_alone else 0

    def _computed_blocks(self, sequence: Sequence) -> Hit:
        """Returns the cached prefix from which a waiting sequence continues.

        One that is to be received is received in whole pages. The transfer is cancelled if all but less than a page is
        cached: computing the rest is faster.
        """
        hit = self.kv_cache.get_computed_blocks(sequence)
        if sequence.kv_source is None:
            return hit
        whole = hit.without_tail(self.kv_cache.page_size)
        if len(sequence.token_ids) - whole.num_tokens > self.kv_cache.page_size:
            return whole
        sequence.kv_source = None
        return hit

    def _match_tiers(self, sequence: Sequence, hit: Hit) -> TierMatch:
        """Returns the cached blocks of lower tiers that a waiting sequence loads, unless it has a source already."""
        if sequence.kv_source is not None or sequence.state is State.SWAPPED:
            return NO_MATCH
        return self.tiers.match(sequence, hit)

    def _will_hit_more(self, plan: PassPlan, sequence: Sequence, hit: Hit) -> bool:
        """True if the sequence will hit more blocks soon, as another one computes or receives them."""
        if sequence.state is State.SWAPPED:
            return False
        is_awaited = sequence.kv_source is not None and self._is_being_received(sequence)
        return is_awaited or plan.filled_blocks.will_serve(sequence, hit)

    def _is_being_received(self, sequence: Sequence) -> bool:
        """True if another sequence with the same prompt receives all of its blocks, so that it will hit them soon."""
        num_tokens = len(sequence.token_ids) // BLOCK_SIZE_TOKENS * BLOCK_SIZE_TOKENS
        if not self.kv_cache.is_caching or not num_tokens or not sequence.may_hit:
            return False
        # Tokens, not their keys: those are hashed while they are on their way.
        return any(
            other.state is State.RECEIVING
            and other.root == sequence.root
            and other.token_ids[:num_tokens] == sequence.token_ids[:num_tokens]
            for other in self.receiving
        )

    def _was_refused(self, sequence: Sequence) -> bool:
        """True if it lacked pages before and nothing has improved since: saves a prefix lookup in every step."""
        if sequence.refused_with is None:
            return False
        num_free, num_running = sequence.refused_with
        return self.kv_cache.num_free_pages <= num_free and len(self.running) == num_running

    def _allocate(self, step: Step, sequence: Sequence, hit: Hit) -> bool:
        """Allocates slots and pages for all known tokens and the next one. Returns False if too few are free.

        It leaves free pages for sixteen more tokens of each running sequence. Without them the newcomer would be
        preempted a few steps later, and its prefill would have been for nothing.
        """
        if sequence.num_slots > self.slots.num_free:
            return False
        is_first = sequence.num_cached is None
        headroom = len(self.running) * BLOCK_SIZE_TOKENS
        if not self.kv_cache.allocate_slots(step, sequence, hit, num_headroom_tokens=headroom):
            return False
        sequence.slot = self.slots.allocate()
        if sequence.group is not None:
            sequence.group.free_slots = [self.slots.allocate() for _ in range(sequence.num_slots - 1)]
            sequence.group.order = sequence.group.order or sequence.order
        sequence.num_prefill = len(sequence.token_ids)
        sequence.state = State.RUNNING
        sequence.refused_with, sequence.kept_out_s = None, None
        if is_first:
            step.admitted.append(sequence)
        return True

    def _start(self, plan: PassPlan, sequence: Sequence, match: TierMatch) -> None:
        """Plans the first chunk of an admitted sequence, or has its keys and values loaded or received."""
        if match.is_load:
            self._start_loading(plan, sequence, match)
        elif sequence.kv_source is None:
            insort(self.running, sequence, key=_order)
            self._plan_chunk(plan, sequence)
        else:
            sequence.state = State.RECEIVING
            insort(self.receiving, sequence, key=_order)
            plan.step.receiving.append(sequence)

    def _start_loading(self, plan: PassPlan, sequence: Sequence, match: TierMatch) -> None:
        """Has the pages of a match loaded, with the pass of the first chunk behind them or before it."""
        self.kv_cache.allocate_to_load(sequence, match.num_pages)
        num_tokens = len(match.pages) * self.kv_cache.page_size
        if match.places:  # of all KV groups, some of which have more tokens on the device than others
            num_tokens = match.num_pages * self.kv_cache.page_size - sequence.num_computed
        num_left = len(sequence.token_ids) - sequence.num_computed - num_tokens
        num_in_pass = plan.step.batch.num_tokens + min(num_left, plan.token_budget, self._chunk_limit)
        first_pass = FirstPass(num_in_pass, len(self.running), len(self.waiting))
        load = self.tiers.load_layerwise(sequence, match, first_pass, is_first=sequence in plan.step.admitted)
        if load is not None:
            if self._plan_behind(plan, sequence, num_tokens):
                self.kv_cache.expect_load(plan.step, sequence)
                plan.step.batch.layerwise_loads.append(load)
                return
            self.tiers.take_before_pass(sequence)
        sequence.state = State.LOADING
        insort(self.receiving, sequence, key=_order)
        if load is None:
            plan.step.loading.append((sequence, match))

    def _plan_behind(self, plan: PassPlan, sequence: Sequence, num_tokens: int) -> bool:
        """Plans the chunk behind the next `num_tokens` tokens, which are being loaded. Returns False if the pass has no
        room for it.
        """
        num_rows = len(plan.step.sequences)
        sequence.num_computed += num_tokens
        insort(self.running, sequence, key=_order)
        self._plan_chunk(plan, sequence)
        if len(plan.step.sequences) > num_rows:
            return True
        sequence.num_computed -= num_tokens
        _remove(self.running, sequence)
        return False

    @property
    def lacks_keys(self) -> bool:
        """True if keys of prompts in transfer can be hashed meanwhile."""
        return self.kv_cache.is_caching and any(sequence.lacks_keys for sequence in self.receiving)

    def _hash_ahead(self) -> None:
        """Hashes some keys of prompts in transfer in each step: all at once they would delay others' next tokens."""
        if not self.kv_cache.is_caching:
            return
        receiving = next((sequence for sequence in self.receiving if sequence.lacks_keys), None)
        if receiving is not None:
            receiving.add_keys(HASHED_AHEAD)


def _remove(ordered: list[Sequence], sequence: Sequence) -> None:
    del ordered[bisect_left(ordered, sequence.order, key=_order)]
