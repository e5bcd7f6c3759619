"""Manages pages and checkpoints where some layers have a recurrent state, such as Mamba's or a gated delta net's.

The state of a running sequence is at its slot in the runner, begins as zeros with its first token and ends with it. A
preempted sequence is recomputed, or its state is swapped to main memory with its pages. A prefix is hit where the
attention layers have all of its pages and there is a checkpoint of the state after it; what is missing of both may be
loaded from a lower tier. Passes run in the order of their
launch: a checkpoint that a launched pass reads may be overwritten by a later one.

Checkpoints are taken at the last whole page of a prompt and at the ends of its chunks, at the last whole page that a
running sequence has computed, and where a prompt leaves a cached one: prompts that share a beginning, such as a system
prompt, part there, and the next will do so too (Pan et al. 2024, Marconi, arXiv 2411.19379).
"""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from mini_infer_contract.blocks import BLOCK_SIZE_TOKENS, block_keys
from mini_infer_engine.core.batch import NO_SWAP, Row, StateSwap, SwapSpace
from mini_infer_engine.core.kv_cache_manager import KVCacheManager
from mini_infer_engine.core.page_allocator import PageAllocator
from mini_infer_engine.core.prefix_cache import MISS, Hit
from mini_infer_engine.core.sequence import Sequence
from mini_infer_engine.core.state_checkpoints import StateCheckpoints
from mini_infer_engine.core.step import Step


@dataclass(slots=True)
class _SequenceState:
    """The checkpoints that one sequence uses."""

    source: int | None = None
    """The checkpoint from which its next row resumes."""
    num_shared: int = 0
    """Tokens at its beginning whose pages were cached when it was admitted."""
    written: list[tuple[int, int]] = field(default_factory=list)
    """The number of blocks and the slot of each checkpoint that launched passes write, and that has no key yet."""
    newest: bytes | None = None
    """The key of the last checkpoint that was taken while it decoded: the next one replaces it."""
    host_state: int | None = None
    """The state in main memory that is copied to its slot before its next row."""
    retained: int | None = None
    """The checkpoint of the state before the last token of a prompt that another engine will read."""


