"""`mini-infer status`, `why` and `rollout` against a real API server with an operator."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from mini_infer_operator.cli import entry
from tests.operator.test_cluster import cluster
from tests.support.operator_process import Cluster, wait

__all__ = ["cluster"]  # the fixture: an operator that runs

pytestmark = [pytest.mark.cluster]


class Tool:
    """`mini-infer` as a person types it."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str, code: int = 0) -> str:
        assert entry.main(arguments) == code
        captured = self._capsys.readouterr()
        return captured.out + captured.err


@pytest.fixture
def tool(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> Iterator[Tool]:
    monkeypatch.setenv("KUBECONFIG", str(cluster.plane.kubeconfig))
    monkeypatch.chdir(tmp_path)
    return Tool(capsys)


def image(cluster: Cluster, name: str) -> str:
    found = json.loads(cluster.plane.kubectl("get", "infsvc", name, "-o=json").stdout)
    return str(found["spec"].get("image"))


def test_rollout_verbs_follow_undo_restart_and_pause(cluster: Cluster, tool: Tool) -> None:
    cluster.apply("verbs", image="engine:1")
    assert "2 of 2 engines are ready" in tool("rollout", "status", "verbs", "--timeout=120")
    first = cluster.status("verbs")["revision"]
    cluster.apply("verbs", image="engine:2", unified={"replicas": 1})
    tool("rollout", "status", "verbs", "--timeout=120")
    second = cluster.status("verbs")["revision"]
    wait(lambda: len(cluster.children("verbs", "deployments")) == 1)
    history = tool("rollout", "history", "verbs")
    assert f"   1  {first}" in history
    assert f"   2  {second}" in history
    assert "image: engine:1 -> engine:2" in history
    assert "replicas" not in history

    assert "image: engine:2 -> engine:1" in tool("rollout", "undo", "verbs")
    tool("rollout", "status", "verbs", "--timeout=120")
    assert (cluster.status("verbs")["revision"], image(cluster, "verbs")) == (first, "engine:1")
    assert cluster.status("verbs")["replicas"] == 1  # not what it was then
    assert f"   3  {first}" in tool("rollout", "history", "verbs")
    assert "there is no revision 9" in tool("rollout", "undo", "verbs", "--to-revision=9", code=2)

    tool("rollout", "restart", "verbs")
    tool("rollout", "status", "verbs", "--timeout=120")
    restarted = cluster.status("verbs")["revision"]
    assert restarted not in {first, second}

    tool("rollout", "pause", "verbs")
    cluster.plane.kubectl("patch", "infsvc", "verbs", "--type=merge", '-p={"spec": {"image": "engine:3"}}')
    cluster.plane.kubectl("scale", "infsvc", "verbs", "--replicas=2")
    wait(lambda: cluster.status("verbs").get("readyReplicas") == 2)

    def progressing() -> dict[str, Any]:
        return next(dict(c) for c in cluster.status("verbs")["conditions"] if c["type"] == "Progressing")

    wait(lambda: progressing()["reason"] == "Paused")
    assert cluster.status("verbs")["revision"] == restarted
    assert "engine:3" not in json.dumps(cluster.children("verbs", "deployments"))
    tool("rollout", "resume", "verbs")
    wait(lambda: cluster.status("verbs")["revision"] != restarted)
    tool("rollout", "status", "verbs", "--timeout=120")
    assert "engine:3" in json.dumps(cluster.children("verbs", "deployments"))


def test_status_and_why_print_the_reason_when_a_service_fails(cluster: Cluster, tool: Tool) -> None:
    cluster.apply("ill", image="engine:broken")
    wait(lambda: cluster.ready("ill").get("reason") == "ImagePullFailed")
    table = tool("status", "ill", code=1)
    assert "ImagePullFailed" in table
    assert "there is no such image" in table
    why = tool("why", "ill", code=1)
    assert "ImagePullBackOff: there is no such image" in why
    assert "Pending, ImagePullBackOff" in why
    wait(lambda: "RevisionStarted: unified revision" in tool("why", "ill", code=1))  # events are posted beside the work
    assert "there is no InferenceService nobody" in tool("why", "nobody", code=2)
    assert "ill" in tool("status", "-A", code=1)
    cluster.plane.kubectl("delete", "infsvc", "ill")
