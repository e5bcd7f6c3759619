"""The rule of docs/model-names.md."""

from itertools import permutations

import pytest

from mini_infer_contract.launch import Endpoint
from mini_infer_gateway.fleet.catalog import Catalog


def endpoint(name: str, model: str, service: str = "", created: str = "") -> Endpoint:
    return Endpoint(name=name, url="", model=model, service=service, service_created=created)


OLD, NEW = "2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z"
TWO = [
    endpoint("b-0", "qwen", "b/llm", OLD),
    endpoint("b-1", "qwen", "b/llm", OLD),
    endpoint("a-0", "qwen", "a/llm", NEW),
]


@pytest.mark.parametrize("order", list(permutations(TWO)))
def test_the_oldest_service_owns_a_bare_name(order: tuple[Endpoint, ...]) -> None:
    catalog = Catalog.of(order)
    assert set(catalog.by_name["qwen"]) == {"b-0", "b-1"}
    assert catalog.by_name["a/llm"] == ("a-0",)
    assert set(catalog.by_name["b/llm"]) == {"b-0", "b-1"}
    assert catalog.listed == ("a/llm", "qwen")


def test_equal_age_goes_by_namespace_and_name() -> None:
    catalog = Catalog.of([endpoint("2", "m", "b/x", OLD), endpoint("1", "m", "a/x", OLD)])
    assert catalog.by_name["m"] == ("1",)


def test_unknown_age_is_the_youngest() -> None:
    catalog = Catalog.of([endpoint("1", "m", "a/x"), endpoint("2", "m", "b/x", NEW)])
    assert catalog.by_name["m"] == ("2",)


def test_nobody_takes_over_anothers_namespaced_name() -> None:
    catalog = Catalog.of([endpoint("evil", "team/svc", "x/evil", OLD), endpoint("good", "m", "team/svc", NEW)])
    assert catalog.by_name["team/svc"] == ("good",)


def test_endpoints_without_a_service_share_a_model() -> None:
    catalog = Catalog.of([endpoint("1", "m"), endpoint("2", "m"), endpoint("3", "n")])
    assert dict(catalog.by_name) == {"m": ("1", "2"), "n": ("3",)}
    assert catalog.listed == ("m", "n")
