"""A runner without a model whose next token is a hash of everything that it reads back from its own KV pages.

A cell holds a hash of its token and of the cell before it, as attention makes a token's KV depend on all before it. So
a wrong page table, copy, start or slot, or a page given away too early, shows as a wrong token or as an error here.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from mini_infer_engine.config.model.kv_groups import UNIFORM, KVCacheConfig
from mini_infer_engine.config.options.kv_policies import NUM_SINKS, KVPolicy, kv_policy
from mini_infer_engine.core.batch import Batch, Compaction, PageSwap, Row, SwapSpace, TokenMasks
from mini_infer_engine.core.beam_search.group import rules_of
from mini_infer_engine.core.beam_search.search import BeamState, advance
from mini_infer_engine.core.kv_eviction import next_compaction
from mini_infer_engine.core.request import Request, SamplingParams, TokenLogprobs
from mini_infer_engine.core.result import PassResult
from tests.support.fake_tiers import NUM_LAYERS, FakeDisk, FakeHostMemory, FakeLayerwiseLoad

VOCABULARY = 40
EOS = 0


def sample(
    cells: Sequence[int], sampling: SamplingParams, noise_seed: int, output_index: int, suppressed: Sequence[int]
) -> int:
    """The next token: greedy depends on the cells alone, otherwise on the seed and the index too."""
    noise = (noise_seed, output_index) if sampling.temperature else ()
    token = hash((tuple(cells), noise)) % VOCABULARY
    while token in suppressed:
        token = (token + 1) % VOCABULARY
    return token


def most_likely(cells: Sequence[int], count: int) -> TokenLogprobs:
    """What may follow, by log probabilities that are hashes of all cells, as `sample` is."""
    read = hash(tuple(cells))
    costs = [hash((read, token)) % 9973 for token in range(VOCABULARY)]
    ranked = sorted(range(VOCABULARY), key=costs.__getitem__)
    logprobs = [-0.001 - costs[token] / 1000 for token in ranked]
    end = None if count < 0 else count
    return TokenLogprobs(ranked[0], logprobs[0], 1, ranked[:end], logprobs[:end])


def expected_beams(request: Request, max_model_len: int, window: int | None = None) -> list[list[int]]:
    """What a beam search yields when it runs alone, the best first: by the same rules, with no pages and no batches."""
    num_prompt, limit = len(request.prompt_token_ids), request.sampling.max_tokens or max_model_len
    stops = frozenset([*request.sampling.stop_token_ids, *(() if request.sampling.ignore_eos else (EOS,))])
    rules = rules_of(request, stops, min(limit, max_model_len - num_prompt))
    assert rules is not None
    state = BeamState()
    while not state.is_over:
        histories = [[*request.prompt_token_ids, *beam.token_ids()] for beam in state.running]
        expected_logprobs = [most_likely(_seen(_cells(tokens), window), rules.num_candidates) for tokens in histories]
        state = advance(state, expected_logprobs, rules)
    return [beam.token_ids() for beam in state.finished]


def kept_cells(policy: KVPolicy, cells: list[int]) -> list[int]:
    """What a policy keeps: StreamingLLM's tokens, or for others some that only their cells determine."""
    if policy.name == "streaming-llm":
        return cells[:NUM_SINKS] + cells[NUM_SINKS - policy.budget :]
    before = range(len(cells) - policy.num_observed)
    chosen = sorted(sorted(before, key=cells.__getitem__)[: policy.budget - policy.num_observed])
    return [cells[index] for index in chosen] + cells[-policy.num_observed :]


def _cells(tokens: Sequence[int]) -> list[int]:
    cells: list[int] = []
    for token in tokens:
        cells.append(cell(cells[-1] if cells else 0, token))
    return cells


def _seen(cells: list[int], window: int | None) -> list[int]:
    return cells if window is None else cells[-window:]


def cell(before: int, token: int) -> int:
    return hash((before, token))


