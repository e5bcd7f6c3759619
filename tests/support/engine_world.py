"""An engine on the fake runner, with what must be true of it at any moment, for tests that throw events at it."""

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import chain as chained

from mini_infer_contract.events import MEDIUM_GPU, BlockRemoved, BlockStored
from mini_infer_engine.config.model.kv_groups import UNIFORM, KVCacheConfig
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.kv_tiers.tiers import KVTiers
from mini_infer_engine.core.page_allocator import PageAllocator
from mini_infer_engine.core.recurrent_kv_cache_manager import RecurrentKVCacheManager
from mini_infer_engine.core.request import BeamSearch, Output, Request, SamplingParams
from tests.support.fake_runner import EOS, VOCABULARY, FakeRunner, expected_beams, expected_tokens


def make_engine(
    num_pages: int,
    page_size: int,
    max_model_len: int,
    *,
    record_events: bool = True,
    num_host_pages: int = 0,
    max_speculative_rows: int = 0,
    kv_cache: KVCacheConfig = UNIFORM,
    num_tier_pages: tuple[int, int] = (0, 0),
    loads_by_layer: bool = False,
    draw: random.Random | None = None,
    **settings: object,
) -> tuple[Engine, FakeRunner]:
    """`settings` are EngineSettings' fields; `num_tier_pages` those in main memory and on a disk below the cache."""
    engine_settings = EngineSettings(model="fake", **settings)  # type: ignore[arg-type]
    runner = FakeRunner(
        num_pages,
        page_size,
        num_host_pages=num_host_pages,
        max_speculative_rows=max_speculative_rows,
        num_stages=engine_settings.pipeline_parallel_size,
        kv_cache=kv_cache,
        num_tier_pages=num_tier_pages,
        loads_by_layer=loads_by_layer,
        draw=draw,
    )
    engine = Engine(
        engine_settings,
        runner,
        (EOS,),
        max_model_len,
        "revision",
        record_events=record_events,
        disk_memory=runner.disk_memory,
    )
    runner.references = engine.scheduler.kv_cache.pool.references
    return engine, runner


