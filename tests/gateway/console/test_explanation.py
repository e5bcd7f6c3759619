"""The explained decision is the router's own, and leaves no trace in it."""

from random import Random
from typing import Any

import pytest

from mini_infer_gateway.console.explanation import explained
from mini_infer_gateway.fleet.load import LoadLedger
from mini_infer_gateway.index.prefix_index import PrefixIndex
from mini_infer_gateway.routing.policies import POLICIES, Policy, build_router
from tests.gateway.routing.test_router import MANY_WAIT, REQUEST, SHORT_QUEUE, candidate, router

NAMES = ("a", "b", "c")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("hits", "loads"),
    [
        ({"a": 0, "b": 40, "c": 10}, {}),
        ({"a": 0, "b": 40, "c": 10}, {"b": MANY_WAIT}),
        ({"a": 10, "b": 10, "c": 10}, {"c": SHORT_QUEUE}),
        ({"a": 0, "b": 0, "c": 0}, {}),
    ],
)
def test_an_explanation_names_what_the_router_chooses_when_it_is_asked_next(
    policy: Policy, hits: dict[str, int], loads: dict[str, Any]
) -> None:
    for seed in range(5):
        asked, plain = (router(hits, loads, policy, seed) for _ in range(2))
        candidates = [candidate(name) for name in NAMES]
        for _ in range(4):
            explanation = asked.explain(REQUEST, candidates, 0.0)
            decision = asked.route(REQUEST, candidates, 0.0)
            assert decision == plain.route(REQUEST, candidates, 0.0), "explaining changed a turn or a random number"
            assert decision is not None
            best = {explanation.candidates[position].name for position in explanation.equals}
            assert decision.decode.name in best


def test_the_numbers_add_up_when_an_engine_is_best() -> None:
    explanation = router({"a": 0, "b": 40}).explain(REQUEST, [candidate("a"), candidate("b")], 0.0)
    told = explained(REQUEST, explanation, "prefix", everything=True)
    best, other = told.engines
    assert (told.chosen, told.reason, told.cached_tokens, told.prompt_tokens) == (["b"], "cached_prefix", 640, 1024)
    assert (best.engine, best.behind_s, best.cached_tokens) == ("b", 0.0, 640)
    assert other.behind_s > 0
    for engine in told.engines:
        assert sum(engine.scores.values()) == pytest.approx(engine.total)
    assert set(best.scores) == {"cached_prefix", "queue_wait", "decode_slots", "cache_room"}


def test_engines_that_may_not_be_chosen_are_named_with_their_filter_when_a_prompt_is_explained() -> None:
    candidates = [candidate("a"), candidate("b", ready=False), candidate("c", circuit_open=True)]
    told = explained(REQUEST, router({"a": 0}).explain(REQUEST, candidates, 0.0), "prefix", everything=True)
    assert {engine.engine: engine.filtered_by for engine in told.engines} == {
        "a": "",
        "b": "ready",
        "c": "circuit_closed",
    }
    none = router({}).explain(REQUEST, candidates[1:2], 0.0)
    assert none.decision is None
    assert explained(REQUEST, none, "prefix", everything=True).chosen == []


def test_a_tenant_learns_tokens_alone_when_a_prompt_is_explained() -> None:
    explanation = build_router("prefix", PrefixIndex(10), LoadLedger(), Random(0)).explain(
        REQUEST, [candidate("a"), candidate("b")], 0.0
    )
    told = explained(REQUEST, explanation, "prefix", everything=False)
    assert (told.prompt_tokens, told.exact) == (1024, True)
    assert (told.engines, told.chosen, told.reason, told.policy, told.prefill) == ([], [], "", "", "")
