"""Whatever happens in whatever order, no page leaks, nothing gets stuck, and tokens are those of each request alone."""

import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mini_infer_engine.config.model.kv_groups import KVGroup, kv_cache_config
from mini_infer_engine.config.options.kv_policies import KVPolicy, room_fault
from mini_infer_engine.core.request import Request
from tests.support.connected_engine import connect
from tests.support.connected_world import ConnectedWorld
from tests.support.engine_world import World, make_engine
from tests.support.fake_runner import VOCABULARY

SETUPS = {
    "page_size": (16, 16, 32, 64, 256),
    "step_depth": (0, 1),
    "max_num_seqs": (1, 4, 8, 8),
    "max_num_batched_tokens": (3, 16, 64, None, None),
    "long_prefill_token_threshold": (0, 0, 5, 16),
    "enable_prefix_caching": (True, True, True, False),
    "spare_pages": (0, 1, 2, 4, 20),
    "num_host_pages": (0, 2, 40),
    "speculative_method": (None, "ngram", "draft_model"),
    "num_speculative_tokens": (1, 3, 5),
    "pipeline_parallel_size": (1, 2, 4),
    "windows": ((None,),),
}
WINDOWED = {
    "windows": ((None, 20), (None, 3), (24,), (2,), (33, 17), (None, 40, 16, 40), (None, None, 20)),
    "num_host_pages": (0,),
    "speculative_method": (None, None, "ngram"),
    "pipeline_parallel_size": (1,),
}
"""Setups with several KV groups or a window, and what goes with them."""
RECURRENT = {
    "num_checkpoints": (1, 2, 5, 40),
    "page_size": (16, 16, 16, 32),
    "spare_pages": (0, 1, 8, 40),
    "num_host_pages": (0, 2, 40),
    "speculative_method": (None, None, "ngram"),
    "pipeline_parallel_size": (1,),
}
"""Setups with layers that have a recurrent state, and what goes with them."""


TIERED = {
    "loads_by_layer": (False, True),
    "num_tier_pages": ((2, 0), (8, 0), (40, 0), (2, 8), (3, 40), (4, 40), (40, 40)),
    "page_size": (16, 16, 16, 32),
    "max_model_len": (64, 150, 150),
    "spare_pages": (0, 2, 8, 12),
    "num_host_pages": (0, 0, 40),
    "max_num_batched_tokens": (16, 64, None),
    "long_prefill_token_threshold": (0, 16),
    "enable_prefix_caching": (True,),
    "pipeline_parallel_size": (1,),
}
"""Setups with tiers below the prefix cache, and what goes with them."""


EVICTING = {
    "max_model_len": (150, 150, 320),
    "max_num_batched_tokens": (16, 96, 96, 150, None),
    "max_num_seqs": (1, 4, 8),
    "spare_pages": (0, 1, 4, 20),
    "speculative_method": (None, None, "ngram"),
    "pipeline_parallel_size": (1,),
    "kv_policy": ("full", "h2o"),
    "kv_budget": (70,),
}
"""Setups in which requests choose policies by which their sequences lose cached tokens, and what goes with them."""


class EvictingWorld(World):
    """Two of three requests have a budget in the cache, which most prompts exceed."""

    def draw_request(self) -> Request:
        request, policy = super().draw_request(), dict[str, Any](kv_policy="full")
        chosen = self.draw.choice(("full", "streaming-llm", "snapkv", self.engine.inputs.settings.kv_policy))
        if chosen == "snapkv" and room_fault(KVPolicy("snapkv", 65), self.engine.inputs.longest_block) is None:
            policy = {"kv_policy": chosen, "kv_budget": self.draw.choice((65, 70, 100))}
        elif chosen != "full":
            name = "h2o" if chosen == "h2o" else "streaming-llm"
            policy = {"kv_policy": name, "kv_budget": self.draw.choice((5, 16, 20, 33, 70))}
        prompt = list(request.prompt_token_ids) * self.draw.choice((1, 1, 3))
        return msgspec.structs.replace(
            request,
            prompt_token_ids=prompt[: self.max_model_len - 1],
            sampling=msgspec.structs.replace(request.sampling, **policy),
        )


