"""Who owns a bare model name, and how it changes hands, with the time passed in."""

import pytest

from mini_infer_contract.launch import Endpoint
from mini_infer_gateway.endpoints.base import Listed, Service
from mini_infer_gateway.fleet.catalog import Catalog
from mini_infer_gateway.fleet.name_owners import NameOwners, OwnerChange, read_rules
from tests.support.fake_engine import FakeEngine
from tests.support.running_gateway import running_gateway

DELAY_S = 300.0
OLD, NEW = "2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z"


def test_a_name_is_nobodys_for_a_while_when_its_owner_goes_and_another_namespace_claims_it() -> None:
    owners = NameOwners(DELAY_S)
    assert owners.settle({"m": "a/x"}, 0.0) == (frozenset(), [])
    assert owners.settle({"m": "b/x"}, 1.0) == ({"m"}, [OwnerChange("m", "a/x", "b/x", is_withheld=True)])
    assert owners.settle({"m": "b/x"}, 1.0 + DELAY_S - 1) == ({"m"}, [])
    assert owners.settle({"m": "b/x"}, 1.0 + DELAY_S) == (
        frozenset(),
        [OwnerChange("m", "a/x", "b/x", is_withheld=False)],
    )
    assert not owners.is_withholding


def test_a_name_comes_back_at_once_when_its_owner_is_there_again() -> None:
    owners = NameOwners(DELAY_S)
    owners.settle({"m": "a/x"}, 0.0)
    owners.settle({"m": "b/x"}, 1.0)
    assert owners.settle({"m": "a/x"}, 2.0) == (frozenset(), [])
    assert not owners.is_withholding


def test_a_name_changes_hands_at_once_when_both_services_are_of_one_namespace() -> None:
    owners = NameOwners(DELAY_S)
    owners.settle({"m": "a/x"}, 0.0)
    assert owners.settle({"m": "a/y"}, 1.0) == (frozenset(), [OwnerChange("m", "a/x", "a/y", is_withheld=False)])


def test_an_older_claim_does_not_count_when_its_namespace_may_not_own_the_name() -> None:
    services = [Service("evil/x", OLD, "m"), Service("team/x", NEW, "m"), Service("evil/y", OLD, "other")]
    assert Catalog.of([], services).owners == {"m": "evil/x", "other": "evil/y"}
    assert Catalog.of([], services, rules=read_rules(["m=team"])).owners == {"m": "team/x", "other": "evil/y"}
    assert Catalog.of([], services, rules=read_rules(["*=team"])).owners == {"m": "team/x"}
    assert Catalog.of([], services, rules=read_rules(["m=team", "m=evil", "*=team"])).owners == {"m": "evil/x"}


@pytest.mark.parametrize("text", ["", "m", "=a", "m=", "m=a/b"])
def test_a_rule_is_refused_when_it_has_another_form(text: str) -> None:
    with pytest.raises(ValueError, match="--model-namespaces"):
        read_rules([text])


async def test_no_request_reaches_a_waiting_claim_when_the_owner_of_a_name_is_made_again() -> None:
    async with FakeEngine("mine") as mine, FakeEngine("theirs") as theirs, running_gateway() as gateway:

        def listed(engine: FakeEngine, service: str) -> Listed:
            described = engine.endpoint
            return Listed(Endpoint(name=described.name, url=described.url, model="m", service=service))

        both = [listed(mine, "team/x"), listed(theirs, "other/x")]
        claims = [Service("team/x", OLD, "m"), Service("other/x", NEW, "m")]
        gateway.source.publish(both, claims)
        async with gateway.chat("hi") as response:
            assert response.status == 200
        gateway.source.publish(both[1:], claims[1:])
        async with gateway.chat("hi") as response:
            assert response.status == 503
        gateway.source.publish(both, [*claims[1:], Service("team/x", "2026-03-01T00:00:00Z", "m")])
        async with gateway.chat("hi") as response:
            assert response.status == 503
        assert not theirs.bodies
        reported = gateway.app.metrics.text().decode()
        assert 'mini_infer_gateway_model_names_changed_total{state="held"} 1.0' in reported
