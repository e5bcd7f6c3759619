"""Routing as tables: candidates with hits and loads in, the chosen one and the reason out."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from mini_infer_contract.blocks import block_keys
from mini_infer_contract.events import BlockStored, LoadReport
from mini_infer_contract.launch import Endpoint
from mini_infer_gateway.fleet.backlog import Backlog, Entry
from mini_infer_gateway.fleet.load import LoadLedger
from mini_infer_gateway.fleet.prefill_rates import PrefillRates
from mini_infer_gateway.index.prefix_index import PrefixIndex, prompt_root
from mini_infer_gateway.routing.base import Candidate, Features, PromptKeys, RoutingRequest
from mini_infer_gateway.routing.pickers.highest_score import HighestScore
from mini_infer_gateway.routing.policies import POLICIES, Policy, build_router
from mini_infer_gateway.routing.router import Router
from mini_infer_gateway.routing.scorers.cached_prefix import CachedPrefix
from mini_infer_gateway.routing.scorers.decode_slots import DecodeSlots
from mini_infer_gateway.routing.scorers.queue_wait import QueueWait
from mini_infer_gateway.routing.seconds import HORIZON_S, busy_share, score_of

KEYS = [bytes([number]) * 16 for number in range(64)]
PROMPT = PromptKeys(1024, (KEYS,))
REQUEST = RoutingRequest("m", 1024, {"r": PROMPT})


def candidate(name: str, **fields: object) -> Candidate:
    role = str(fields.pop("role", "unified"))
    return Candidate(Endpoint(name=name, url="", model="m", role=role), **{"assets_revision": "r", **fields})  # type: ignore[arg-type]


def router(
    hits: dict[str, int], loads: dict[str, tuple[int, int, int]] | None = None, policy: Policy = "prefix", seed: int = 0
) -> Router:
    """`hits`: blocks held by name; `loads`: (running, waiting, queued tokens) by name."""
    index, ledger = PrefixIndex(10_000), LoadLedger()
    for name, blocks in hits.items():
        index.guess(name, KEYS[:blocks], 1.0)
        # All hold equally much, so that only this prompt makes a difference.
        index.guess(name, [b"%08d" % number for number in range(64 - blocks)], 1.0)
    for name, (running, waiting, queued) in (loads or {}).items():
        ledger.report(name, LoadReport(0.0, running, waiting, queued, 0.0))
    return build_router(policy, index, ledger, Random(seed))


# A hit of 640 tokens is worth 0.1 s at the rate that is guessed where nothing is known, 0.18 s beside one busy of two.
SHORT_QUEUE, LONG_QUEUE = (0, 0, 2_000), (0, 0, 5_000)
MANY_WAIT, LARGE_BATCH = (0, 20, 0), (20, 0, 0)


@pytest.mark.parametrize(
    ("hits", "loads", "chosen", "reason"),
    [
        pytest.param({"a": 0, "b": 40}, {}, "b", "cached_prefix", id="the larger hit"),
        pytest.param({"a": 30, "b": 40}, {}, "b", "cached_prefix", id="also of two"),
        pytest.param({"a": 0, "b": 40}, {"b": SHORT_QUEUE}, "b", "cached_prefix", id="worth a wait"),
        pytest.param({"a": 0, "b": 40}, {"b": LONG_QUEUE}, "a", "queue_wait", id="not worth a long one"),
        pytest.param({"a": 0, "b": 40}, {"b": MANY_WAIT}, "a", "decode_slots", id="nor a place behind many"),
        pytest.param({"a": 0, "b": 40}, {"b": LARGE_BATCH}, "a", "decode_slots", id="nor in a large batch"),
        pytest.param({"a": 0, "b": 40}, {"a": LONG_QUEUE, "b": LONG_QUEUE}, "b", "cached_prefix", id="all busy"),
        pytest.param({"a": 0, "b": 0}, {"b": (1, 0, 0)}, "a", "decode_slots", id="no hit: the idler"),
        pytest.param({"a": 0}, {"a": (99, 9, 9999)}, "a", "only", id="no choice"),
    ],
)
def test_router_chooses_by_hits_and_loads(
    hits: dict[str, int], loads: dict[str, tuple[int, int, int]], chosen: str, reason: str
) -> None:
    decision = router(hits, loads).route(REQUEST, [candidate(name) for name in hits], 0.0)
    assert decision is not None
    assert (decision.decode.name, decision.reason) == (chosen, reason)
    assert decision.hit_tokens == hits[chosen] * 16
    assert decision.prefill is None


@pytest.mark.parametrize(
    ("candidates", "eligible"),
    [
        ([candidate("a", ready=False), candidate("b")], ["b"]),
        ([candidate("a", circuit_open=True), candidate("b")], ["b"]),
        ([candidate("a", circuit_open=True)], ["a"]),
        ([candidate("a", circuit_open=True), candidate("b", ready=False)], ["a"]),
        ([candidate("a", role="prefill"), candidate("b", role="decode")], ["b"]),
        ([candidate("tried"), candidate("b", circuit_open=True)], ["b"]),
        ([candidate("tried")], []),
        ([], []),
    ],
)
def test_filters_keep_only_eligible_candidates(candidates: list[Candidate], eligible: list[str]) -> None:
    request = RoutingRequest("m", 10, attempted=frozenset({"tried"}))
    kept = router({}).eligible(request, candidates)
    assert [candidate.endpoint.name for candidate in kept] == eligible
    decision = router({}).route(request, candidates, 0.0)
    assert [decision.decode.name] == eligible if decision else not eligible


def test_ties_are_broken_randomly_and_repeatably_by_seed() -> None:
    candidates = [candidate("a"), candidate("b"), candidate("c")]

    def names(seed: int) -> list[str]:
        routing = router({}, seed=seed)
        return [decision.decode.name for _ in range(300) if (decision := routing.route(REQUEST, candidates, 0.0))]

    assert names(1) == names(1) != names(2)
    assert min(Counter(names(1)).values()) > 60


def test_round_robin_alternates_and_still_reports_hits() -> None:
    routing = router({"a": 0, "b": 40}, policy="round-robin")
    decisions = [routing.route(REQUEST, [candidate("b"), candidate("a")], 0.0) for _ in range(4)]
    assert [(d.decode.name, d.hit_tokens, d.reason) for d in decisions if d] == [
        ("a", 0, "round_robin"),
        ("b", 640, "round_robin"),
    ] * 2


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_routes_when_nothing_is_known(policy: Policy) -> None:
    request = RoutingRequest("m", 0)
    decision = router({}, policy=policy).route(request, [candidate("a", assets_revision=""), candidate("b")], 0.0)
    assert decision is not None
    assert decision.hit_tokens == 0


TIER_TABLES = ("host_tokens", "disk_tokens", "host_rate", "disk_rate")


def features(**tables: list[float]) -> Features:
    """Two candidates, idle but for what is given."""
    names = ("cached_tokens", "shared_tokens", "queued_tokens", "page_wait", *TIER_TABLES)
    return {**{name: [0.0, 0.0] for name in names}, "sharers": [1.0, 1.0], "prefill_rate": [1024.0, 1024.0], **tables}


def lead_s(table: Features) -> float:
    """Seconds by which the cached prefix speaks for the first of two."""
    first, second = CachedPrefix(least_price=1.0, busy_price=5.0).score(REQUEST, table)
    return (first - second) * HORIZON_S


def test_shared_hits_weigh_less_when_more_chains_share_them() -> None:
    def lead(sharers: float, queued: float = 0.0) -> float:
        hits = {"cached_tokens": [512.0, 0.0], "shared_tokens": [512.0, 0.0], "sharers": [sharers, 1.0]}
        return lead_s(features(**hits, queued_tokens=[queued, 0.0]))

    assert lead(1) == lead(2) == pytest.approx(1.0)  # half a second for itself, and once for others
    assert lead(4) == pytest.approx(0.5)
    assert lead(1000) == pytest.approx(0.0, abs=0.01)
    assert lead(1000, queued=1.0) == lead(1, queued=1.0)  # copies are made while there is time


@pytest.mark.parametrize(
    ("queued", "lead"),
    [([0.0, 0.0], 1.0), ([9.0, 0.0], 2.25), ([9.0, 9.0], 3.5)],
)
def test_a_hit_weighs_more_when_the_fleet_is_busier(queued: list[float], lead: float) -> None:
    table = features(cached_tokens=[512.0, 0.0], queued_tokens=queued)
    assert lead_s(table) == pytest.approx(lead)


@pytest.mark.parametrize(
    ("tables", "seconds"),
    [
        ({}, 0.5 + 0.5),  # half a second to compute, and once for others
        ({"host_tokens": [512.0, 0.0]}, 1.0 - 0.5 / 4),  # no rate is known: four times as fast as computing
        ({"host_tokens": [512.0, 0.0], "host_rate": [10_240.0, 0.0]}, 1.0 - 0.05),
        ({"host_tokens": [512.0, 0.0], "host_rate": [64.0, 0.0]}, 1.0 - 0.5),  # never dearer than computing
        ({"disk_tokens": [512.0, 0.0]}, 1.0 - 0.5),
        ({"disk_tokens": [512.0, 0.0], "disk_rate": [5_120.0, 5_120.0]}, 1.0 - 0.1),
        ({"host_tokens": [256.0, 0.0], "disk_tokens": [128.0, 0.0], "host_rate": [2_560.0, 0.0]}, 1.0 - 0.1 - 0.125),
    ],
)
def test_a_hit_costs_the_time_of_its_load_when_it_lies_in_a_slower_tier(
    tables: dict[str, list[float]], seconds: float
) -> None:
    assert lead_s(features(cached_tokens=[512.0, 0.0], **tables)) == pytest.approx(seconds)


def test_decisions_tell_the_tiers_of_their_hit() -> None:
    index = PrefixIndex(1000)
    chain = BlockStored([1, 2, 3], None, list(range(48)), 16)
    index.apply("a", [replace(chain, medium="DISK"), BlockStored([1], None, list(range(16)), 16, medium="CPU")])
    routing = build_router("prefix", index, LoadLedger(), Random(0))
    keys = block_keys(list(range(50)), prompt_root())
    request = RoutingRequest("m", 50, {"r": PromptKeys(50, (keys,))})
    decision = routing.route(request, [candidate("a", assets_revision="r")], 0.0)
    assert decision is not None
    assert (decision.hit_tokens, decision.tiers) == (48, (0, 16, 32))


@pytest.mark.parametrize(("queued", "ms"), [([0.0, 0.0], 5.0), ([9.0, 0.0], 12.5), ([9.0, 9.0], 20.0)])
def test_a_decode_slot_costs_more_when_the_fleet_is_busier(queued: list[float], ms: float) -> None:
    counts = {"running": [3.0, 0.0], "waiting": [0.0, 1.0]}
    first, second = DecodeSlots().score(REQUEST, features(queued_tokens=queued, **counts))
    assert (second - first) * HORIZON_S * 1000 == pytest.approx(2 * ms)


def test_queue_costs_use_each_endpoints_own_prefill_rate() -> None:
    table = features(queued_tokens=[2048.0, 0.0], prefill_rate=[4096.0, 512.0])
    first, second = QueueWait().score(REQUEST, table)
    assert (second - first) * HORIZON_S == pytest.approx(0.5)
    assert lead_s(table) == pytest.approx(2.0 - 0.25)  # the slow one needs two seconds for what nobody holds


ENDPOINTS = st.lists(
    st.tuples(
        st.integers(0, 1200).map(float),  # cached tokens
        st.integers(0, 600).map(float),  # of them shared
        st.integers(1, 40).map(float),  # by so many
        st.sampled_from([0.0, 900.0]),  # queued tokens
    ),
    min_size=1,
    max_size=6,
)


@given(ENDPOINTS, st.sampled_from([512.0, 20_000.0]))
def test_prefix_price_is_the_old_one_when_rates_are_equal(
    endpoints: list[tuple[float, float, float, float]], rate: float
) -> None:
    cached, shared, sharers, queued = (list(column) for column in zip(*endpoints, strict=True))
    shared = list(map(min, shared, cached))
    zeros = [0.0] * len(endpoints)
    table: Features = {
        "cached_tokens": cached,
        "shared_tokens": shared,
        "sharers": sharers,
        "queued_tokens": queued,
        "page_wait": zeros,
        "prefill_rate": [rate] * len(endpoints),
        **dict.fromkeys(TIER_TABLES, zeros),
    }
    busy = busy_share(table)
    missing = [REQUEST.prompt_tokens - hit if hit < REQUEST.prompt_tokens else 1.0 for hit in cached]
    if not busy:
        copies = [max(0.0, 1.0 - len(endpoints) / of) for of in sharers]
        missing = [own + part * copy for own, part, copy in zip(missing, shared, copies, strict=True)]
    old = score_of([(1.0 + 1.5 + 4.0 * busy) * own / rate for own in missing])
    assert CachedPrefix().score(REQUEST, table) == pytest.approx(old)


def route_at_rates(slow: LoadReport, fast: LoadReport, hits: dict[str, int] | None = None) -> str:
    """Routes REQUEST between `slow`, which computes 5,000 tokens a second, and `fast`, which computes 20,000."""
    index, ledger, rates = PrefixIndex(10_000), LoadLedger(), PrefillRates()
    for name, blocks in (hits or {}).items():
        index.guess(name, KEYS[:blocks], 1.0)
    for name, report in (("slow", slow), ("fast", fast)):
        ledger.report(name, report)
        rates.report(name, report)
    routed = build_router("prefix", index, ledger, Random(0), rates=rates)
    decision = routed.route(REQUEST, [candidate("slow"), candidate("fast")], 0.0)
    assert decision is not None
    return decision.decode.name


@pytest.mark.parametrize(
    ("queued", "hits", "chosen"),
    [
        pytest.param(0, {}, "fast", id="both idle"),
        pytest.param(6_000, {}, "slow", id="nobody holds it and the fast one is busy for longer"),
        pytest.param(2_000, {}, "fast", id="the fast one is done sooner all the same"),
        pytest.param(6_000, {"fast": 60}, "fast", id="worth a wait for what the fast one holds"),
        pytest.param(6_000, {"slow": 60}, "slow", id="the slow one holds it"),
    ],
)
def test_an_idle_slower_engine_takes_what_nobody_holds_when_the_faster_one_is_full(
    queued: int, hits: dict[str, int], chosen: str
) -> None:
    idle = LoadReport(0.0, 0, 0, 0, 0.0, prefill_tokens_per_s=5_000.0)
    busy = LoadReport(0.0, 1 if queued else 0, 0, queued, 0.5, prefill_tokens_per_s=20_000.0)
    assert route_at_rates(idle, busy, hits) == chosen


def test_a_wait_for_pages_counts_when_an_endpoint_has_none() -> None:
    ledger, backlog = LoadLedger(), Backlog()
    ledger.report("a", LoadReport(0.0, 30, 2, 0, 1.0))
    ledger.report("b", LoadReport(0.0, 40, 0, 0, 0.5))
    routed = build_router("load", PrefixIndex(100), ledger, Random(0), backlog=backlog)
    both = [candidate("a"), candidate("b")]
    entry = Entry((0, 0.0, 0), "m")
    backlog.add(entry, "a", 100)
    before = routed.route(REQUEST, both, 0.0)
    backlog.pauses.began("a", 0.0)
    after = routed.route(REQUEST, both, 10.0)  # nothing was placed there for ten seconds
    assert before is not None
    assert after is not None
    assert (before.decode.name, after.decode.name) == ("a", "b")


class Loud:
    """Scores far outside [0, 1]."""

    name, needs = "loud", ()

    def score(self, request: RoutingRequest, features: Features) -> list[float]:
        return [1e9, -1e9]


def test_router_clamps_scores_and_times_scorers() -> None:
    ticks = iter(range(1000))
    clamped = Router((), (), ((Loud(), 0.5),), HighestScore(), Random(0), clock=lambda: float(next(ticks)))
    decision = clamped.route(REQUEST, [candidate("a"), candidate("b")], 0.0)
    assert decision is not None
    assert decision.decode.name == "a"
    assert (clamped.times["loud"].calls, clamped.times["loud"].seconds) == (1, 1.0)
    assert clamped._score(REQUEST, {}, 2) == [[0.5, 0.0]]


def test_router_refuses_a_scorer_when_its_data_has_no_producer() -> None:
    with pytest.raises(ValueError, match="queue_wait needs"):
        Router((), (), ((QueueWait(), 1.0),), HighestScore(), Random(0))
