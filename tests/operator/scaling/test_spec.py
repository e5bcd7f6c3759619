"""`spec.<role>.scaling` as policies, and the planner's numbers in a spec, as tables."""

from math import inf
from typing import Any

import pytest

from mini_infer_operator.resource import Scaling
from mini_infer_operator.scaling.policy import ScalingPolicy, Targets, Windows
from mini_infer_operator.scaling.spec import planned_spec, policy_of


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"maxReplicas": 4}, ScalingPolicy(1, 4, Targets(2.0, inf, 0.95, inf), Windows(0.0, None, 300.0))),
        (
            {
                "minReplicas": 0,
                "maxReplicas": 9,
                "targets": {"ttftMs": 500, "itlMs": 40, "percentile": 90, "tokensInFlight": 7},
                "windows": {"upSeconds": 5, "downSeconds": 0, "zeroSeconds": 60},
            },
            ScalingPolicy(0, 9, Targets(0.5, 0.04, 0.9, 7), Windows(5.0, 0.0, 60.0)),
        ),
    ],
)
def test_policy_has_defaults_for_what_is_left_out(fields: dict[str, Any], expected: ScalingPolicy) -> None:
    assert policy_of(Scaling.model_validate(fields)) == expected


@pytest.mark.parametrize(
    ("role", "wanted", "decided", "expected"),
    [
        pytest.param({"replicas": 2}, None, {"unified": 5}, 2, id="no scaling: replicas"),
        pytest.param({"replicas": 2, "scaling": {"maxReplicas": 8}}, None, {}, 2, id="replicas to begin with"),
        pytest.param({"scaling": {"maxReplicas": 8}}, None, {}, 1, id="one if none is written"),
        pytest.param({"replicas": 2, "scaling": {"maxReplicas": 8}}, 4, {}, 4, id="an earlier operator's number"),
        pytest.param({"replicas": 2, "scaling": {"maxReplicas": 8}}, 4, {"unified": 5}, 5, id="the planner's"),
        pytest.param({"replicas": 2, "scaling": {"maxReplicas": 3}}, 4, {"unified": 5}, 3, id="within the bounds"),
        pytest.param(
            {"replicas": 0, "scaling": {"minReplicas": 0, "maxReplicas": 3}},
            0,
            {"unified": 0},
            0,
            id="zero",
        ),
        pytest.param(
            {"replicas": 2, "scaling": {"maxReplicas": 8, "owner": "Autoscaler"}},
            4,
            {"unified": 5},
            2,
            id="HPA",
        ),
        pytest.param({"replicas": 2, "scaling": {"maxReplicas": "x"}}, 4, {"unified": 5}, 2, id="a spec that is wrong"),
    ],
)
def test_planned_number_takes_the_place_of_replicas_when_the_planner_owns_them(
    role: dict[str, Any], wanted: int | None, decided: dict[str, int], expected: int
) -> None:
    status = {"roles": [{"name": "unified", **({} if wanted is None else {"wanted": wanted})}]}
    spec = planned_spec({"model": {"uri": "demo"}, "unified": role}, status, decided)
    assert spec["unified"].get("replicas") == expected
