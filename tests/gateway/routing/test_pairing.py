"""Pairs as tables: engines of all roles with hits and loads in, who computes the prompt and why out."""

from collections import Counter
from dataclasses import replace
from math import inf
from random import Random
from typing import Any

import pytest

from mini_infer_contract.blocks import block_keys
from mini_infer_contract.events import BlockStored, LoadReport
from mini_infer_contract.launch import Endpoint
from mini_infer_gateway.fleet.backlog import Backlog, Entry
from mini_infer_gateway.fleet.load import LoadLedger
from mini_infer_gateway.fleet.tier_rates import TierRates
from mini_infer_gateway.fleet.transfer_rates import TransferRates
from mini_infer_gateway.index.prefix_index import PrefixIndex, prompt_root
from mini_infer_gateway.routing.base import Candidate, Decision, PromptKeys, RoutingRequest
from mini_infer_gateway.routing.pairing import Pairing
from mini_infer_gateway.routing.policies import POLICIES, Policy, build_router
from mini_infer_gateway.routing.router import Router

BLOCKS = 256
KEYS = [number.to_bytes(16, "big") for number in range(BLOCKS)]
TOKENS = BLOCKS * 16
REQUEST = RoutingRequest("m", TOKENS, {"r": PromptKeys(TOKENS, (KEYS,))})
IDLE = (0, 0, 0)


def engine(name: str, **fields: Any) -> Candidate:
    """The first letter of its name is its role."""
    role = {"p": "prefill", "d": "decode", "u": "unified"}[name[0]]
    place = {"service": "ns/s", "revision": "1", "transfer": f"tcp://{name}:5559"}
    place |= {key: fields.pop(key) for key in place if key in fields}
    endpoint = Endpoint(name=name, url="", model="m", role=role, **place)
    return Candidate(endpoint, **{"assets_revision": "r", "index": "exact", **fields})


def router(
    hits: dict[str, int] | None = None,
    loads: dict[str, tuple[int, int, int]] | None = None,
    *,
    limit: int | None = None,
    policy: Policy = "prefix",
    backlog: Backlog | None = None,
    transfers: TransferRates | None = None,
) -> Router:
    """`hits`: blocks held by name; `loads`: (running, waiting, queued tokens); all compute 20,000 tokens a second."""
    index, ledger = PrefixIndex(10_000), LoadLedger()
    for name, blocks in (hits or {}).items():
        index.guess(name, KEYS[:blocks], 1.0)
    for name, (running, waiting, queued) in (loads or {}).items():
        ledger.report(name, LoadReport(0.0, running, waiting, queued, 0.0))
    pairing = Pairing(transfers or TransferRates(), limit)
    return build_router(policy, index, ledger, Random(0), backlog=backlog, pairing=pairing)


def route(routing: Router, candidates: list[Candidate], request: RoutingRequest = REQUEST) -> Decision:
    decision = routing.route(request, candidates, 0.0)
    assert decision is not None
    return decision


def prefill_name(decision: Decision) -> str:
    return decision.prefill.name if decision.prefill else ""


# 4,096 tokens take 205 ms, beside a decode engine's requests they count double.
@pytest.mark.parametrize(
    ("candidates", "hits", "loads", "prefill", "reason"),
    [
        pytest.param(["p", "d"], {}, {}, "p", "cheaper", id="a long prompt"),
        pytest.param(["p", "d"], {"d": 255}, {}, "", "short", id="all of it is there"),
        pytest.param(["p", "d"], {"p": 255}, {}, "p", "cheaper", id="the prefill engine holds it: it only moves"),
        pytest.param(["p", "d"], {}, {"p": (9, 0, 6_000)}, "", "dearer", id="a long queue at the prefill engine"),
        pytest.param(["p", "d"], {}, {"p": (9, 0, 6_000), "d": (40, 0, 0)}, "p", "cheaper", id="many decode: it waits"),
        pytest.param(["p", "d"], {}, {"p": (9, 0, 30_000), "d": (40, 0, 0)}, "", "dearer", id="but not for ever"),
        pytest.param(["p", "d"], {}, {"p": (9, 0, 6_000), "d": (1, 0, 6_000)}, "p", "cheaper", id="queues at both"),
        pytest.param(["p", "u"], {}, {}, "", "dearer", id="an idle unified engine delays nobody"),
        pytest.param(["p", "u"], {}, {"u": (8, 0, 0)}, "p", "cheaper", id="a busy one does"),
        pytest.param(["p1", "p2", "d"], {}, {"p1": (1, 0, 900)}, "p2", "cheaper", id="the idler prefill engine"),
        pytest.param(["p1", "p2", "d"], {"p1": 128}, {}, "p1", "cheaper", id="the one that holds some of it"),
        pytest.param(["d"], {}, {}, "", "", id="no prefill engine: nothing to choose"),
        pytest.param(["u1", "u2"], {}, {}, "", "", id="nor among unified ones"),
    ],
)
def test_prefill_engine_is_chosen_by_hits_and_loads(
    candidates: list[str], hits: dict[str, int], loads: dict[str, tuple[int, int, int]], prefill: str, reason: str
) -> None:
    decision = route(router(hits, loads), [engine(name) for name in candidates])
    assert decision.decode.name[0] != "p"
    assert (prefill_name(decision), decision.prefill_reason) == (prefill, reason)
    assert decision.endpoints == ((decision.decode, decision.prefill) if decision.prefill else (decision.decode,))
    if decision.prefill:
        assert decision.prefill_tokens == TOKENS - 16 * hits.get(prefill, 0)