class TieredWorld(World):
    """Most prompts go on with an earlier conversation, and end soon. Some conversations are expected to return."""

    def step(self) -> None:
        if self.draw.random() < 0.2:
            names = [f"r{self.draw.randrange(self.num_requests + 1)}" for _ in range(3)]
            self.engine.prefetch(names, self.draw.choice((0.001, 0.1, 60.0)))
        super().step()

    def draw_request(self) -> Request:
        request = super().draw_request()
        lease_s, returns_s = self.draw.choice(((0.0, 0.0), (-1.0, 0.0), (0.01, 0.001), (60.0, 0.001), (60.0, 30.0)))
        request = msgspec.structs.replace(request, lease_s=lease_s, returns_s=returns_s)
        self.has_leases = True
        history = self.draw.choice(self.histories[-8:])
        if len(history) < 16 or self.draw.random() < 0.2:
            return request
        prompt = [*history, *request.prompt_token_ids[-3:]][: self.max_model_len - 6]
        sampling = msgspec.structs.replace(request.sampling, max_tokens=self.draw.randrange(1, 5))
        return msgspec.structs.replace(request, prompt_token_ids=prompt, sampling=sampling, cache_salt="")


def make_connected_world(draw: random.Random) -> ConnectedWorld:
    """The same with peers; what KV transfer does not go with is left out."""
    world = make_world(draw, speculative_method=None, pipeline_parallel_size=1)
    share = draw.choice((0.2, 0.5, 1.0))
    worker, connector = connect(world.engine, retained_share=share, vocab_size=VOCABULARY)
    return ConnectedWorld(world.engine, world.runner, world.max_model_len, draw, worker=worker, connector=connector)


