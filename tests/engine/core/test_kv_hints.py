"""What a client says of a session after its answer decides what of it is evicted, and when."""

import msgspec
import pytest

from mini_infer_contract.blocks import root_key
from mini_infer_engine.config.model.kv_groups import kv_cache_config
from mini_infer_engine.core.engine import Engine
from mini_infer_engine.core.request import Request, SamplingParams
from tests.support.engine_world import make_engine

PROMPT, OTHER = [1, 2, 3, 4] * 16, [9, 8, 7] * 16
NUM_PAGES = 30


def engine_with() -> Engine:
    return make_engine(NUM_PAGES, 16, 200)[0]


def request(prompt: list[int], **fields: object) -> Request:
    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    return msgspec.structs.replace(
        Request(request_id=f"{prompt[0]}#0", prompt_token_ids=prompt, sampling=sampling), **fields
    )


def run(engine: Engine, one: Request) -> None:
    engine.add(one)
    while engine.has_work:
        engine.step()


def pages_of(engine: Engine, prompt: list[int]) -> list[int]:
    return engine.scheduler.kv_cache.longest_cached(prompt, root_key("revision"))[0]


def evicted(engine: Engine, count: int) -> set[int]:
    """The pages that are evicted first."""
    return set(engine.scheduler.kv_cache.pool.least_recently_used(count))


@pytest.mark.parametrize("lease_s", [0.0, 600.0])
def test_a_session_is_evicted_first_when_its_client_says_that_it_is_done(lease_s: float) -> None:
    engine = engine_with()
    run(engine, request(OTHER))
    run(engine, request(PROMPT, lease_s=lease_s))
    own = pages_of(engine, PROMPT)
    assert len(own) == 4
    assert evicted(engine, 4) != set(own)
    engine.hint(request([*PROMPT, 5], lease_s=-1.0))
    assert evicted(engine, 4) == set(own)
    assert engine.scheduler.kv_cache.pool.least_recently_used(1) == [own[-1]], "the end of the prefix first"


def test_pages_that_another_session_leases_stay_when_one_is_done() -> None:
    engine = engine_with()
    run(engine, request([*PROMPT[:32], *OTHER], lease_s=600.0))
    run(engine, request(PROMPT, lease_s=600.0))
    run(engine, request([*PROMPT[:32], *OTHER, 5], lease_s=600.0))  # the shared pages have its lease now
    shared, own = pages_of(engine, PROMPT)[:2], pages_of(engine, PROMPT)[2:]
    engine.hint(request([*PROMPT, 5], lease_s=-1.0))
    assert evicted(engine, 2) == set(own)
    assert not evicted(engine, 4).intersection(shared)


def test_a_session_is_evicted_late_when_its_client_says_that_it_returns() -> None:
    engine = engine_with()
    run(engine, request(PROMPT))
    run(engine, request(OTHER))
    own = pages_of(engine, PROMPT)
    assert evicted(engine, 4) == set(own)
    engine.hint(request([*PROMPT, 5], lease_s=60.0, pins=True))
    assert not evicted(engine, 3).intersection(own)
    assert engine.scheduler.kv_cache.pool._cached.num_pinned == 4
    engine.hint(request([*PROMPT, 5], lease_s=-1.0))
    assert evicted(engine, 4) == set(own)


def test_a_hint_counts_when_the_request_still_runs() -> None:
    engine = engine_with()
    run(engine, request(OTHER))
    engine.add(request(PROMPT, sampling=SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)))
    for _ in range(5):
        engine.step()
    engine.hint(request([*PROMPT, 5], lease_s=-1.0))
    while engine.has_work:
        engine.step()
    assert evicted(engine, 4) == set(pages_of(engine, PROMPT))


@pytest.mark.parametrize("lease_s", [-1.0, 5.0])
def test_nothing_changes_when_the_session_is_not_cached(lease_s: float) -> None:
    engine = engine_with()
    run(engine, request(OTHER))
    before = engine.scheduler.kv_cache.pool.least_recently_used(NUM_PAGES)
    engine.hint(request(PROMPT, lease_s=lease_s))
    engine.hint(request([3], lease_s=lease_s))
    engine.hint(request(OTHER, lease_s=lease_s, cache_salt="another"))
    assert engine.scheduler.kv_cache.pool.least_recently_used(NUM_PAGES) == before
    assert not engine.has_work


def test_pages_of_all_groups_are_evicted_first_when_layers_have_windows() -> None:
    engine, _ = make_engine(60, 16, 200, kv_cache=kv_cache_config((None, 20), 200))
    run(engine, request(OTHER))
    run(engine, request(PROMPT, lease_s=600.0))
    pool = engine.scheduler.kv_cache.pool
    num_leased = len(pool._cached._lease_of)
    assert num_leased > 4
    engine.hint(request([*PROMPT, 5], lease_s=-1.0))
    assert len(pool._cached._lease_of) < num_leased
    assert len(pool._cached._done) >= 4