class RecurrentKVCacheManager(KVCacheManager):
    """A `KVCacheManager` of one KV group with pages, beside layers with a recurrent state."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_checkpoints: int,
        *,
        enable_caching: bool = True,
        record_events: bool = True,
        swap_space: SwapSpace = NO_SWAP,
        drafts: bool = False,
    ) -> None:
        """Creates a pool of free pages and of unused checkpoints. Without checkpoints no prefix can be resumed, and
        nothing is cached.

        With `drafts`, decode rows take no checkpoints: only the runner knows where they begin.
        """
        enable_caching = enable_caching and num_checkpoints > 0
        super().__init__(
            num_pages,
            page_size,
            enable_caching=enable_caching,
            record_events=record_events,
            swap_space=swap_space,
        )
        self.host_states = PageAllocator(swap_space.num_states, BLOCK_SIZE_TOKENS)
        """Room for states of preempted sequences in main memory."""
        self._drafts = drafts
        self._swapped_states: dict[Sequence, int] = {}
        """The states of swapped sequences, by their place in main memory."""
        self._states_out: list[StateSwap] = []
        """States that the next launched pass copies out before it computes."""
        self.checkpoints = StateCheckpoints(num_checkpoints)
        self._blocks_per_page = page_size // BLOCK_SIZE_TOKENS
        self._states: dict[Sequence, _SequenceState] = {}

    def get_computed_blocks(self, sequence: Sequence) -> Hit:
        """Returns the longest cached prefix of a waiting sequence after which there is a checkpoint."""
        hit = super().get_computed_blocks(sequence)
        num_blocks = hit.num_tokens // BLOCK_SIZE_TOKENS
        count = self.checkpoints.longest(sequence.keys, num_blocks, self._blocks_per_page) if num_blocks else 0
        return Hit(count * BLOCK_SIZE_TOKENS, hit.pages[: count // self._blocks_per_page], None) if count else MISS

    def num_expected_cached(self, sequence: Sequence) -> int:
        """Returns the known tokens from which a waiting sequence should resume, looked up once."""
        if sequence.num_expected_cached is None:
            sequence.num_expected_cached = self.get_computed_blocks(sequence).num_tokens
        return sequence.num_expected_cached

    def allocate_slots(self, step: Step, sequence: Sequence, hit: Hit, *, num_headroom_tokens: int) -> bool:
        """Allocates pages for a waiting sequence, and retains the checkpoint from which it resumes, unless that is yet
        to be loaded.
        """
        num_shared = super().get_computed_blocks(sequence).num_tokens
        host_state = self._swapped_states.get(sequence)
        if not super().allocate_slots(step, sequence, hit, num_headroom_tokens=num_headroom_tokens):
            return False
        key = sequence.key(hit.num_tokens // BLOCK_SIZE_TOKENS - 1) if hit.pages else b""
        source = self.checkpoints.acquire(key) if key in self.checkpoints else None
        num_shared -= num_shared % self.page_size
        self._states[sequence] = _SequenceState(source, num_shared, host_state=host_state)
        return True

    def complete(self, step: Step) -> None:
        """Adds the checkpoints that rows read and write to the rows of a pass that will be launched."""
        super().complete(step)
        transfers = step.batch.transfers
        transfers.states_out, self._states_out = self._states_out, []
        read = []  # they are released after the last row: none of this pass's rows may write to them
        for row, sequence in zip(step.batch.rows, step.sequences, strict=True):
            state = self._states[sequence]
            if state.source is not None:
                row.state_source = state.source
                read.append(state.source)
                if sequence.request.retains_kv and row.start == sequence.num_prefill - 1:
                    state.retained = self.checkpoints.share(state.source)
                state.source = None
            if state.host_state is not None:
                transfers.states_in.append(StateSwap(row.slot, state.host_state))
                self._expect_proof(step, sequence, 1)
                self.host_states.release(state.host_state)  # nothing is written there before this pass has read it
                state.host_state = None
            if self.is_caching:
                row.checkpoints = tuple(self._reserve(row, sequence, state))
        for slot in read:
            self.checkpoints.release(slot)

    def _reserve(self, row: Row, sequence: Sequence, state: _SequenceState) -> Iterator[tuple[int, int]]:
        """Yields the number of tokens of the row after which a state is kept, and the slot for it."""
        if self._drafts and row.token_ids is None:
            return
        end = row.start + row.count
        last = end if row.token_ids is None else min(end, sequence.num_prefill - 1)  # the last one is computed anyway
        for boundary in sorted({min(state.num_shared, last), last - last % self.page_size}):
            if not row.start < boundary or boundary % self.page_size:
                continue
            num_blocks = boundary // BLOCK_SIZE_TOKENS
            if row.token_ids is not None and (key := sequence.key(num_blocks - 1)) in self.checkpoints:
                self.checkpoints.touch(key)
            elif (slot := self.checkpoints.reserve()) is not None:
                state.written.append((num_blocks, slot))
                if sequence.request.retains_kv and boundary == sequence.num_prefill - 1:
                    state.retained = self.checkpoints.share(slot)
                yield boundary - row.start, slot
        before_last = sequence.num_prefill - 1
        is_missing = sequence.request.retains_kv and state.retained is None
        if is_missing and row.start < before_last <= end and (slot := self.checkpoints.reserve()) is not None:
            state.retained = slot
            yield before_last - row.start, slot

    def cache_blocks(self, sequence: Sequence) -> None:
        """Publishes the blocks of known tokens that launched passes compute, and the checkpoints after them."""
        super().cache_blocks(sequence)
        state = self._states.get(sequence)
        if sequence in self._unproved or state is None or not state.written:
            return
        num_known = min(sequence.num_computed, len(sequence.token_ids)) // BLOCK_SIZE_TOKENS
        known = [entry for entry in state.written if entry[0] <= num_known]
        for num_blocks, slot in known:
            key = sequence.key(num_blocks - 1)
            is_new = self.checkpoints.publish(slot, key)
            if is_new and num_blocks * BLOCK_SIZE_TOKENS > sequence.num_prefill:
                if state.newest is not None:
                    self.checkpoints.forget(state.newest)
                state.newest = key
        state.written = state.written[len(known) :]

    def free(self, sequence: Sequence) -> None:
        """Frees the pages of a sequence, and the checkpoints that it has not used or published."""
        super().free(sequence)
        state = self._states.pop(sequence, None)
        if state is not None:
            for slot in [slot for _, slot in state.written] + ([] if state.source is None else [state.source]):
                self.checkpoints.release(slot)
            if state.host_state is not None:
                self.host_states.release(state.host_state)
            if state.retained is not None:
                self.checkpoints.release(state.retained)

    # States that transfers to and from other engines use, or loads of lower tiers.

    @property
    def state_checkpoints(self) -> StateCheckpoints:
        """The checkpoints of recurrent state."""
        return self.checkpoints

    def resume_after_load(self, sequence: Sequence, checkpoint: int) -> None:
        """Has a sequence go on from a state that was loaded, which others can hit from now on, too."""
        state = self._states[sequence]
        if state.source is not None:
            self.checkpoints.release(state.source)
        state.source = self.checkpoints.share(checkpoint)
        self.checkpoints.publish(checkpoint, sequence.key(sequence.num_computed // BLOCK_SIZE_TOKENS - 1))

    def received(self, sequence: Sequence) -> None:
        """Has a sequence go on from the state at its slot, instead of a checkpoint of its own."""
        state = self._states[sequence]
        if state.source is not None:
            self.checkpoints.release(state.source)
            state.source = None

    def take_retained_state(self, sequence: Sequence) -> int | None:
        """Returns the checkpoint before the last token of a prompt, whose user the caller is from now on."""
        state = self._states[sequence]
        checkpoint, state.retained = state.retained, None
        return checkpoint

    def longest_cached(self, token_ids: Items[int], root: bytes) -> tuple[list[int], int]:
        """Returns the pages of the longest cached prefix after which there is a checkpoint, less than all tokens."""
        pages, num_tokens = super().longest_cached(token_ids, root)
        num_blocks = min(num_tokens, len(token_ids) - 1) // BLOCK_SIZE_TOKENS
        count = self.checkpoints.longest(block_keys(token_ids, root), num_blocks, self._blocks_per_page)
        return pages[: count // self._blocks_per_page], count * BLOCK_SIZE_TOKENS

    def pin_cached_state(self, token_ids: Items[int], root: bytes, num_tokens: int) -> int | None:
        """Returns the checkpoint after a prefix of whole pages, which is not evicted before `unpin_state`."""
        keys = block_keys(token_ids[:num_tokens], root)
        return self.checkpoints.acquire(keys[-1]) if keys and keys[-1] in self.checkpoints else None

    def unpin_state(self, checkpoint: int) -> None:
        """Ends the use of a checkpoint by a transfer."""
        self.checkpoints.release(checkpoint)

    # States in main memory.

    def swap_out(self, sequence: Sequence) -> bool:
        """Has the next pass copy pages and state of a sequence to main memory, if there is room and recomputing would
        cost more. Returns False if it does not.
        """
        state = self._states[sequence]
        has_state = state.source is None and state.host_state is None  # at its slot: a row of it was launched
        if not has_state or not self.host_states.num_free or not super().swap_out(sequence):
            return False
        host_state = self._swapped_states[sequence] = self.host_states.allocate()
        self._states_out.append(StateSwap(sequence.slot, host_state))
        return True

    def _swap_in(self, step: Step, sequence: Sequence) -> None:
        del self._swapped_states[sequence]  # the state is copied by the pass with the sequence's next row
        super()._swap_in(step, sequence)

    def free_host_pages(self, sequence: Sequence) -> None:
        """Frees the main memory of a sequence, and that of its state unless that is still to be copied."""
        super().free_host_pages(sequence)
        if (host_state := self._swapped_states.pop(sequence, None)) is not None:
            self.host_states.release(host_state)

    def reset_prefix_cache(self) -> None:
        """Forgets all cached blocks and checkpoints."""
        super().reset_prefix_cache()
        self.checkpoints.clear()
