"""An engine as routing sees it: real page and LRU rules, real batching, time by measured rates.

It follows `Scheduler` and `PrefixCache` of the engine (decodes first, then running prefills, then admissions in order,
under one token budget; preemption of the last; the end of a prefix is evicted first), but counts blocks instead of
tokens and takes all passes of decode rows alone in one jump. tests/benchmarks/routing compares it with the real ones.
Below its cache it may have main memory: a request whose prefix goes on there gets its pages, and no rows until the
blocks have been loaded.
"""

from bisect import insort
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, NamedTuple

from benchmarks.routing.host_tier import NO_HOST, HostShape, HostTier
from benchmarks.routing.rates import PassRates
from benchmarks.routing.workload import SimulatedRequest
from mini_infer_contract.events import MEDIUM_GPU, MEDIUM_HOST

SKIPPED_LIMIT = 8
HEADROOM_TOKENS = 16
"""Free tokens for each running sequence that an admission must leave (`Scheduler._headroom`)."""


@dataclass(frozen=True, slots=True)
class EngineShape:
    """How large an engine is."""

    kv_blocks: int
    block_tokens: int
    rates: PassRates
    max_num_seqs: int = 256
    token_budget: int = 8192
    host: HostShape = NO_HOST


class Change(NamedTuple):
    """A change of the cache, or of main memory."""

    is_stored: bool
    what: Any
    """Stored: the parent (-1: none) and a chain of blocks; else the blocks that are gone."""
    medium: str = MEDIUM_GPU


@dataclass(slots=True, eq=False)
class Running:
    """A request at an engine."""

    request: SimulatedRequest
    rank: tuple[int, int]
    known_tokens: int
    """Prompt and output so far."""
    computed: int = 0
    prefill_end: int = 0
    generated: int = 0
    decode_from: int = 0
    """The engine's decode counter when it began to decode."""
    decoding: bool = False
    epoch: int = 0
    """How often it began to decode: what was planned for an earlier time is void."""
    blocks: list[int] = field(default_factory=list)
    """Keyed blocks that it references, in order."""
    copies: dict[int, int] = field(default_factory=dict)
    pages: int = 0
    """All its pages, keyed ones included."""
    published: int = 0
    expected_cached: int = 0
    cached_tokens: int | None = None
    elsewhere: bool = False
    """Another engine has computed its prompt: it needs pages, and decodes at once."""
    loading: int = 0
    """Blocks of its prompt that are being loaded from main memory."""
    loaded_s: float = 0.0
    """When they are there."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a load report says; see mini_infer_contract.events.LoadReport."""

    running: int
    waiting: int
    queued_tokens: int
    kv_usage: float
    accepted: tuple[int, ...]
    measured_s: float = 0.0
    """On the engine's clock."""