def expected_tokens(
    request: Request, max_model_len: int, eos_token_ids: Sequence[int] = (EOS,), window: int | None = None
) -> list[int]:
    """What a request yields when it runs alone: computed directly, with no pages and no batches."""
    sampling = request.sampling
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}
    cells = _cells(request.prompt_token_ids)
    limit = max_model_len - len(request.prompt_token_ids)
    limit = min(limit, sampling.max_tokens) if sampling.max_tokens is not None else limit
    output: list[int] = []
    policy = kv_policy(sampling.kv_policy or "full", sampling.kv_budget)
    num_prompt = len(request.prompt_token_ids)
    next_end = next_compaction(policy, num_prompt, 0, 0)
    while len(output) < limit:
        suppressed = stops if len(output) < sampling.min_tokens else ()
        seen = _seen(cells, window)
        output.append(sample(seen, sampling, request.noise_seed, len(output), tuple(suppressed)))
        if output[-1] in stops:
            break
        num_computed = num_prompt + len(output) - 1
        if num_computed == next_end and policy is not None:
            cells = kept_cells(policy, cells)
            next_end = next_compaction(policy, num_prompt, num_computed, num_computed - policy.budget)
        cells.append(cell(cells[-1], output[-1]))
    return output


@dataclass(eq=False)
class Handle:
    tokens: list[tuple[int, ...]]
    """Empty before they are sampled."""
    logprobs: dict[int, list[TokenLogprobs]]
    sources: list[int]
    written: list[tuple[int, int]] = field(default_factory=list)
    """(page, offset) of what the pass computed."""
    checkpoints: list[int] = field(default_factory=list)
    """Checkpoints of recurrent state that the pass wrote."""
    rows: list[Row] = field(default_factory=list)
    swap_faults: list[int] = field(default_factory=list)
    swap_out: list[PageSwap] = field(default_factory=list)