def make_world(
    draw: random.Random, setups: dict[str, tuple[Any, ...]] = SETUPS, kind: type[World] = World, **fixed: Any
) -> World:
    """A random engine with a pool that holds at least one sequence and often hardly more."""
    setup = {name: draw.choice(choices) for name, choices in setups.items()} | fixed
    page_size, spare_pages = setup.pop("page_size"), setup.pop("spare_pages")
    if setup["speculative_method"] is not None:
        setup |= {"pipeline_parallel_size": 1, "max_speculative_rows": draw.choice((2, 8))}
    if setup["speculative_method"] == "draft_model":
        setup |= {"speculative_model": "a smaller one"}
    lengths = (20, 64, 150, 3 * page_size, 3 * page_size // 2)
    max_model_len = setup.pop("max_model_len", None) or draw.choice(lengths)
    kv_cache = kv_cache_config(setup.pop("windows"), max_model_len)
    if num_checkpoints := setup.pop("num_checkpoints", 0):
        states = KVGroup("recurrent_state", (1, 2))
        kv_cache = replace(kv_cache, state_group=states, num_checkpoints=num_checkpoints)
    chunk = setup["long_prefill_token_threshold"] or setup["max_num_batched_tokens"] or 2048
    num_pages = kv_cache.most_pages(max_model_len, page_size, chunk) + spare_pages
    made = make_engine(num_pages, page_size, max_model_len, kv_cache=kv_cache, draw=draw, **setup)
    return (TieredWorld if "num_tier_pages" in setup else kind)(*made, max_model_len, draw)


class EngineMachine(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 2**32))
    def start(self, seed: int) -> None:
        self.world = make_world(random.Random(seed))

    @rule(count=st.integers(1, 4))
    def add(self, count: int) -> None:
        for _ in range(count):
            self.world.add()

    @rule()
    def add_beams(self) -> None:
        self.world.add_beams()

    @precondition(lambda self: self.world.live)
    @rule()
    def abort(self) -> None:
        self.world.abort()

    @rule(what=st.sampled_from(("launch", "collect")))
    def break_next(self, what: str) -> None:
        self.world.break_next(what)

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.world.step()

    @invariant()
    def invariants_hold(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


EngineMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestEngineMachine = EngineMachine.TestCase


class WindowedMachine(EngineMachine):
    """The same with several KV groups: pages behind windows are freed while sequences run."""

    @initialize(seed=st.integers(0, 2**32))
    def start(self, seed: int) -> None:
        self.world = make_world(random.Random(seed), SETUPS | WINDOWED)


WindowedMachine.TestCase.settings = EngineMachine.TestCase.settings
TestWindowedMachine = WindowedMachine.TestCase


class RecurrentMachine(EngineMachine):
    """The same with a recurrent state and checkpoints of it."""

    @initialize(seed=st.integers(0, 2**32))
    def start(self, seed: int) -> None:
        self.world = make_world(random.Random(seed), SETUPS | RECURRENT)


RecurrentMachine.TestCase.settings = EngineMachine.TestCase.settings
TestRecurrentMachine = RecurrentMachine.TestCase


class TieredMachine(EngineMachine):
    """Events come with tiers in main memory and on a disk: copies take long, fail, and come back changed."""

    @initialize(seed=st.integers(0, 2**32))
    def start(self, seed: int) -> None:
        self.world = make_world(random.Random(seed), SETUPS | TIERED)

    @rule(what=st.sampled_from(("flip", "fail_copy", "fail_disk")))
    def break_tier(self, what: str) -> None:
        break_tier(self.world, what)

    @rule(count=st.integers(1, 4))
    def write_behind(self, count: int) -> None:
        if not self.world.engine.has_work:
            for _ in range(count):
                self.world.engine.write_behind()


def break_tier(world: World, what: str) -> None:
    """Changes a page in main memory, or fails the next copy to or from a tier."""
    host, disk = world.runner.host_memory, world.runner.disk_memory
    assert host is not None
    if what == "flip":
        host.flip()
    elif what == "fail_copy":
        host.error = "told to fail"
    elif disk is not None:
        disk.error = "told to fail"


TieredMachine.TestCase.settings = EngineMachine.TestCase.settings
TestTieredMachine = TieredMachine.TestCase


class EvictingMachine(EngineMachine):
    """The same with sequences that lose cached tokens."""

    @initialize(seed=st.integers(0, 2**32))
    def start(self, seed: int) -> None:
        self.world = make_world(random.Random(seed), SETUPS | EVICTING, kind=EvictingWorld)


EvictingMachine.TestCase.settings = settings(EngineMachine.TestCase.settings, max_examples=20)
TestEvictingMachine = EvictingMachine.TestCase


class ConnectedMachine(EngineMachine):
    """The same with peers: pins, lost and slow ones, hostile messages, prompts that are cancelled or refused."""

    world: ConnectedWorld

    @initialize(seed=st.integers(0, 2**32))
    def start(self, seed: int) -> None:
        self.world = make_connected_world(random.Random(seed))

    @rule(what=st.sampled_from(("add_receiving", "add_retained")), count=st.integers(1, 3))
    def add_for_proxy(self, what: str, count: int) -> None:
        for _ in range(count):
            getattr(self.world, what)()

    @rule(what=st.sampled_from(("request_prefill", "request_read", "send_nonsense", "answer", "settle", "expire")))
    def peers(self, what: str) -> None:
        getattr(self.world, what)()


ConnectedMachine.TestCase.settings = EngineMachine.TestCase.settings
TestConnectedMachine = ConnectedMachine.TestCase


def test_every_text_is_right_when_pages_and_states_of_preempted_sequences_come_back_changed() -> None:
    """Forty engines, 250 events each; the sums show that the events reach what they are meant to try."""
    tight = {"num_host_pages": (40,), "spare_pages": (0, 1, 2), "page_size": (16, 16, 32)}
    tight |= {"speculative_method": (None,)}  # a pretended draft takes what came back changed for a fault of its own
    swaps = mismatches = cached_tokens = 0
    for seed in range(40):
        draw = random.Random(seed)
        world = make_world(draw, SETUPS | (RECURRENT if seed % 3 == 0 else {}) | tight)
        for _ in range(250):
            draw.choices((world.add, world.abort, world.step), weights=(1, 0.2, 5))[0]()
            if draw.random() < 0.15:
                world.runner.num_swap_flips = draw.choice((0, 1, 2))
                world.runner.num_state_flips = int(seed % 3 == 0 and draw.random() < 0.5)
            world.engine.scheduler.kv_cache.swap_tier.is_on = True  # what it does when it is off is another test's
            world.check()
        world.drain()
        stats = world.engine.stats()
        swaps += world.num_swaps
        mismatches += stats.kv_tiers.tiers["swap"].mismatches
        cached_tokens += stats.cached_prompt_tokens
    assert swaps > mismatches > 20
    assert cached_tokens > 100


def test_no_page_is_leaked_when_peers_pin_hang_and_lie() -> None:
    """Sixty engines, 200 events each; the sums show that the events reach what they are meant to try."""
    received = sent = fallbacks = kept_out = expired = faults = 0
    for seed in range(60):
        draw = random.Random(seed)
        world = make_connected_world(draw)
        events = (
            *(world.add, world.abort, world.step, world.add_receiving, world.add_retained),
            *(world.request_prefill, world.request_read, world.send_nonsense, world.answer, world.settle, world.expire),
        )
        for _ in range(200):
            draw.choices(events, weights=(0.6, 0.3, 6, 0.6, 0.5, 0.6, 0.5, 0.2, 2, 0.2, 0.1))[0]()
            world.check()
            kept_out += world.engine.only_receives
        world.drain()
        stats = world.engine.stats().kv_transfer
        received += world.num_consumed
        sent += world.num_sent
        fallbacks += stats.fallbacks.get("bad_message", 0)
        expired += stats.leases_expired
        faults += stats.faults
    assert min(received, sent, kept_out, expired, faults) > 20


def test_no_page_is_leaked_when_requests_have_latency_targets() -> None:
    """Targets from a hundredth of a millisecond on: some can be met here, and some cannot."""
    preemptions = refused = finished = 0
    for seed in range(15):
        draw = random.Random(seed)
        ttft_ms, itl_ms = draw.choice((None, 0.01, 5.0, 1000.0)), draw.choice((None, 0.01, 1.0, 100.0))
        world = make_world(draw, scheduling_policy="slo", slo_ttft_ms=ttft_ms, slo_itl_ms=itl_ms, spare_pages=1)
        for _ in range(200):
            draw.choices((world.add, world.add_beams, world.abort, world.step), weights=(1, 0.3, 0.3, 5))[0]()
            world.check()
        world.drain()
        preemptions += world.engine.stats().preemptions
        refused += world.num_refused
        finished += len(world.histories)
    assert min(preemptions, refused, finished) > 20


def test_no_page_leaks_after_10_000_random_events() -> None:
    """Sixty engines, 200 events each; the sums show that the events reach what they are meant to try."""
    preemptions = cached_tokens = copies = swaps = searches = drafts = accepted = 0
    for seed in range(60):
        draw = random.Random(seed)
        world = make_world(draw)
        for _ in range(200):
            draw.choices((world.add, world.add_beams, world.abort, world.step), weights=(1, 0.5, 0.3, 5))[0]()
            world.check()
        world.drain()
        stats = world.engine.stats()
        preemptions += stats.preemptions
        cached_tokens += stats.cached_prompt_tokens
        copies += world.num_copies
        swaps += world.num_swaps
        searches += world.num_searches
        drafts += stats.draft_tokens
        accepted += sum(stats.accepted_tokens_by_position)
    assert drafts > 1_500
    assert drafts / 4 < accepted < drafts
    assert preemptions > 20
    assert cached_tokens > 2_000
    assert copies > 20
    assert searches > 200
    assert 5 < swaps < preemptions


def test_no_page_is_leaked_when_sequences_lose_cached_tokens() -> None:
    """Twenty-five engines, 150 events each; the sums show that the events reach what they are meant to try."""
    preemptions = cached_tokens = copies = swaps = compactions = 0
    for seed in range(25):
        draw = random.Random(seed)
        world = make_world(draw, SETUPS | EVICTING, kind=EvictingWorld)
        for _ in range(150):
            draw.choices((world.add, world.add_beams, world.abort, world.step), weights=(1, 0.2, 0.3, 5))[0]()
            world.check()
        world.drain()
        preemptions += world.engine.stats().preemptions
        cached_tokens += world.engine.stats().cached_prompt_tokens
        copies += world.num_copies
        swaps += world.num_swaps
        compactions += world.num_compactions
    assert compactions > 200
    assert preemptions > 2
    assert cached_tokens > 1_000
    assert copies > 20
    assert swaps > 0


def test_no_page_is_leaked_when_pages_behind_windows_are_freed() -> None:
    """Sixty engines, 200 events each; the sums show that the events reach what they are meant to try."""
    preemptions = cached_tokens = copies = searches = freed = 0
    for seed in range(60):
        draw = random.Random(seed)
        world = make_world(draw, SETUPS | WINDOWED)
        for _ in range(200):
            draw.choices((world.add, world.add_beams, world.abort, world.step), weights=(1, 0.3, 0.3, 5))[0]()
            world.check()
            freed += world.num_freed
        world.drain()
        stats = world.engine.stats()
        preemptions += stats.preemptions
        cached_tokens += stats.cached_prompt_tokens
        copies += world.num_copies
        searches += world.num_searches
    assert preemptions > 20
    assert cached_tokens > 2_000
    assert copies > 20
    assert searches > 100
    assert freed > 2_000


def test_every_row_goes_on_from_its_state_when_prompts_resume_from_checkpoints() -> None:
    """Sixty engines, 300 events each; the sums show that the events reach what they are meant to try."""
    resuming = {"page_size": (16,), "spare_pages": (0, 40), "max_num_seqs": (8,), "enable_prefix_caching": (True,)}
    preemptions = cached_tokens = resumed = 0
    for seed in range(60):
        draw = random.Random(seed)
        world = make_world(draw, SETUPS | RECURRENT | resuming)
        for _ in range(300):
            draw.choices((world.add, world.abort, world.step), weights=(1, 0.3, 5))[0]()
            world.check()
        world.drain()
        preemptions += world.engine.stats().preemptions
        cached_tokens += world.engine.stats().cached_prompt_tokens
        resumed += world.runner.num_resumed
    assert preemptions > 10
    assert cached_tokens > 500
    assert resumed > 30


def run_with_tiers(world: World, draw: random.Random, seed: int) -> None:
    """Has 250 events happen, and all requests end. By its seed an engine has up to three kinds of broken tiers."""
    broken = ("flip", "fail_copy", "fail_disk")[: seed % 4]
    for _ in range(250):
        draw.choices((world.add, world.add_beams, world.abort, world.step), weights=(1, 0.1, 0.3, 5))[0]()
        if broken and draw.random() < 0.02:
            break_tier(world, draw.choice(broken))
        if not world.engine.has_work:
            world.engine.write_behind()
        world.check()
    world.drain()


def test_every_text_is_right_when_blocks_come_back_from_tiers_or_are_lost() -> None:
    """Thirty engines, 250 events each; the sums show that the events reach what they are meant to try."""
    host_tokens = disk_tokens = mismatches = errors = preemptions = 0
    for seed in range(30):
        draw = random.Random(seed)
        world = make_world(draw, SETUPS | TIERED)
        run_with_tiers(world, draw, seed)
        stats = world.engine.stats()
        tiers = stats.kv_tiers.tiers
        host_tokens += tiers["host"].hit_tokens
        disk_tokens += tiers["disk"].hit_tokens if "disk" in tiers else 0
        mismatches += sum(tier.mismatches for tier in tiers.values())
        errors += sum(tier.errors for tier in tiers.values())
        preemptions += stats.preemptions
    assert host_tokens > 300
    assert disk_tokens > 15
    assert mismatches > 0
    assert errors > 5
    assert preemptions > 2


@pytest.mark.parametrize("groups", [RECURRENT, WINDOWED], ids=["states", "windows"])
def test_every_text_is_right_when_groups_come_back_from_tiers_or_are_lost(groups: dict[str, tuple[Any, ...]]) -> None:
    """Forty engines of models with recurrent state, or with several KV groups, 250 events each. A row that goes on from
    the state of another place, or reads another group's page, fails in the fake runner.
    """
    host_tokens = disk_tokens = loads = mismatches = errors = prefetched = 0
    wide = {"num_tier_pages": ((3, 0), (12, 0), (60, 0), (6, 20), (8, 60), (60, 60))}
    for seed in range(40):
        draw = random.Random(seed)
        world = make_world(draw, SETUPS | TIERED | groups | wide)
        run_with_tiers(world, draw, seed)
        tiers = world.engine.stats().kv_tiers.tiers
        host_tokens += tiers["host"].hit_tokens
        disk_tokens += tiers["disk"].hit_tokens if "disk" in tiers else 0
        mismatches += sum(tier.mismatches for tier in tiers.values())
        errors += sum(tier.errors for tier in tiers.values())
        prefetched += sum(tier.prefetch_used_tokens for tier in tiers.values())
        assert world.runner.host_memory is not None
        loads += world.runner.host_memory.num_state_loads if groups is RECURRENT else world.runner.host_memory.num_loads
    assert host_tokens > 300
    assert disk_tokens > 15
    assert loads > 50
    assert prefetched > 30
    assert mismatches > 0
    assert errors > 5