@pytest.mark.parametrize(
    "unfit",
    [
        pytest.param(engine("p", ready=False), id="not ready"),
        pytest.param(engine("p", circuit_open=True), id="its circuit is open"),
        pytest.param(engine("p", reporting=False), id="its load reports stopped"),
        pytest.param(engine("p", transfer=""), id="no transfer address"),
        pytest.param(engine("ptried"), id="it failed this request already"),
    ],
)
def test_a_prefill_engine_is_left_out_when_it_is_not_eligible(unfit: Candidate) -> None:
    request = replace(REQUEST, attempted=frozenset({"ptried"}))
    alone = route(router(), [unfit, engine("d")], request)
    assert (alone.prefill, alone.prefill_reason) == (None, "no_prefill_endpoint")
    assert prefill_name(route(router(), [unfit, engine("d"), engine("pwell")], request)) == "pwell"


@pytest.mark.parametrize("other", [{"revision": "2"}, {"service": "ns/other"}, {"assets_revision": "another"}])
def test_pairs_have_the_same_service_and_revision(other: dict[str, str]) -> None:
    strange = engine("p2", **other)
    assert route(router(), [strange, engine("d")]).prefill_reason == ""
    assert prefill_name(route(router({"p2": 200}), [strange, engine("p1"), engine("d")])) == "p1"
    decision = route(router(), [engine("p1"), strange, engine("d2", **other)])
    assert prefill_name(decision) == "p2"


def test_a_decode_engine_computes_its_prompts_when_it_has_no_transfer_address() -> None:
    assert route(router(), [engine("p"), engine("d", transfer="")]).prefill is None


def test_nothing_is_routed_when_only_prefill_engines_exist() -> None:
    assert router().route(REQUEST, [engine("p1"), engine("p2")], 0.0) is None


@pytest.mark.parametrize(("role", "prefill"), [("prefill", "u2"), ("decode", ""), ("", "")])
def test_the_reported_role_replaces_the_listed_one_when_an_engine_switched(role: str, prefill: str) -> None:
    decision = route(router(loads={"u1": (8, 0, 0)}), [engine("u1", role="decode"), engine("u2", role=role)])
    assert prefill_name(decision) == prefill
    assert decision.decode.name == ("u1" if prefill else "u2")


@pytest.mark.parametrize(
    ("limit", "stored_blocks", "reason"),
    [(0, 255, "forced"), (0, 0, "forced"), (1024, 192, "short"), (1024, 191, "forced"), (1 << 30, 0, "short")],
)
def test_the_local_prefill_limit_replaces_the_learned_break_even(limit: int, stored_blocks: int, reason: str) -> None:
    routing = router({"d": stored_blocks}, {"p": (9, 0, 100_000)}, limit=limit)
    decision = route(routing, [engine("p"), engine("d")])
    assert decision.prefill_reason == reason
    assert (decision.prefill is not None) == (reason == "forced")
    assert decision.break_even_tokens == limit


def test_a_prompt_is_computed_locally_when_its_request_cannot_be_split() -> None:
    decision = route(router(), [engine("p"), engine("d")], replace(REQUEST, may_split=False))
    assert (decision.prefill, decision.prefill_reason, decision.break_even_tokens) == (None, "", inf)


def test_waiting_requests_count_as_the_queue_of_their_prefill_engine() -> None:
    backlog = Backlog()
    backlog.add(Entry((0, 0.0, 0), "m"), "p1", 900)
    request = replace(REQUEST, order=(0, 1.0, 1))
    assert prefill_name(route(router(backlog=backlog), [engine("p1"), engine("p2"), engine("d")], request)) == "p2"