class FakeRunner:
    """Runs each batch at launch, as a device with one queue would, and shows the tokens only when they are collected.

    With `references` (the pool's) it also checks that a page it writes belongs to one sequence alone. It fails when
    told to: in the middle of a launch, or at a collect, after which nothing that uncollected passes wrote may be read.

    Every KV group has cells of its own in each row's pages. It reads those that a chunk's tokens see, and checks that
    they are of the same tokens; the next token follows from what the last token sees in the first group.

    It guesses where it is asked to, right and wrong, and checks then that it was told all tokens before.

    With a group of recurrent state, a slot's state is the cell of the last token that it has seen: it must be that of
    the token before each row, whether it was kept at the slot or comes from a checkpoint.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        max_num_seqs: int = 256,
        num_host_pages: int = 0,
        max_speculative_rows: int = 0,
        num_stages: int = 1,
        kv_cache: KVCacheConfig = UNIFORM,
        num_tier_pages: tuple[int, int] = (0, 0),
        loads_by_layer: bool = False,
        draw: random.Random | None = None,
    ) -> None:
        self.kv_cache = kv_cache
        self._num_stages = num_stages
        self.max_speculative_rows = max_speculative_rows
        self._lengths = [0] * max_num_seqs
        self._output_indexes = [0] * max_num_seqs
        self._histories: list[list[int]] = [[] for _ in range(max_num_seqs)]
        """Of each slot: the tokens that whatever guesses knows."""
        self.num_pages = num_pages
        can_evict = kv_cache.is_uniform and kv_cache.state_group is None and num_stages == 1
        self.eviction_obstacle = None if can_evict else "this runner has other caches"
        num_host_states = 2 if num_host_pages and kv_cache.state_group is not None else 0
        self.swap_space = SwapSpace(
            num_host_pages, swap_s_per_token=1.0, compute_s_per_token=3.0, num_states=num_host_states
        )
        self._host_states: list[int | None] = [None] * num_host_states
        self._host_cells: list[list[int | None]] = [[None] * page_size for _ in range(num_host_pages)]
        self.page_size = page_size
        self.references: list[int] | None = None
        self.batches: list[Batch] = []
        self.num_swap_flips = self.num_state_flips = 0
        """Pages and states that come back from main memory with other contents next."""
        self.void_slots: set[int] = set()
        """Slots whose state is not that of their tokens."""
        self.void_pages: set[int] = set()
        """Pages that came back with other contents, until they are written from their begin."""
        self.launch_error: Exception | None = None
        """Raised once, by the next launch."""
        self.collect_error: Exception | None = None
        """Raised once, by the next collect."""
        self.sample_error: Exception | None = None
        """Raised once, by the next sampling with masks."""
        self._cells: list[list[int | None]] = [[None] * page_size for _ in range(num_pages + 1)]
        """Those of the pages, and of the null page, which nobody may write or read."""
        self.host_memory: FakeHostMemory | None = None
        self.disk_memory: FakeDisk | None = None
        num_in_memory, num_on_disk = num_tier_pages
        if num_in_memory:
            self.host_memory = FakeHostMemory(self._cells, num_in_memory, draw or random.Random(0))
            self.host_memory.loads_by_layer = loads_by_layer
            self.host_memory.void_pages = self.void_pages
            self.host_memory.pages_per_state = 0 if kv_cache.state_group is None else 2
            if num_on_disk:
                self.disk_memory = FakeDisk(self.host_memory, num_on_disk, self.host_memory.draw)
        self._last_token: list[int | None] = [None] * max_num_seqs
        self._newest = [0] * max_num_seqs
        """Of each slot: the token that its last decode row began with."""
        self._in_flight: list[Handle] = []
        self._states: list[int | None] = [None] * max_num_seqs
        self._checkpoints: list[int | None] = [None] * kv_cache.num_checkpoints
        if self.host_memory is not None:
            self.host_memory.checkpoints = self._checkpoints
        self.num_resumed = 0
        """Rows that have resumed from a checkpoint."""

    def launch(self, batch: Batch) -> Handle:
        assert batch.rows, "an empty batch"
        assert len({row.slot for row in batch.rows}) == len(batch.rows), "two rows of one slot"
        handle = Handle([], {}, [copy.source for copy in batch.transfers.copies])
        self._check_turns(batch)
        self._in_flight.append(handle)
        self._check_pages(batch)
        self._check_checkpoints(batch)
        handle.checkpoints = [checkpoint for row in batch.rows for _, checkpoint in row.checkpoints]
        handle.swap_out = batch.transfers.swap_out
        for swap in batch.transfers.swap_out:
            self._host_cells[swap.host_page] = list(self._cells[swap.device_page])
        for place, swap in enumerate(batch.transfers.swap_in):
            self._cells[swap.device_page] = list(self._host_cells[swap.host_page])
            self.void_pages.discard(swap.device_page)
            if self.num_swap_flips:
                self.num_swap_flips -= 1
                self._cells[swap.device_page] = [
                    None if cell is None else cell ^ 1 for cell in self._cells[swap.device_page]
                ]
                self.void_pages.add(swap.device_page)
                handle.swap_faults.append(place)
        for state in batch.transfers.states_out:
            self._host_states[state.host_state] = self._states[state.slot]
        for place, state in enumerate(batch.transfers.states_in, start=len(batch.transfers.swap_in)):
            self._states[state.slot] = self._host_states[state.host_state]
            if self.num_state_flips:
                self.num_state_flips -= 1
                self.void_slots.add(state.slot)
                handle.swap_faults.append(place)
        for copy in batch.transfers.copies:
            self._cells[copy.target] = self._cells[copy.source][: copy.tokens] + [None] * (self.page_size - copy.tokens)
        for load in batch.layerwise_loads:
            for layer in range(NUM_LAYERS):
                load.wait_for_layer(layer)
            if not isinstance(load, FakeLayerwiseLoad):  # one that could not begin
                self._fill_with_garbage(batch.rows[batch.num_decodes :])
        for chunk in batch.catch_up:
            assert chunk.token_ids is not None
            assert len(chunk.token_ids) == chunk.count
            del self._histories[chunk.slot][chunk.start :]
            assert len(self._histories[chunk.slot]) == chunk.start, "tokens were left out"
            self._histories[chunk.slot] += chunk.token_ids
        for index, row in enumerate(batch.rows):
            if index < batch.num_decodes:
                row = self._true_row(row, batch.num_drafts)
            if self.launch_error is not None and index == len(batch.rows) // 2:
                self._in_flight.pop()
                error, self.launch_error = self.launch_error, None
                raise error
            handle.written += self._write(row, is_decode=index < batch.num_decodes)
        self.batches.append(batch)
        handle.rows = [
            self._true_row(row, batch.num_drafts) if index < batch.num_decodes else row
            for index, row in enumerate(batch.rows)
        ]
        handle.logprobs = {
            index: [most_likely(self._cells_of(row), row.sampling.logprobs)]
            for index, row in enumerate(handle.rows)
            if row.sampling is not None and row.sampling.logprobs is not None
        }
        if not batch.waits_for_masks:
            self.sample(handle, None)
        return handle

    def _fill_with_garbage(self, rows: list[Row]) -> None:
        """Fills the cells before these rows that nothing was written to, as a device's memory always has something."""
        for row, table in [(one, table) for one in rows for table in _tables(one)]:
            self.void_pages.update(page for page in table if page != self.num_pages)
            for position in range(row.start):
                if (page := table[position // self.page_size]) != self.num_pages:
                    cells, offset = self._cells[page], position % self.page_size
                    cells[offset] = hash(position) if cells[offset] is None else cells[offset]

    def sample(self, handle: Handle, masks: TokenMasks | None) -> None:
        assert self._in_flight[-1] is handle, "a pass was launched before the one that waits for masks was sampled"
        assert not handle.tokens, "sampled twice"
        if masks is not None and self.sample_error is not None:
            error, self.sample_error = self.sample_error, None
            self._in_flight.pop()
            raise error
        by_row = {} if masks is None else dict(zip(masks.rows, masks.bits, strict=True))
        handle.tokens = [self._sample(row, by_row.get(index)) for index, row in enumerate(handle.rows)]
        for row in handle.rows:
            if row.compaction is not None:
                self._compact(row, row.compaction)
                handle.sources += row.page_table  # read by this pass, and so pinned

    def collect(self, handle: Handle) -> PassResult:
        assert self._in_flight[0] is handle, "collected out of order"
        if self.collect_error is not None:
            error, self.collect_error = self.collect_error, None
            for page, offset in [cell for unknown in self._in_flight for cell in unknown.written]:
                self._cells[page][offset] = None
            for checkpoint in [one for unknown in self._in_flight for one in unknown.checkpoints]:
                self._checkpoints[checkpoint] = None
            self._in_flight.pop(0)
            raise error
        self._in_flight.pop(0)
        return PassResult(list(handle.tokens), handle.logprobs, swap_faults=handle.swap_faults)

    def refuses(self, request: Request) -> str | None:
        if self.kv_cache.state_group is not None and request.beam_search is not None:
            return "use_beam_search: this runner has recurrent state"
        too_many = request.sampling.min_tokens and len(request.sampling.stop_token_ids) > VOCABULARY - 1
        return "min_tokens with so many stop_token_ids: no token is left" if too_many else None

    def _true_row(self, row: Row, num_drafts: int) -> Row:
        """A decode row as it is now that earlier guesses are known to be right or wrong; its first token alone."""
        assert row.count == 1 + (row.num_drafts or 0)
        length, index = self._lengths[row.slot], self._output_indexes[row.slot]
        assert length <= row.start
        assert index <= row.output_index
        reserved = row.start + 1 + (num_drafts if row.num_drafts is not None else 0)
        assert len(row.page_table) * self.page_size >= reserved, "no room for guesses"
        if not self.max_speculative_rows:
            assert (length, index) == (row.start, row.output_index)
        assert row.sampling is not None
        suppressed = row.suppressed_token_ids if index < row.sampling.min_tokens else ()
        return msgspec.structs.replace(row, start=length, output_index=index, count=1, suppressed_token_ids=suppressed)

    def _write(self, row: Row, is_decode: bool) -> list[tuple[int, int]]:
        """Which cells it wrote."""
        if is_decode:
            assert row.count == 1
            assert row.token_ids is None
            assert row.sampling is not None
            last = self._last_token[row.slot]
            assert last is not None, "a decode of a slot that never sampled"
            self._newest[row.slot] = last
            token_ids: Sequence[int] = [last]
        else:
            assert row.token_ids is not None
            token_ids = row.token_ids
            self._last_token[row.slot] = None
        assert len(token_ids) == row.count >= 1
        before = self._read(row, row.start - 1) if row.start else 0
        if self.kv_cache.state_group is not None:
            is_void = row.slot in self.void_slots and row.state_source is None and row.start > 0
            is_void = is_void or not self.void_pages.isdisjoint(row.page_table)
            assert is_void or self._state_before(row) == before, "a row goes on from another state"
            if not is_void:
                self.void_slots.discard(row.slot)
        written, checkpoints = [], dict(row.checkpoints)
        for position, token in enumerate(token_ids, start=row.start):
            before = cell(before, token)
            written += self._put(row, position, before)
            if (checkpoint := checkpoints.pop(position + 1 - row.start, None)) is not None:
                self._checkpoints[checkpoint] = before
        assert not checkpoints, "a checkpoint behind the last token"
        self._states[row.slot] = before
        return written

    def _state_before(self, row: Row) -> int | None:
        if not row.start:
            assert row.state_source is None
            return 0
        if row.state_source is None:
            return self._states[row.slot]
        self.num_resumed += 1
        return self._checkpoints[row.state_source]

    def _put(self, row: Row, position: int, value: int) -> list[tuple[int, int]]:
        """Which cells it wrote, one in each group."""
        written = []
        for group, table in enumerate(_tables(row)):
            page, offset = table[position // self.page_size], position % self.page_size
            assert page != self.num_pages, f"position {position} is written to the null page"
            self._cells[page][offset] = _in_group(group, value)
            if not offset:
                self.void_pages.discard(page)
            written.append((page, offset))
        return written

    def _read(self, row: Row, position: int, group: int = 0) -> int:
        value = self._cells[_tables(row)[group][position // self.page_size]][position % self.page_size]
        assert value is not None, f"read of position {position} in group {group}, which was never written"
        return value

    def _sample(self, row: Row, mask: np.ndarray | None = None) -> tuple[int, ...]:
        """The token of a row, and those after it as far as guesses were right."""
        if row.sampling is None:
            self._cells_of(row)
            return ()
        tokens: list[int] = []
        for drafts_left in range(row.num_drafts or 0, -1, -1):
            tokens.append(self._sample_one(row, mask))
            end, index = row.start + row.count, row.output_index + 1
            self._lengths[row.slot], self._output_indexes[row.slot] = end, index
            if row.num_drafts is not None:
                history = self._histories[row.slot]
                if len(tokens) == 1:  # the last token stands here since the pass before: only the device knows it
                    is_void = not self.void_pages.isdisjoint(row.page_table)
                    assert is_void or _cells(history[: row.start])[-1] == self._read(row, row.start - 1), (
                        "it was told other tokens"
                    )
                    del history[row.start :]
                    history.append(self._newest[row.slot])
                history.append(tokens[-1])
            if not drafts_left:
                break
            right = hash((row.slot, end, tokens[-1])) % 4 > 0
            guess = tokens[-1] if right else (tokens[-1] + 1) % VOCABULARY
            guessed = cell(self._read(row, end - 1), guess)
            self._put(row, end, guessed)
            if not right:
                break
            self._states[row.slot] = guessed
            suppressed = row.suppressed_token_ids if index < row.sampling.min_tokens else ()
            row = msgspec.structs.replace(row, start=end, output_index=index, count=1, suppressed_token_ids=suppressed)
        return tuple(tokens)

    def _compact(self, row: Row, compaction: Compaction) -> None:
        policy = KVPolicy(compaction.policy, compaction.num_kept)
        assert row.count >= min(policy.num_observed, row.start + row.count), "not all that is observed is in the pass"
        cells = [self._read(row, index) for index in range(row.start + row.count)]
        for index, value in enumerate(kept_cells(policy, cells)):
            page, offset = divmod(index, self.page_size)
            self._cells[compaction.pages[page]][offset] = value
        self._lengths[row.slot] = compaction.num_kept

    def _sample_one(self, row: Row, mask: np.ndarray | None) -> int:
        cells = self._cells_of(row)
        assert row.sampling is not None
        token = sample(cells, row.sampling, row.noise_seed, row.output_index, row.suppressed_token_ids)
        if mask is not None:
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            token = int(allowed[token % len(allowed)])
        self._last_token[row.slot] = token
        return token

    def _cells_of(self, row: Row) -> list[int]:
        end = row.start + row.count
        first, *others = (group.window for group in self.kv_cache.groups)
        own = {position: self._read(row, position) for position in _seen_from(row, first)}
        is_void = any(not self.void_pages.isdisjoint(table) for table in _tables(row))
        for number, window in enumerate(others, start=1):
            for position in _seen_from(row, window):
                value = self._read(row, position, number)
                if position in own:
                    is_right = is_void or value == _in_group(number, own[position])
                    assert is_right, f"{position} in group {number} is another token's"
        return [own[position] for position in range(0 if first is None else max(0, end - first), end)]

    def _check_turns(self, batch: Batch) -> None:
        """The token that a decode row goes on from is known, or was sampled as many passes ago as there are stages.

        Where stages would have nothing to do, it may be one that is on its way; no row is told its mask then.
        """
        behind = [handle for handle in self._in_flight if handle.rows][-self._num_stages + 1 or len(self._in_flight) :]
        sampled = [row.slot for handle in behind for row in handle.rows if row.sampling is not None]
        waiting = {row.slot for row in batch.rows[: batch.num_decodes]}.intersection(sampled)
        if not waiting:
            return
        assert len(self._in_flight) < self._num_stages, "a row waits for its token, and another pass behind it"
        assert max(map(sampled.count, waiting)) == 1, "two tokens before a row are unknown"
        assert not batch.waits_for_masks, "masks follow from a token that nobody knows yet"

    def _check_checkpoints(self, batch: Batch) -> None:
        """No checkpoint is written twice, or read by a row while another writes it."""
        written = [checkpoint for row in batch.rows for _, checkpoint in row.checkpoints]
        assert len(set(written)) == len(written)
        assert not {row.state_source for row in batch.rows}.intersection(written)
        assert self.kv_cache.state_group is not None or not written

    @staticmethod
    def _loaded_pages(batch: Batch) -> list[int]:
        loads = [load for load in batch.layerwise_loads if isinstance(load, FakeLayerwiseLoad)]
        return [move.target for load in loads for move in load.moves]

    def _check_pages(self, batch: Batch) -> None:
        """A written page is in nobody else's table, and copies run before the pass: no source is written before it."""
        copies = batch.transfers.copies
        written: set[int] = {copy.target for copy in copies}
        assert len(written) == len(copies)
        assert not written & {copy.source for copy in copies}
        written |= {swap.device_page for swap in batch.transfers.swap_in}
        for row in batch.rows:
            first, last = row.start // self.page_size, (row.start + row.count - 1) // self.page_size
            for table in _tables(row):
                written.update(table[first : last + 1])
        for page in self._loaded_pages(batch):
            owners = [row for row in batch.rows if any(page in table for table in _tables(row))]
            assert len(owners) == 1, f"page {page} is loaded and in {len(owners)} page tables"
            assert page not in written
        for page in written:
            owners = [row for row in batch.rows if any(page in table for table in _tables(row))]
            assert len(owners) == 1, f"page {page} is written and in {len(owners)} page tables"
            if self.references is not None:
                pins = sum(handle.sources.count(page) for handle in self._in_flight)
                pins += sum(page in row.compaction.pages for row in batch.rows if row.compaction is not None)
                assert self.references[page] == 1 + pins, f"page {page} is written and has {self.references[page]} uses"


def _tables(row: Row) -> list[Sequence[int]]:
    return [row.page_table, *row.more_page_tables]


def _seen_from(row: Row, window: int | None) -> range:
    """The positions that any token of a row sees."""
    return range(0 if window is None else max(0, row.start - window + 1), row.start + row.count)


def _in_group(group: int, value: int) -> int:
    """What a group stores of a cell: the first one the cell itself."""
    return hash((group, value)) if group else value
