from typing import Any

import pytest

from mini_infer_operator.objects.observed_objects import contains, frozen_templates, observed_of, pod_failure

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
        ({"requests": {"cpu": "250m"}}, {"requests": {"cpu": "0.25"}}, True),
        ({"requests": {"memory": "1Gi"}}, {"requests": {"memory": "1024Mi"}}, True),
        ({"limits": {"gpu": "1"}}, {"limits": {"gpu": 1}}, True),
        ({"limits": {"gpu": "1"}}, {"limits": {"gpu": 2}}, False),
        ({"labels": {"v": "1.0"}}, {"labels": {"v": "1"}}, False),
    ],
)
def test_contains(live: Any, desired: Any, same: bool) -> None:
    assert contains(live, desired) is same


def deployment(**changes: Any) -> dict[str, Any]:
    base = {"metadata": {"labels": LABELS}, "spec": {"replicas": 3, "template": {"t": "live"}}, "status": {}}
    return {**base, **changes}


def test_observed_counts_what_is_not_going() -> None:
    going = deployment(metadata={"labels": LABELS, "deletionTimestamp": "now"})
    (seen,) = observed_of([deployment(status={"availableReplicas": 2}), going], [], "engine:1").workloads
    assert (seen.role, seen.revision, seen.replicas, seen.available) == ("unified", "r1", 3, 2)


def test_a_lost_revision_is_taken_from_its_deployment() -> None:
    revision = {"metadata": {"labels": LABELS}, "data": {"template": {"t": "frozen"}}}
    assert frozen_templates([deployment()], [revision]) == {("unified", "r1"): {"t": "frozen"}}
    assert frozen_templates([deployment()], []) == {("unified", "r1"): {"t": "live"}}


def waiting(reason: str, **more: Any) -> dict[str, Any]:
    return {"containerStatuses": [{"state": {"waiting": {"reason": reason, "message": "m"}}, **more}]}


@pytest.mark.parametrize(
    ("status", "why"),
    [
        ({}, None),
        (waiting("ContainerCreating"), None),
        (waiting("ImagePullBackOff"), "ImagePullBackOff: m"),
        (
            waiting("CrashLoopBackOff", lastState={"terminated": {"exitCode": 2, "reason": "Error"}}),
            "CrashLoopBackOff: m (it ended with exit code 2, Error)",
        ),
        (
            {
                "conditions": [
                    {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no GPU"}
                ]
            },
            "Unschedulable: no GPU",
        ),
        ({"phase": "Failed", "reason": "Evicted", "message": "disk"}, "Evicted: disk"),
    ],
)
def test_pod_failures(status: dict[str, Any], why: str | None) -> None:
    assert pod_failure({"metadata": {"name": "p"}, "status": status}) == why
    assert pod_failure({"metadata": {"name": "p", "deletionTimestamp": "now"}, "status": status}) is None