def test_any_decode_engine_can_be_chosen_when_a_prefill_engine_has_the_prefix_cached() -> None:
    hits = {"d1": 255, "p": 255}
    loads = {"d1": (40, 0, 0), "d2": (2, 0, 0)}
    decode = [engine("d1"), engine("d2")]
    assert route(router(hits, loads), decode).decode.name == "d1"  # computing it again would take longer
    decision = route(router(hits, loads), [*decode, engine("p")])
    assert (decision.decode.name, prefill_name(decision)) == ("d2", "p")
    assert decision.hit_tokens == 0  # as it is, not as it was counted


def test_a_prompt_is_computed_locally_when_the_link_is_slow() -> None:
    transfers = TransferRates()
    transfers.report("d", LoadReport(0.0, 0, 0, 0, 0.0, transfer_bytes_per_s=1e8))
    decision = route(router(transfers=transfers), [engine("p"), engine("d")])
    assert (decision.prefill_reason, decision.break_even_tokens) == ("dearer", inf)


@pytest.mark.parametrize(
    ("hits", "loads", "peer"),
    [
        pytest.param({"u1": 255}, {"u1": (120, 0, 0)}, "u1", id="a busy peer holds it"),
        pytest.param({"u1": 255, "u2": 250}, {"u1": (120, 0, 0)}, "", id="what it holds more is too little"),
        pytest.param({"u1": 10}, {"u1": (120, 0, 0)}, "", id="the peer holds too little"),
    ],
)
def test_kv_is_fetched_from_a_peer_when_that_is_cheaper_than_computing(
    hits: dict[str, int], loads: dict[str, tuple[int, int, int]], peer: str
) -> None:
    decision = route(router(hits, loads), [engine("u1"), engine("u2")])
    assert decision.decode.name == "u2"
    assert (decision.fetch.name if decision.fetch else "") == peer
    assert decision.prefill_reason == ("fetch" if peer else "")
    assert decision.endpoints == (decision.decode,)


@pytest.mark.parametrize(
    "unfit",
    [{"revision": "2"}, {"transfer": ""}, {"reporting": False}, {"index": "approximate"}, {"index": "stale"}],
)
def test_kv_is_not_fetched_when_the_peer_is_unfit(unfit: dict[str, Any]) -> None:
    routing = router({"u1": 255}, {"u1": (120, 0, 0)})
    decision = route(routing, [engine("u1", **unfit), engine("u2")])
    assert (decision.decode.name, decision.fetch) == ("u2", None)


@pytest.mark.parametrize(
    ("medium", "host_tokens_per_s", "peer"),
    [
        ("GPU", 0.0, "u1"),
        ("CPU", 0.0, "u1"),  # loads are taken to be four times as fast as prefill
        ("CPU", 200_000.0, "u1"),
        ("CPU", 1_000.0, ""),  # it would rather compute than load
        ("DISK", 0.0, ""),
    ],
)
def test_kv_is_fetched_from_a_peers_main_memory_when_its_load_and_transfer_are_cheaper_than_computing(
    medium: str, host_tokens_per_s: float, peer: str
) -> None:
    index, ledger, tiers = PrefixIndex(10_000), LoadLedger(), TierRates()
    tokens = list(range(TOKENS))
    keys = block_keys(tokens, prompt_root())
    index.apply("u1", [BlockStored(list(range(255)), None, tokens[: 255 * 16], 16, medium=medium)])
    busy = LoadReport(0.0, 120, 0, 0, 0.0, host_tokens_per_s=host_tokens_per_s)
    ledger.report("u1", busy)
    tiers.report("u1", busy)
    routing = build_router("prefix", index, ledger, Random(0), pairing=Pairing(TransferRates(), None), tier_rates=tiers)
    request = RoutingRequest("m", TOKENS, {"r": PromptKeys(TOKENS, (keys,))})
    decision = route(routing, [engine("u1"), engine("u2")], request)
    assert decision.decode.name == "u2"
    assert (decision.fetch.name if decision.fetch else "") == peer


def test_a_prefill_engine_is_preferred_to_a_peer_when_both_have_the_prefix_cached() -> None:
    decision = route(
        router({"u1": 255, "p": 255}, {"u1": (120, 0, 0), "u2": (32, 0, 0)}), [*map(engine, ("u1", "u2", "p"))]
    )
    assert (decision.decode.name, prefill_name(decision), decision.fetch) == ("u2", "p", None)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_spreads_pairs_over_prefill_and_decode_engines(policy: Policy) -> None:
    routing = router(policy=policy)
    candidates = [*map(engine, ("p1", "p2", "d1", "d2"))]
    chosen = Counter((d.decode.name, prefill_name(d)) for d in (route(routing, candidates) for _ in range(200)))
    for name in ("d1", "d2"):
        assert 60 < sum(count for pair, count in chosen.items() if name in pair) < 140
    for name in ("p1", "p2"):
        assert 60 < sum(count for pair, count in chosen.items() if name in pair) < 140
