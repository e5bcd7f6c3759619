from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mini_infer_operator.objects.observed_objects import contains, frozen_templates, observed_of

LABELS = {"serving.mini-infer.io/role": "unified", "serving.mini-infer.io/revision": "r1"}


@pytest.mark.parametrize(
    ("live", "desired", "same"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, True),
        ({"a": 1}, {"a": 2}, False),
        ({}, {"a": 0}, False),
        ({}, {"a": False}, False),
        ({}, {"a": ""}, True),
        ({}, {"a": {}}, True),
        ({}, {"a": {"b": 1}}, False),
        ({}, {"a": []}, True),
        ({"a": [1]}, {"a": []}, False),
        ({"a": [1, 2]}, {"a": [1]}, False),
        ({"a": [{"n": 1, "default": 2}]}, {"a": [{"n": 1}]}, True),
        ({"a": [{"n": 1}, {"n": 2}]}, {"a": [{"n": 2}, {"n": 1}]}, False),
        ({"a": [{"name": "x", "default": 2}, {"name": "added"}]}, {"a": [{"name": "x"}]}, True),
        ({"a": [{"name": "y"}, {"name": "x"}]}, {"a": [{"name": "x"}, {"name": "y"}]}, True),
        ({"a": [{"name": "x", "v": 1}]}, {"a": [{"name": "x", "v": 2}]}, False),
        ({"a": [{"name": "y"}]}, {"a": [{"name": "x"}]}, False),
        ({"requests": {"cpu": "250m"}}, {"requests": {"cpu": "0.25"}}, True),
        ({"requests": {"memory": "1Gi"}}, {"requests": {"memory": "1024Mi"}}, True),
        ({"limits": {"gpu": "1"}}, {"limits": {"gpu": 1}}, True),
        ({"limits": {"gpu": "1"}}, {"limits": {"gpu": 2}}, False),
        ({"labels": {"v": "1.0"}}, {"labels": {"v": "1"}}, False),
    ],
)
def test_contains_compares_a_live_object_with_its_manifest(live: Any, desired: Any, same: bool) -> None:
    assert contains(live, desired) is same


def deployment(**changes: Any) -> dict[str, Any]:
    base = {
        "metadata": {"labels": LABELS},
        "spec": {"replicas": 3, "selector": {"matchLabels": LABELS}, "template": {"t": "live"}},
        "status": {},
    }
    return {**base, **changes}


def test_observed_workloads_exclude_deployments_being_deleted() -> None:
    going = deployment(metadata={"labels": LABELS, "deletionTimestamp": "now"})
    (seen,) = observed_of(
        [deployment(status={"readyReplicas": 2, "availableReplicas": 1}), going],
        [],
        "engine:1",
        min_ready=timedelta(0),
        now=datetime.now(UTC),
    ).workloads
    assert (seen.role, seen.revision, seen.replicas, seen.ready, seen.available) == ("unified", "r1", 3, 2, 1)


def test_a_frozen_template_comes_from_the_deployment_when_its_revision_is_lost() -> None:
    revision = {"metadata": {"labels": LABELS}, "data": {"template": {"t": "frozen"}, "spec": {}}}
    assert frozen_templates([deployment()], [revision]) == {("unified", "r1"): {"template": {"t": "frozen"}}}
    assert frozen_templates([deployment()], []) == {("unified", "r1"): {"template": {"t": "live"}}}