@dataclass
class World:
    """Feeds one engine and checks it after each event; tokens are compared with those of each request alone."""

    engine: Engine
    runner: FakeRunner
    max_model_len: int
    draw: random.Random
    live: dict[str, Request] = field(default_factory=dict)
    made: dict[str, list[int]] = field(default_factory=dict)
    known: dict[str | None, set[object]] = field(default_factory=lambda: defaultdict(set))
    """Hashes of the blocks that the events so far say are cached, by medium."""
    aborted: dict[str, int] = field(default_factory=dict)
    """Steps since the abort of requests that ran then."""
    histories: list[list[int]] = field(default_factory=lambda: [[]])
    num_requests: int = 0
    num_searches: int = 0
    num_refused: int = 0
    """Requests that were refused for their latency targets."""
    has_leases: bool = False
    """True if requests have leases: a prefix that sessions share may be evicted while one of them still has its own."""

    @property
    def window(self) -> int | None:
        """How many cells the next token follows from."""
        return self.runner.kv_cache.groups[0].window

    @property
    def num_freed(self) -> int:
        """Pages of running sequences that were freed behind a window."""
        tables = [table for sequence in self.engine.scheduler.running for table in sequence.page_tables]
        return sum(table.count(self.runner.num_pages) for table in tables)

    @property
    def num_swaps(self) -> int:
        """Sequences that went to main memory."""
        return self.engine.scheduler.kv_cache.num_swaps

    @property
    def num_copies(self) -> int:
        return sum(len(batch.transfers.copies) for batch in self.runner.batches)

    def add(self) -> None:
        self.start(self.draw_request())

    def start(self, request: Request) -> None:
        self.live[request.request_id] = request
        self.made[request.request_id] = []
        self.engine.add(request)

    def draw_request(self) -> Request:
        """A prompt that shares a random part with an earlier conversation or with a family of prompts."""
        draw = self.draw
        family = draw.randrange(3)
        history = draw.choice(self.histories) if draw.random() < 0.5 else [family] * self.max_model_len
        suffix = [draw.randrange(VOCABULARY) for _ in range(draw.choice((0, 0, 1, 7, 16, 33)))]
        shared = draw.choice((8, self.max_model_len // 2, self.max_model_len))
        prompt = [family, *history[1 : draw.randrange(1, shared)], *suffix][: self.max_model_len - 1]
        sampling = SamplingParams(
            temperature=draw.choice((0.0, 0.0, 1.0)),
            max_tokens=draw.choice((None, None, 1, 2, 40)),
            min_tokens=draw.choice((0, 0, 5)),
            ignore_eos=draw.random() < 0.6,
            stop_token_ids=draw.choice(([], [], [3, 4])),
        )
        request = Request(
            request_id=f"r{self.num_requests}",
            prompt_token_ids=prompt,
            sampling=sampling,
            priority=draw.choice((0, 0, 0, 1, -1)),
            cache_salt=draw.choice(("", "", "tenant")),
            noise_seed=draw.randrange(100),
        )
        self.num_requests += 1
        return request

    @property
    def num_compactions(self) -> int:
        """Compactions of caches so far."""
        return sum(row.compaction is not None for batch in self.runner.batches for row in batch.rows)

    def add_beams(self) -> None:
        """A beam search of a short prompt; where the pool may be too small for it, it is refused at once."""
        draw, name, width = self.draw, f"r{self.num_requests}", self.draw.choice((1, 2, 3, 4))
        request_ids = [name, *(f"{name}.{index}" for index in range(1, width))]
        penalty, early = draw.choice((1.0, 0.0, -1.0, 2.0)), draw.choice((False, True, "never"))
        request = Request(
            request_id=name,
            prompt_token_ids=[draw.randrange(3)] * draw.randrange(1, self.max_model_len // 2),
            sampling=SamplingParams(
                max_tokens=draw.choice((1, 2, 5, 20)), min_tokens=draw.choice((0, 0, 1)), ignore_eos=draw.random() < 0.5
            ),
            priority=draw.choice((0, 0, 1, -1)),
            beam_search=BeamSearch(request_ids=request_ids, length_penalty=penalty, early_stopping=early),
        )
        try:
            self.engine.add(request)
        except ValueError:
            return
        self.num_requests += 1
        self.live[name] = request
        self.made[name] = []
        self.num_searches += 1

    def abort(self) -> None:
        if self.live:
            request_id = self.draw.choice(sorted(self.live))
            del self.live[request_id]
            self.aborted[request_id] = 0
            self.engine.abort(request_id)

    def break_next(self, what: str) -> None:
        """The next launch or collect of the runner fails."""
        self.engine._failed_passes = 0  # a device that never works again is another test's
        setattr(self.runner, f"{what}_error", RuntimeError(f"this {what} was told to fail"))

    def step(self) -> None:
        launches = not self.engine._ended_already  # outputs that are known wait for no pass, and their step has none
        for output in self.engine.step():
            self._take(output)
        running = {sequence.request.request_id for sequence in self.engine.scheduler.running}
        for request_id in list(self.aborted):
            self.aborted[request_id] += launches
            if request_id not in running:
                del self.aborted[request_id]
            else:
                # A step that fills a pipeline again commits nothing, and there is one for each that emptied it at most.
                steps = 2 * self.engine._num_stages
                assert self.aborted[request_id] < steps, f"{request_id} runs {steps} steps after its abort"

    def _take(self, output: Output) -> None:
        request = self.live[output.request_id.partition(".")[0]]  # nothing comes for aborted or finished requests
        if output.retry_after_s is not None:
            assert output.finish_reason == "error"
            assert not self.made[request.request_id]
            self.num_refused += 1
            del self.live[request.request_id]
            return
        if request.beam_search is not None:
            self._take_beam(request, output)
            return
        made, where = self.made[output.request_id], output.cached_tokens
        assert (where is not None) == (self.engine._tiers.is_present and bool(output.token_ids) and not made)
        if where is not None:
            assert min(where.device, where.host, where.disk) >= 0
            assert where.device + where.host + where.disk + where.peer == output.num_cached_tokens
        made += output.token_ids
        if output.finish_reason is None:
            return
        if output.finish_reason == "error":
            assert "told to fail" in output.error
            assert made == expected_tokens(request, self.max_model_len, window=self.window)[: len(made)]
            del self.live[output.request_id]
            return
        expected = expected_tokens(request, self.max_model_len, window=self.window)
        assert made == expected, f"{request} made {made}, alone it makes {expected}"
        stops = {*request.sampling.stop_token_ids, *(() if request.sampling.ignore_eos else (EOS,))}
        assert output.finish_reason == ("stop" if expected[-1] in stops else "length")
        assert output.num_cached_tokens < len(request.prompt_token_ids)
        self.histories.append(request.prompt_token_ids + made)
        del self.live[output.request_id]

    def _take_beam(self, request: Request, output: Output) -> None:
        assert request.beam_search is not None
        if output.finish_reason == "error":
            assert "told to fail" in output.error
        else:
            index = request.beam_search.request_ids.index(output.request_id)
            expected = expected_beams(request, self.max_model_len, self.window)
            assert output.token_ids == expected[index], f"beam {index} of {request}"
            if index + 1 < len(expected):
                return
        del self.live[request.request_id]

    def check(self) -> None:
        """References are those of the running and the pinned, free pages are all others, events tell what is cached."""
        engine, scheduler = self.engine, self.engine.scheduler
        pool = scheduler.kv_cache.pool
        uses = [0] * pool.num_pages
        placed = [*scheduler.running, *scheduler.receiving]
        prefetched = engine._tiers._prefetches._loading if isinstance(engine._tiers, KVTiers) else ()
        for sequence in [*placed, *prefetched]:
            for page in chained(*sequence.page_tables):
                if page != self.runner.num_pages:
                    uses[page] += 1
        for page, pins in pool._pins.items():
            uses[page] += pins
        for _, step in engine._in_flight:
            for page in step.pinned_pages:
                uses[page] += 1
        assert not any(sequence.target_pages for sequence in placed), "they become its pages with the launch"
        if isinstance(engine._tiers, KVTiers):
            self._check_host_pages(engine._tiers)
        assert pool.references == uses
        assert pool.num_free == uses.count(0)
        assert sorted([*pool._blank, *pool._cached]) == [page for page, count in enumerate(uses) if not count]
        slots = [sequence.slot for sequence in placed] + scheduler.slots._free
        groups = {id(one.group): one.group for one in scheduler.running if one.group is not None}
        slots += [slot for group in groups.values() for slot in group.free_slots]
        assert len(slots) == scheduler._max_num_seqs
        assert len(set(slots)) == len(slots)
        assert all(not any(sequence.page_tables) and sequence.slot < 0 for sequence in scheduler.waiting)
        swapped = [page for sequence in scheduler.waiting for page in sequence.host_pages]
        assert (
            len({*swapped}) == len(swapped) == self.runner.swap_space.num_pages - scheduler.kv_cache.host_pages.num_free
        )
        for ranked in (scheduler.running, scheduler.waiting):
            assert [sequence.order for sequence in ranked] == sorted(sequence.order for sequence in ranked)
        self._check_checkpoints()
        self._check_events()

    @staticmethod
    def _check_host_pages(tiers: KVTiers) -> None:
        """Pages of main memory are in use as often as copies use them."""
        used = Counter([*tiers._loads.host_pages, *tiers._write_behind.writing])
        used.update(tiers._write_behind.targets)
        store = tiers._host.store
        assert isinstance(store, PageAllocator)
        assert {page: count for page, count in enumerate(store.references) if count} == dict(used)
        assert store.num_free == store.num_pages - len(used)

    def _check_checkpoints(self) -> None:
        """Checkpoints in use are those that running sequences are to read, or have written and not published."""
        manager = self.engine.scheduler.kv_cache
        if not isinstance(manager, RecurrentKVCacheManager):
            return
        placed = [*self.engine.scheduler.running, *self.engine.scheduler.receiving]
        assert {*manager._states} == {*placed}
        states = manager._states.values()
        written = [slot for state in states for _, slot in state.written]
        read = {state.source for state in states if state.source is not None}
        assert not read.intersection(written)
        tiers = self.engine._tiers
        loading = tiers._loads.checkpoints_in_use if isinstance(tiers, KVTiers) else []
        assert manager.checkpoints.num_in_use == len({*read, *written, *loading})
        waiting = [one for one in self.engine.scheduler.waiting if one.host_pages]
        assert {*manager._swapped_states} == {*waiting}
        swapped = [*manager._swapped_states.values(), *(one.host_state for one in states if one.host_state is not None)]
        assert len({*swapped}) == len(swapped) == self.runner.swap_space.num_states - manager.host_states.num_free

    def _check_events(self) -> None:
        for event in self.engine.take_events():
            assert isinstance(event, BlockStored | BlockRemoved)
            known = self.known[event.medium]
            if isinstance(event, BlockStored):
                # A lower tier may have a page and not those before it.
                is_of_device = event.medium == MEDIUM_GPU and not self.has_leases
                assert not is_of_device or event.parent_block_hash is None or event.parent_block_hash in known
                assert not known.intersection(event.block_hashes)
                known.update(event.block_hashes)
            else:
                assert known.issuperset(event.block_hashes)
                known.difference_update(event.block_hashes)
        seen: dict[str | None, set[object]] = defaultdict(set)
        for chain in self.engine.snapshot():
            parent, known = chain.parent_block_hash, self.known[chain.medium]
            if chain.medium != MEDIUM_GPU or not self.has_leases:
                assert parent is None or parent in seen[chain.medium] or parent not in known, (
                    "a child before its parent"
                )
                assert chain.medium != MEDIUM_GPU or parent is None or parent in known, "a child without its parent"
            assert len(chain.token_ids) == chain.block_size * len(chain.block_hashes)
            seen[chain.medium].update(chain.block_hashes)
        assert seen == {medium: hashes for medium, hashes in self.known.items() if hashes}

    def drain(self) -> None:
        """Run everything to its end: nothing is stuck, nothing leaks."""
        for _ in range(200 + 3 * self.max_model_len * (1 + len(self.live))):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, "stuck"
        for _ in range(1000):
            if not self.engine.write_behind():
                break
        assert not self.engine._tiers.are_copying, "stuck"
        self.check()
        pool = self.engine.scheduler.kv_cache.pool
        assert not self.live
        assert not any(pool.references)
        assert pool.num_free == pool.num_pages
        assert self.engine.load().queued_tokens == 0
