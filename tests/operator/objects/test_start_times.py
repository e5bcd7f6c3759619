"""The stages of a start by a pod's conditions, as a table."""

from typing import Any

import pytest

from mini_infer_operator.objects.start_times import LATEST, StartTime, start_time, usual_start_s


def pod(created: int = 0, scheduled: int = 1, running: int = 4, ready: int = 20, **more: Any) -> dict[str, Any]:
    """Returns a pod whose stages lie at these seconds."""

    def at(second: int) -> str:
        return f"2026-11-28T10:{second // 60:02}:{second % 60:02}Z"

    container = {"restartCount": 0, "state": {"running": {"startedAt": at(running)}}}
    conditions = [
        {"type": "PodScheduled", "status": "True", "lastTransitionTime": at(scheduled)},
        {"type": "Ready", "status": "True", "lastTransitionTime": at(ready)},
    ]
    status = {"conditions": conditions, "containerStatuses": [container], **more}
    return {"metadata": {"creationTimestamp": at(created)}, "status": status}


NOT_READY = {"conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": "2026-11-28T10:00:00Z"}]}
RESTARTED = {"containerStatuses": [{"restartCount": 1, "state": {"running": {"startedAt": "2026-11-28T10:00:04Z"}}}]}
STRANGE = {"containerStatuses": [{"restartCount": 0, "state": {"running": {"startedAt": "soon"}}}]}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param(pod(), StartTime(1, 4, 20), id="ready"),
        pytest.param(pod(created=30, scheduled=30, running=31, ready=33), StartTime(0, 1, 3), id="fast"),
        pytest.param(pod(**NOT_READY), None, id="not ready"),
        pytest.param(pod(**RESTARTED), None, id="restarted: ready says nothing of the start"),
        pytest.param(pod(**STRANGE), None, id="no time"),
        pytest.param(pod(scheduled=9), None, id="stages out of order"),
        pytest.param(pod(containerStatuses=[]), None, id="no container"),
        pytest.param({"metadata": {}, "status": None}, None, id="no status"),
    ],
)
def test_start_time_has_the_stages_of_a_ready_pod(found: dict[str, Any], expected: StartTime | None) -> None:
    assert start_time(found) == expected


def test_usual_start_is_the_median_of_the_latest() -> None:
    slow = [pod(created=second, scheduled=second, running=second, ready=second + 40) for second in range(5)]
    fast = [
        pod(created=second, scheduled=second, running=second, ready=second + 10) for second in range(10, 10 + LATEST)
    ]
    assert usual_start_s([*fast, *slow]) == 10.0
    assert usual_start_s([pod(**NOT_READY)]) is None


def test_stages_are_named_for_people() -> None:
    assert StartTime(1, 4, 20).message == "1 s for a node, 3 s for the image, 16 s for the model"
