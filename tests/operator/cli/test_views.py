from datetime import UTC, datetime
from typing import Any

from mini_infer_operator.cli.views import explanation, sentence, status_table, troubled_pods

NOON = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)


def service(name: str, ready: str, reason: str, message: str, **status: Any) -> dict[str, Any]:
    since = {"lastTransitionTime": "2026-01-01T11:48:00Z"}
    condition = {"type": "Ready", "status": ready, "reason": reason, "message": message, **since}
    return {
        "metadata": {"name": name, "namespace": "team", "generation": 2},
        "spec": {"unified": {"replicas": 2}},
        "status": {"observedGeneration": 2, "conditions": [condition], "model": name, "revision": "r1", **status},
    }


GOOD = service("good", "True", "AllReplicasReady", "2 of 2 engines are ready", readyReplicas=2)
BAD = service("bad", "False", "ImagePullFailed", "0 of 2 engines are ready; pod-1: ErrImagePull: no")
NEW = {"metadata": {"name": "new", "namespace": "team"}, "spec": {"unified": {}}}


def pod(name: str, *, ready: bool = False, restarts: int = 0, state: dict[str, Any] | None = None) -> dict[str, Any]:
    container = {"name": "engine", "ready": ready, "restartCount": restarts, "state": state or {"running": {}}}
    return {
        "metadata": {"name": name},
        "spec": {"nodeName": "node-1"},
        "status": {
            "phase": "Running",
            "startTime": "2026-01-01T11:00:00Z",
            "conditions": [{"type": "Ready", "status": str(ready)}],
            "containerStatuses": [{**container, "started": ready}],
        },
    }


def test_status_table_explains_services_when_they_are_not_ready() -> None:
    lines = status_table([GOOD, BAD, NEW], NOON)
    assert lines[0].split() == ["NAMESPACE", "NAME", "READY", "REASON", "ENGINES", "MODEL", "REVISION", "SINCE"]
    assert lines[1].split() == ["team", "bad", "False", "ImagePullFailed", "0/2", "bad", "r1", "12m"]
    assert lines[2] == "    0 of 2 engines are ready; pod-1: ErrImagePull: no"
    assert lines[3].split() == ["team", "good", "True", "AllReplicasReady", "2/2", "good", "r1", "12m"]
    assert lines[4].split()[:5] == ["team", "new", "Unknown", "NoStatus", "0/1"]
    assert "does an operator run" in lines[5]


def test_status_sentence_names_the_generation_when_status_lags_behind_spec() -> None:
    edited = {**GOOD, "metadata": {**GOOD["metadata"], "generation": 3}}
    assert sentence(edited) == ("2 of 2 engines are ready (of generation 2; the spec is at 3: no operator has seen it)")


def test_why_prints_conditions_engines_logs_and_events() -> None:
    crashed = pod("pod-1", restarts=3, state={"waiting": {"reason": "CrashLoopBackOff"}})
    event = {
        "metadata": {"name": "e"},
        "involvedObject": {"kind": "Pod", "name": "pod-1"},
        "type": "Warning",
        "reason": "BackOff",
        "message": "restarting\nfailed",
        "lastTimestamp": "2026-01-01T11:59:00Z",
    }
    logs = {"pod-1": "\n".join(f"line {number}" for number in range(20)) + "\nError: no weights\n"}
    text = "\n".join(explanation(BAD, [crashed, pod("pod-2", ready=True)], logs, [event], NOON))
    assert text.startswith("team/bad: ImagePullFailed\n  0 of 2 engines are ready")
    assert "Ready=False for 12m: ImagePullFailed: 0 of 2" in text
    assert "pod-1  node-1  Running, CrashLoopBackOff  ended 3 times  60m" in text
    assert "pod-2  node-1  ready  ended 0 times  60m" in text
    assert "Last lines of pod-1\n  line 13" in text
    assert "Error: no weights" in text
    assert "60s ago  Warning  Pod pod-1  BackOff: restarting failed" in text


def test_logs_are_read_when_a_pod_ended_or_is_not_ready() -> None:
    crashed = pod("crashed", restarts=1, state={"waiting": {"reason": "CrashLoopBackOff"}})
    pending = pod("pending", state={"waiting": {"reason": "ErrImagePull"}})
    again = pod("again", restarts=2)
    assert troubled_pods([pod("fine", ready=True), crashed, pending, again]) == [("crashed", True), ("again", False)]
