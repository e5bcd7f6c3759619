"""Which pods each disruption budget counts, and which ones the engines' Service reaches."""

from datetime import UTC, datetime
from typing import Any

import pytest

from mini_infer_operator.objects.render import render
from mini_infer_operator.observe import Observed
from mini_infer_operator.parse import parse_service
from mini_infer_operator.plan.plan import make_plan
from tests.support.services import changed

NOW = datetime(2026, 1, 1, tzinfo=UTC)
PLANNED = {"scaling": {"minReplicas": 1, "maxReplicas": 3}}
SERVICE = "serving.mini-infer.io/service"
ROLE = "serving.mini-infer.io/role"


def selectors(has_switched: bool, **roles: Any) -> dict[str, dict[str, str]]:
    """Returns what budgets and the engines' Service select, by their names; the Service's with a star."""
    service = parse_service(changed({"metadata": {"name": "pair"}, "spec": {"unified": None, **roles}}))
    plan = make_plan(service, Observed(default_image="engine:1"), NOW)
    manifests = render(service, plan, {}, None, has_switched=has_switched)
    found = {
        m["metadata"]["name"]: m["spec"]["selector"]["matchLabels"] for m in manifests if "Disruption" in m["kind"]
    }
    (engines,) = (m for m in manifests if m["kind"] == "Service" and m["metadata"]["name"] == "pair-engines")
    return found | {"*": engines["spec"]["selector"]}


ALL = {SERVICE: "pair"}
BY_ROLE = {
    "pair-prefill": ALL | {ROLE: "prefill"},
    "pair-decode": ALL | {ROLE: "decode"},
    "*": ALL | {ROLE: "decode"},
}


@pytest.mark.parametrize(
    ("has_switched", "prefill", "decode", "expected"),
    [
        (False, {}, {}, BY_ROLE),
        (False, PLANNED, PLANNED, {"pair-engines": ALL, "*": ALL}),
        (False, PLANNED, PLANNED | {"engine": {"maxNumSeqs": 7}}, BY_ROLE),  # others start: roles never switch
        (True, PLANNED, PLANNED | {"engine": {"maxNumSeqs": 7}}, {"pair-engines": ALL, "*": ALL}),  # before an edit
    ],
)
def test_one_budget_counts_all_engines_when_they_switch_roles(
    has_switched: bool, prefill: dict[str, Any], decode: dict[str, Any], expected: dict[str, dict[str, str]]
) -> None:
    assert selectors(has_switched, prefill=prefill, decode=decode) == expected
