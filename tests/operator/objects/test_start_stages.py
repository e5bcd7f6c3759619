"""The stages of an engine's start, from pods as kubelets write them, and what is reported of them."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mini_infer_operator.objects.engine_starts import EngineStarts
from mini_infer_operator.objects.start_stages import LATEST_STARTS, StartStages, start_stages, usual_start_s
from tests.support.services import changed

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds: float) -> str:
    return (BEGIN + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def pod(uid: str = "1", revision: str = "r1", begin: float = 0, **status: Any) -> dict[str, Any]:
    """Created at `begin`, scheduled after 1 s, running after 9 and ready after 24."""
    conditions = [
        {"type": "PodScheduled", "status": "True", "lastTransitionTime": at(begin + 1)},
        {"type": "Ready", "status": "True", "lastTransitionTime": at(begin + 24)},
    ]
    containers = [{"name": "engine", "restartCount": 0, "state": {"running": {"startedAt": at(begin + 9)}}}]
    labels = {"serving.mini-infer.io/role": "unified", "serving.mini-infer.io/revision": revision}
    return {
        "metadata": {"name": f"p{uid}", "uid": uid, "creationTimestamp": at(begin), "labels": labels},
        "status": {"conditions": conditions, "containerStatuses": containers, **status},
    }


def init(started: float, finished: float) -> dict[str, Any]:
    return {"name": "i", "state": {"terminated": {"startedAt": at(started), "finishedAt": at(finished)}}}


SIDECAR = {"name": "sidecar", "state": {"running": {"startedAt": at(2)}}}


@pytest.mark.parametrize(
    ("found", "stages"),
    [
        (pod(), StartStages(1, 8, 0, 15)),
        (pod(initContainerStatuses=[init(3, 5), init(5, 8)]), StartStages(1, 2, 6, 15)),
        (pod(initContainerStatuses=[SIDECAR]), StartStages(1, 8, 0, 15)),
        (pod(initContainerStatuses=[init(0, 8)]), None),
        (pod(conditions=[]), None),
        (pod(conditions=[{"type": "Ready", "status": "False", "lastTransitionTime": at(24)}]), None),
        (pod(containerStatuses=[]), None),
        (pod(containerStatuses=[{"restartCount": 1, "state": {"running": {"startedAt": at(9)}}}]), None),
        (pod(containerStatuses=[{"state": {"running": {"startedAt": at(30)}}}]), None),
        (pod(containerStatuses=[{"state": {"running": {"startedAt": "soon"}}}]), None),
        (pod(containerStatuses=[{"state": {"running": {"startedAt": at(9)}}}, {"state": {}}]), None),
        (changed({"metadata": {"creationTimestamp": at(-90_000)}}, pod()), None),
        (changed({"metadata": {"labels": {"leaderworkerset.sigs.k8s.io/worker-index": "1"}}}, pod()), None),
    ],
)
def test_stages_are_read_or_left_out_when_a_pod_has_any_status(
    found: dict[str, Any], stages: StartStages | None
) -> None:
    assert start_stages(found) == stages


def test_the_message_names_the_stages_when_there_are_init_containers() -> None:
    assert StartStages(1, 2, 6, 15).message == (
        "24 s: 1 s for a node, 2 s for image and volumes, 6 s in init containers, 15 s to load the model"
    )
    assert "init" not in StartStages(1, 8, 0, 15).message
    assert StartStages(1, 2, 6, 15).by_name == {"schedule": 1, "pull": 2, "init": 6, "load": 15, "total": 24}


def test_each_start_is_reported_once_and_the_first_of_a_revision_is_announced() -> None:
    seen: list[StartStages] = []
    starts = EngineStarts(seen.append)
    starts.restart(BEGIN)
    service = "default", "demo"
    unready = pod("3", conditions=[])
    assert starts.observe(service, [pod("1"), pod("2"), unready]) == [
        "the first engine of unified revision r1 is ready after "
        "24 s: 1 s for a node, 8 s for image and volumes, 15 s to load the model"
    ]
    assert len(seen) == 2
    assert starts.observe(service, [pod("1"), pod("2"), pod("3")]) == []
    assert len(seen) == 3
    assert len(starts.observe(service, [pod("3"), pod("4", "r2")])) == 1
    assert len(seen) == 4
    starts.forget(service)
    assert len(starts.observe(service, [pod("5")])) == 1


def test_a_start_is_left_out_when_another_operator_led_then() -> None:
    seen: list[StartStages] = []
    starts = EngineStarts(seen.append)
    starts.restart(BEGIN + timedelta(milliseconds=400))
    assert starts.observe(("default", "demo"), [pod("1", begin=-1), pod("2")]) != []
    assert len(seen) == 1


def test_usual_start_is_the_median_of_the_latest_starts() -> None:
    def ready_after(begin: float, seconds: float) -> dict[str, Any]:
        conditions = [
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": at(begin)},
            {"type": "Ready", "status": "True", "lastTransitionTime": at(begin + seconds)},
        ]
        running = {"state": {"running": {"startedAt": at(begin)}}}
        return pod(begin=begin, conditions=conditions, containerStatuses=[running])

    slow, fast = [ready_after(n, 40) for n in range(9)], [ready_after(20 + n, 10) for n in range(LATEST_STARTS)]
    assert usual_start_s([*fast, *slow]) == 10.0
    assert usual_start_s([pod(conditions=[])]) is None
    assert usual_start_s([]) is None