class EngineModel:
    """One engine. Its world calls `add`, then `wake` at the times that `next_s` says."""

    def __init__(
        self,
        name: str,
        shape: EngineShape,
        on_first_token: Callable[[SimulatedRequest, float], None],
        on_finish: Callable[[SimulatedRequest, float, int], None],
        record_events: bool = True,
    ) -> None:
        self.name, self.shape = name, shape
        self._on_first_token, self._on_finish, self._record = on_first_token, on_finish, record_events
        self.waiting: list[Running] = []
        self.running: list[Running] = []
        self.kv_tokens = 0
        """Sum of the decode rows' contexts."""
        self.decode_rows = 0
        self.computed_tokens = self.preemptions = 0
        self.host_tokens = 0
        """Prompt tokens that came from main memory at first admissions."""
        self.gaps: list[tuple[float, int]] = []
        """(seconds, tokens) of passes: between two tokens of a request that decodes there."""
        self.next_s: float | None = None
        """When the present pass, or the last of a run of decode passes, ends; None: idle."""
        self._started_s = 0.0
        self._jump_steps = 0
        """Decode passes until `next_s`; 0: one pass with prefills."""
        self._chunks: list[Running] = []
        self._decoded = 0
        self._finishing: list[tuple[int, int, int, Running]] = []
        """(decode counter, a running number, the row's epoch, the row) where rows end."""
        self._growing: list[tuple[int, int, int, Running]] = []
        """The same where rows need a page."""
        self._noted = 0
        self._arrivals = 0
        self._refs: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._private = 0
        self._accepted: list[int] = []
        self._changes: list[Change] = []
        self._host = HostTier(shape.host, shape.block_tokens, shape.rates.token_ms / 1000)
        self._parents: dict[int, int] = {}
        """Of blocks on the device, where there is main memory."""
        self._refused: tuple[Running, int, int] | None = None

    # What a router may ask.

    @property
    def free_pages(self) -> int:
        """Blank or cached."""
        return self.shape.kv_blocks - len(self._refs) - self._private

    def match_blocks(self, request: SimulatedRequest, known_tokens: int | None = None) -> int:
        """Blocks of the prompt that are cached; the last known token must be computed."""
        limit = ((known_tokens or request.prompt_tokens) - 1) // self.shape.block_tokens
        refs, cached = self._refs, self._cached
        count = 0
        for block in request.blocks[:limit]:
            if block not in refs and block not in cached:
                break
            count += 1
        return count

    def queued_tokens(self) -> int:
        """Prompt tokens that are neither cached nor computed."""
        waiting = sum(item.known_tokens - item.expected_cached for item in self.waiting)
        loading = sum(item.loading for item in self.running) * self.shape.block_tokens
        prefills = sum(item.prefill_end - item.computed for item in self.running if not item.decoding)
        return waiting + prefills - loading

    def report(self, now_s: float) -> Report:
        """The load report of this moment."""
        accepted, self._accepted = tuple(self._accepted), []
        usage = 1 - self.free_pages / self.shape.kv_blocks
        return Report(len(self.running), len(self.waiting), self.queued_tokens(), usage, accepted, now_s)

    def match_host(self, request: SimulatedRequest, hit: int, known_tokens: int | None = None) -> int:
        """Blocks after those that are cached that would be loaded from main memory."""
        limit = ((known_tokens or request.prompt_tokens) - 1) // self.shape.block_tokens
        return self._host.match(request.blocks[hit:limit]) if self.shape.host.blocks else 0

    def take_events(self) -> list[Change]:
        """The changes since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    # What its world does.

    def add(self, request: SimulatedRequest, now_s: float, priority: int = 0, *, elsewhere: bool = False) -> None:
        """Takes a request; it can be part of a pass that begins later.

        `elsewhere`: its prompt is computed, and its keys and values are there as soon as it has pages.
        """
        entry = Running(request, (priority, self._arrivals), request.prompt_tokens, elsewhere=elsewhere)
        hit = self.match_blocks(request)
        hit_tokens = (hit + self.match_host(request, hit)) * self.shape.block_tokens
        entry.expected_cached = entry.known_tokens if elsewhere else hit_tokens
        self._arrivals += 1
        insort(self.waiting, entry, key=lambda item: item.rank)
        self._accepted.append(request.number)
        if self.next_s is None or not (self._chunks or self.decode_rows):
            self._plan(now_s)
        elif self._jump_steps > 1 and (self._refused is None or self.waiting[0] is not self._refused[0]):
            self._cut_jump(now_s)

    def end(self) -> list[SimulatedRequest]:
        """The engine dies: its requests, in their order, end without an answer, and its cache is lost."""
        lost = [entry.request for entry in sorted(self.running + self.waiting, key=lambda entry: entry.rank)]
        silent = EngineModel(self.name, self.shape, self._on_first_token, self._on_finish, self._record)
        self.__dict__ = silent.__dict__
        return lost

    def wake(self, now_s: float) -> None:
        """The pass that ends now is committed and the next one planned."""
        self._commit(now_s)
        self._plan(now_s)

    def _cut_jump(self, now_s: float) -> None:
        """Lets a run of decode passes end with the pass that is under way now."""
        low = self._steps_until(now_s, self._jump_steps)
        if low < self._jump_steps:
            self._jump_steps = low
            self.next_s = self._started_s + self.shape.rates.decodes_s(self.decode_rows, self.kv_tokens, low)

    def _steps_until(self, now_s: float, most: int) -> int:
        """Decode passes from the start of this run until one ends at this time or later, at most so many."""
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            if self.shape.rates.decodes_s(self.decode_rows, self.kv_tokens, middle) >= now_s - self._started_s:
                high = middle
            else:
                low = middle + 1
        return low

    # Planning.

    def _plan(self, now_s: float) -> None:
        shape = self.shape
        self._take_loaded(now_s)
        self._grow_all()
        self._admit_computed(now_s)
        budget = shape.token_budget - self.decode_rows
        computing: set[int] = set()
        self._chunks = []
        rows, kv_tokens = self.decode_rows, self.kv_tokens
        tokens, pairs = 0, 0.0
        for entry in self.running:
            if budget <= 0:
                break
            if not entry.decoding and not entry.loading:
                count, cost = self._chunk(entry, budget, computing)
                budget, tokens, pairs = budget - count, tokens + count, pairs + cost
        index = 0
        while budget > 0 and index < len(self.waiting) and index < SKIPPED_LIMIT:
            if len(self.running) >= shape.max_num_seqs:
                break
            entry = self.waiting[index]
            if self._was_refused(entry):
                break
            hit = self.match_blocks(entry.request, entry.known_tokens)
            num_host = self.match_host(entry.request, hit, entry.known_tokens)
            if self._is_being_computed(entry, hit, computing):
                index += 1
            elif self._admit(entry, hit):
                del self.waiting[index]
                if num_host:  # what it has been given pages for may have pushed some of them out
                    num_host = self.match_host(entry.request, hit, entry.known_tokens)
                if num_host:
                    self._load(entry, hit, num_host, now_s)
                    continue
                count, cost = self._chunk(entry, budget, computing)
                budget, tokens, pairs = budget - count, tokens + count, pairs + cost
            else:
                self._refused = (entry, self.free_pages, len(self.running))
                break
        for entry in self._chunks:
            self._publish(entry)
        self._started_s = now_s
        loads = [entry.loaded_s for entry in self.running if entry.loading]
        if self._chunks:
            self._jump_steps = 0
            self.computed_tokens += tokens
            self.next_s = now_s + shape.rates.pass_s(rows, kv_tokens, tokens, pairs)
        elif self.decode_rows:
            self._jump_steps = self._steps_without_change()
            if loads:
                self._jump_steps = self._steps_until(min(loads), self._jump_steps)
            self.next_s = now_s + shape.rates.decodes_s(rows, kv_tokens, self._jump_steps)
        else:
            self._jump_steps = 0
            self.next_s = min(loads, default=None)

    def _load(self, entry: Running, hit: int, count: int, now_s: float) -> None:
        """Has an admitted request wait for blocks of main memory."""
        entry.loaded_s = self._host.load(entry.request.blocks[hit : hit + count], now_s)
        entry.loading = count
        if entry.generated == 0 and entry.cached_tokens == hit * self.shape.block_tokens:
            self.host_tokens += count * self.shape.block_tokens
            entry.cached_tokens += count * self.shape.block_tokens

    def _take_loaded(self, now_s: float) -> None:
        """Those whose blocks have come compute the rest of their prompts from now on."""
        for entry in self.running:
            if entry.loading and entry.loaded_s <= now_s:
                entry.computed += entry.loading * self.shape.block_tokens
                entry.loading = 0
                self._publish(entry)

    def _admit_computed(self, now_s: float) -> None:
        """Those whose prompts came from another engine join the batch before anything else."""
        for entry in [entry for entry in self.waiting if entry.elsewhere]:
            hit = self.match_blocks(entry.request, entry.known_tokens)
            if len(self.running) >= self.shape.max_num_seqs or not self._admit(entry, hit):
                return
            self.waiting.remove(entry)
            entry.elsewhere = False  # after a preemption it computes its prompt by itself
            entry.computed = entry.prefill_end
            self._publish(entry)
            self._begin_decoding(entry, now_s)

    def _was_refused(self, entry: Running) -> bool:
        if self._refused is None:
            return False
        refused, free, running = self._refused
        return refused is entry and self.free_pages <= free and len(self.running) == running

    def _is_being_computed(self, entry: Running, hit: int, computing: set[int]) -> bool:
        if not computing or hit >= len(entry.request.blocks):
            return False
        if (hit + 1) * self.shape.block_tokens >= entry.known_tokens:
            return False
        return entry.request.blocks[hit] in computing

    def _admit(self, entry: Running, hit: int) -> bool:
        block = self.shape.block_tokens
        blocks = entry.request.blocks[:hit]
        pages = -(-(entry.known_tokens + 1) // block)
        headroom = -(-len(self.running) * HEADROOM_TOKENS // block)
        revived = sum(1 for item in blocks if item not in self._refs)
        if pages - hit + revived + headroom > self.free_pages:
            return False
        for item in blocks:
            self._acquire(item)
        entry.blocks = list(blocks)
        entry.pages, entry.published = pages, hit
        self._take_private(pages - hit)
        entry.computed, entry.prefill_end = hit * block, entry.known_tokens
        if entry.cached_tokens is None:
            entry.cached_tokens = entry.computed
        insort(self.running, entry, key=lambda item: item.rank)
        return True

    def _chunk(self, entry: Running, budget: int, computing: set[int]) -> tuple[int, float]:
        start = entry.computed
        count = min(entry.prefill_end - start, budget)
        entry.computed = start + count
        self._chunks.append(entry)
        block = start // self.shape.block_tokens
        if block < len(entry.request.blocks):
            computing.add(entry.request.blocks[block])
        return count, count * (start + count / 2)

    def _steps_without_change(self) -> int:
        steps = self._finishing[0][0] - self._decoded
        if self._growing:
            steps = min(steps, self._growing[0][0] - self._decoded)
        return max(1, steps)

    def _grow_all(self) -> None:
        """A page for each decode row whose next token needs one, by preempting the last where there is none."""
        while self._growing and self._growing[0][0] <= self._decoded:
            _, _, epoch, entry = heappop(self._growing)
            if not entry.decoding or entry.epoch != epoch:
                continue
            while self.free_pages <= 0 and entry.decoding:
                self._preempt(self.running[-1])
            if entry.decoding:
                entry.pages += 1
                self._take_private(1)
                self._publish(entry)
                self._note(self._growing, self.shape.block_tokens, entry)

    def _preempt(self, entry: Running) -> None:
        self.preemptions += 1
        if entry.decoding:
            self._settle(entry)
            self._stop_decoding(entry)
        self.running.remove(entry)
        self._release(entry)
        entry.loading = 0
        entry.expected_cached = entry.computed
        insort(self.waiting, entry, key=lambda item: item.rank)

    # Committing.

    def _commit(self, now_s: float) -> None:
        steps = self._jump_steps or 1
        if self.decode_rows:
            self.gaps.append(((now_s - self._started_s) / steps, steps * self.decode_rows))
            self.kv_tokens += steps * self.decode_rows
            self._decoded += steps
        while self._finishing and self._finishing[0][0] <= self._decoded:
            _, _, epoch, entry = heappop(self._finishing)
            if entry.decoding and entry.epoch == epoch:
                self._settle(entry)
                self._stop_decoding(entry)
                self._end(entry, now_s)
        for entry in self._chunks:
            if entry.computed == entry.prefill_end:
                self._begin_decoding(entry, now_s)
        self._chunks = []

    def _begin_decoding(self, entry: Running, now_s: float) -> None:
        if not entry.generated:
            self._on_first_token(entry.request, now_s)
        entry.generated += 1
        entry.known_tokens = entry.prefill_end + 1
        left = entry.request.output_tokens - entry.generated
        if left <= 0:
            self._end(entry, now_s)
            return
        entry.decoding, entry.decode_from = True, self._decoded
        self.decode_rows += 1
        self.kv_tokens += entry.prefill_end + 1
        entry.epoch += 1
        self._note(self._finishing, left, entry)
        self._note(self._growing, entry.pages * self.shape.block_tokens - entry.prefill_end, entry)

    def _note(self, heap: list[tuple[int, int, int, Running]], steps: int, entry: Running) -> None:
        self._noted += 1
        heappush(heap, (self._decoded + steps, self._noted, entry.epoch, entry))

    def _settle(self, entry: Running) -> None:
        """Brings a decode row's counts to this moment."""
        done = self._decoded - entry.decode_from
        entry.generated += done
        entry.known_tokens += done
        entry.computed += done
        entry.decode_from = self._decoded

    def _stop_decoding(self, entry: Running) -> None:
        entry.decoding = False
        self.decode_rows -= 1
        self.kv_tokens -= entry.known_tokens

    def _end(self, entry: Running, now_s: float) -> None:
        self._publish(entry)
        self.running.remove(entry)
        self._release(entry)
        self._on_finish(entry.request, now_s, entry.cached_tokens or 0)

    # Pages.

    def _take_private(self, count: int) -> None:
        self._private += count
        self._evict()

    def _acquire(self, block: int) -> None:
        if block in self._refs:
            self._refs[block] += 1
        else:
            del self._cached[block]
            self._refs[block] = 1

    def _evict(self) -> None:
        evicted = []
        most = self.shape.kv_blocks - len(self._refs) - self._private
        while len(self._cached) > most:
            evicted.append(self._cached.popitem(last=False)[0])
        stored, gone = self._host.evicted(evicted)
        parents = [(self._parents.pop(block, -1), [block]) for block in evicted] if self.shape.host.blocks else []
        if not self._record:
            return
        is_new = set(stored)
        self._changes += [Change(True, what, MEDIUM_HOST) for what in parents if what[1][0] in is_new]
        if gone:
            self._changes.append(Change(False, gone, MEDIUM_HOST))
        if evicted:
            self._changes.append(Change(False, evicted))

    def _publish(self, entry: Running) -> None:
        """Makes the blocks known that launched passes fill."""
        if entry.decoding:
            self._settle(entry)
        blocks = entry.request.blocks
        end = min(entry.computed // self.shape.block_tokens, len(blocks))
        new: list[int] = []
        for index in range(entry.published, end):
            block = blocks[index]
            if block in self._refs:  # somebody else's page holds it: ours stays a private copy
                self._store(new, blocks, index)
                entry.copies[index] = block
                continue
            if block in self._cached:
                del self._cached[block]
                self._private -= 1
                self._refs[block] = 1
                entry.blocks.append(block)
                self._store(new, blocks, index)
                continue
            self._refs[block] = 1
            self._private -= 1
            entry.blocks.append(block)
            new.append(block)
        self._store(new, blocks, end)
        entry.published = max(entry.published, end)

    def _store(self, new: list[int], blocks: tuple[int, ...], end: int) -> None:
        start = end - len(new)
        if new and self.shape.host.blocks:
            parents = (blocks[start - 1] if start else -1, *new)
            self._parents.update(zip(new, parents, strict=False))
        if new and self._record:
            self._changes.append(Change(True, (blocks[start - 1] if start else -1, list(new))))
        new.clear()

    def _release(self, entry: Running) -> None:
        self._private -= entry.pages - len(entry.blocks)
        for block in reversed(entry.blocks):
            left = self._refs[block] - 1
            if left:
                self._refs[block] = left
            else:
                del self._refs[block]
                self._cached[block] = None
        for index in sorted(entry.copies, reverse=True):
            if (block := entry.copies[index]) in self._cached:
                self._cached.move_to_end(block)
        entry.blocks, entry.copies, entry.pages, entry.published = [], {}, 0, 0
