"""The fleet page's rows: which reason an engine that is not ready has, and what tenants do not see."""

from typing import Any

import msgspec
import pytest

from mini_infer_contract.launch import PendingEngine
from mini_infer_gateway.console.fleet_view import EngineRow, pairs, service_rows, why_not_ready
from mini_infer_gateway.console.fleet_view import _for_tenants as for_tenants
from mini_infer_gateway.endpoints.service_status import ServiceCondition, ServiceRole, ServiceStatus
from mini_infer_gateway.fleet.breaker import Cause


def row(name: str, **fields: Any) -> EngineRow:
    given = {"service": "ns/a", "model": "m", "role": "unified", "revision": "r1", "state": "ready", "reason": ""}
    return EngineRow(name=name, **given | fields)


class State:
    """The part of an endpoint's state that reasons are made of."""

    def __init__(self, cause: Cause | None = None, retry_at_s: float = 0.0, overloaded_until_s: float = 0.0) -> None:
        self.breaker = type("Breaker", (), {"cause": cause, "retry_at_s": retry_at_s})()
        self.overloaded_until_s = overloaded_until_s


@pytest.mark.parametrize(
    ("phase", "state", "pending", "words"),
    [
        ("ready", State(), None, ""),
        ("starting", State(), None, "its source reports that it is not ready"),
        ("starting", State(), PendingEngine(name="e", reason="ImagePullBackOff: no such image"), "ImagePullBackOff"),
        ("draining", State(), None, "takes no new requests"),
        ("broken", State(Cause.UNREACHABLE, 105.0), None, "connections to it fail or break; tried again in 5 s"),
        ("broken", State(Cause.STATUS, 99.0), None, "server errors; the next request tries it"),
        ("overloaded", State(overloaded_until_s=101.5), None, "chosen last for 1.5 s"),
        ("silent", State(), None, "load reports do not arrive"),
    ],
)
def test_the_reason_names_the_cause_when_an_engine_is_not_ready(
    phase: str, state: Any, pending: PendingEngine | None, words: str
) -> None:
    assert words in why_not_ready(state, phase, pending, 100.0)
    assert bool(why_not_ready(state, phase, pending, 100.0)) == bool(words)


@pytest.mark.parametrize("cause", list(Cause))
def test_every_cause_of_an_open_circuit_has_words_when_it_is_shown(cause: Cause) -> None:
    assert "its circuit is open: " in why_not_ready(State(cause), "broken", None, 0.0)  # type: ignore[arg-type]


STATUS = ServiceStatus(
    conditions=[
        ServiceCondition(type="Ready", status="False", reason="RollingOut", message="1 of 2 engines of r2 are ready"),
        ServiceCondition(type="Progressing", status="True", reason="RollingOut", message="new engines start"),
    ],
    revision="r2",
    roles=[ServiceRole(name="unified", ready="1/2", gpus=8)],
)


def test_a_service_shows_its_revisions_and_status_when_it_rolls_out() -> None:
    engines = [row("e1"), row("e2", revision="r2"), row("e3", revision="r2", state="starting")]
    by_name = {"m": ("e1", "e2"), "ns/a": ("e1", "e2", "e3"), "other": ("x",)}
    (service,) = service_rows(engines, by_name, {"ns/a": STATUS})
    assert (service.models, service.engines) == (["m"], {"ready": 2, "starting": 1})
    assert service.revisions == {"r1": 1, "r2": 2}
    assert service.status.conditions[0].message == "1 of 2 engines of r2 are ready"


def test_a_service_is_shown_when_it_has_no_engine_and_when_it_has_no_report() -> None:
    services = service_rows([row("e1", service="ns/b")], {}, {"ns/a": STATUS})
    assert [(service.name, service.engines) for service in services] == [("ns/a", {}), ("ns/b", {"ready": 1})]


def test_tenants_see_no_numbers_of_engines_and_no_messages_when_a_service_is_shown_to_them() -> None:
    (service,) = service_rows([row("e1"), row("e2", state="broken")], {}, {"ns/a": STATUS})
    shown = msgspec.json.encode(for_tenants(service)).decode()
    assert "RollingOut" in shown
    for hidden in ("broken", "r1", "r2", "engines of", "gpus", "e1"):
        assert hidden not in shown


def test_engines_that_compute_apart_are_grouped_when_their_revision_is_the_same() -> None:
    engines = [row("p", role="prefill"), row("d", role="decode"), row("u"), row("d2", role="decode", revision="r2")]
    assert [(pair.revision, pair.prefill, pair.decode) for pair in pairs(engines)] == [
        ("r1", ["p"], ["d"]),
        ("r2", [], ["d2"]),
    ]
