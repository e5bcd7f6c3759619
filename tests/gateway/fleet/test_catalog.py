"""The rule of docs/model-names.md."""

from dataclasses import replace
from itertools import permutations

import pytest
from msgspec import structs

from mini_infer_contract.launch import Endpoint
from mini_infer_gateway.endpoints.base import Service
from mini_infer_gateway.fleet.catalog import Catalog, orphaned


def endpoint(name: str, model: str, service: str = "", created: str = "") -> Endpoint:
    return Endpoint(name=name, url="", model=model, service=service, service_created=created)


OLD, NEW = "2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z"
TWO = [
    endpoint("b-0", "qwen", "b/llm", OLD),
    endpoint("b-1", "qwen", "b/llm", OLD),
    endpoint("a-0", "qwen", "a/llm", NEW),
]


@pytest.mark.parametrize("order", list(permutations(TWO)))
def test_the_oldest_service_owns_a_model_name_when_several_claim_it(order: tuple[Endpoint, ...]) -> None:
    catalog = Catalog.of(order)
    assert set(catalog.by_name["qwen"]) == {"b-0", "b-1"}
    assert catalog.by_name["a/llm"] == ("a-0",)
    assert set(catalog.by_name["b/llm"]) == {"b-0", "b-1"}
    assert catalog.listed == ("a/llm", "qwen")


def test_namespace_and_name_decide_the_owner_when_services_are_equally_old() -> None:
    catalog = Catalog.of([endpoint("2", "m", "b/x", OLD), endpoint("1", "m", "a/x", OLD)])
    assert catalog.by_name["m"] == ("1",)


def test_a_service_counts_as_youngest_when_its_age_is_unknown() -> None:
    catalog = Catalog.of([endpoint("1", "m", "a/x"), endpoint("2", "m", "b/x", NEW)])
    assert catalog.by_name["m"] == ("2",)


def test_a_namespaced_name_stays_with_its_service_when_another_serves_it_as_model() -> None:
    catalog = Catalog.of([endpoint("evil", "team/svc", "x/evil", OLD), endpoint("good", "m", "team/svc", NEW)])
    assert catalog.by_name["team/svc"] == ("good",)
    assert catalog.listed == ("m", "x/evil")


def test_endpoints_share_a_model_name_when_they_have_no_service() -> None:
    catalog = Catalog.of([endpoint("1", "m"), endpoint("2", "m"), endpoint("3", "n")])
    assert dict(catalog.by_name) == {"m": ("1", "2"), "n": ("3",)}
    assert catalog.listed == ("m", "n")


EVIL = endpoint("evil-0", "qwen", "evil/pod", "1970-01-01T00:00:00Z")


def test_a_service_keeps_its_model_name_when_a_pod_claims_it() -> None:
    services = [Service("b/llm", OLD, "qwen"), Service("a/llm", NEW, "qwen")]
    catalog = Catalog.of([EVIL, *TWO], services)
    assert set(catalog.by_name["qwen"]) == {"b-0", "b-1"}
    assert catalog.by_name["evil/pod"] == ("evil-0",)
    assert catalog.listed == ("a/llm", "evil/pod", "qwen")


def test_an_older_service_does_not_get_a_model_name_when_only_its_pods_claim_it() -> None:
    services = [Service("evil/pod", "2020-01-01T00:00:00Z", "other"), Service("b/llm", OLD, "qwen")]
    catalog = Catalog.of([EVIL, *TWO[:2]], services)
    assert set(catalog.by_name["qwen"]) == {"b-0", "b-1"}


def test_a_service_keeps_its_names_when_it_has_no_pods_or_a_rollout_changes_them() -> None:
    services = [Service("b/llm", OLD, "qwen-new"), Service("a/llm", NEW, "qwen-new")]
    catalog = Catalog.of(TWO, services)
    assert catalog.by_name["qwen-new"] == ()
    assert set(catalog.by_name["qwen"]) == {"b-0", "b-1"}
    empty = Catalog.of([], services)
    assert dict(empty.by_name) == {"qwen-new": (), "b/llm": (), "a/llm": ()}
    assert empty.listed == ()


def test_pods_are_reached_by_namespaced_name_only_when_their_service_is_missing() -> None:
    catalog = Catalog.of([EVIL], [])
    assert dict(catalog.by_name) == {"evil/pod": ("evil-0",)}


B, A = Service("b/llm", OLD, "qwen"), Service("a/llm", NEW, "qwen")


def test_engines_that_stay_when_their_service_is_deleted_keep_its_name() -> None:
    """`kubectl delete --cascade=orphan`, until the service is made again."""
    left = orphaned([B], [], TWO[:2])
    assert left == (B,)
    catalog = Catalog.of([*TWO[:2], EVIL], [], left)
    assert set(catalog.by_name["qwen"]) == {"b-0", "b-1"}
    assert catalog.listed == ("evil/pod", "qwen")
    assert orphaned(left, [replace(B, created=NEW)], TWO[:2]) == ()


def test_an_existing_service_takes_a_model_name_when_its_owner_is_deleted() -> None:
    left = orphaned([B, A], [A], TWO)
    assert left == (B,)
    catalog = Catalog.of(TWO, [A], left)
    assert catalog.by_name["qwen"] == ("a-0",)
    assert catalog.listed == ("b/llm", "qwen")


def test_a_model_name_has_no_endpoints_when_service_and_pods_are_deleted() -> None:
    going = [structs.replace(endpoint, draining=True) for endpoint in TWO[:2]]
    assert orphaned([B], [], going) == ()
    catalog = Catalog.of([*going, TWO[2]], [A])
    assert catalog.listed == ("qwen",)
    assert catalog.by_name["qwen"] == ("a-0",)


def test_an_orphaned_service_is_forgotten_when_it_has_no_engines() -> None:
    assert orphaned([B, A], [], [TWO[2]]) == (A,)
