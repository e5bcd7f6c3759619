"""Policies as data: what a router is made of, and what is refused."""

from random import Random

import pytest

from mini_infer_gateway.fleet.backlog import Backlog
from mini_infer_gateway.fleet.load import LoadLedger
from mini_infer_gateway.fleet.prefill_rates import PrefillRates
from mini_infer_gateway.index.prefix_index import PrefixIndex
from mini_infer_gateway.routing.base import RoutingRequest
from mini_infer_gateway.routing.policies import POLICIES, SPECS
from mini_infer_gateway.routing.producers.load import EndpointLoad
from mini_infer_gateway.routing.producers.prefill_rate import PrefillRate
from mini_infer_gateway.routing.producers.prefix_hits import PrefixHits
from mini_infer_gateway.routing.producers.waiting_ahead import WaitingAhead
from mini_infer_gateway.routing.registry import FILTERS, PICKERS, SCORERS, Plugin, PolicySpec, make_router

PRODUCERS = (
    PrefixHits(PrefixIndex(100)),
    EndpointLoad(LoadLedger()),
    PrefillRate(PrefillRates()),
    WaitingAhead(Backlog(), LoadLedger()),
)


def test_every_routing_policy_has_a_spec_and_every_plugin_a_unique_name() -> None:
    assert set(SPECS) == set(POLICIES)
    for known in (FILTERS, SCORERS):
        assert {name: make().name for name, make in known.items()} == {name: name for name in known}
    assert set(PICKERS) == {"highest_score", "round_robin"}


def test_plugin_parameters_reach_the_scorer() -> None:
    spec = PolicySpec(scorers=(Plugin("decode_slots", weight=0.5, parameters={"slot_s": 6.0}),))
    router = make_router(spec, PRODUCERS, Random(0))
    table = {"running": [1.0, 0.0], "waiting": [0.0, 0.0], "queued_tokens": [9.0, 9.0]}
    rows = router._score(RoutingRequest("m", 10), table, 2)
    assert rows == [[pytest.approx(0.45), 0.5]]


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (Plugin("shortest_name"), "'shortest_name'.*cached_prefix, "),
        (Plugin("decode_slots", parameters={"slots": 1.0}), r"'decode_slots'.*\{'slots': 1.0\}"),
    ],
)
def test_the_error_names_a_plugin_or_parameter_when_it_does_not_exist(plugin: Plugin, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_router(PolicySpec(scorers=(plugin,)), PRODUCERS, Random(0))
