"""Canaries on a real API server: a gateway's figures promote a revision or roll it back, and a rollback stays."""

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from mini_infer_contract.resource_names import LABEL_REVISION
from mini_infer_operator.cli import entry
from tests.operator.test_scaling import StubGateway
from tests.support.control_plane import ControlPlane
from tests.support.operator_process import Cluster, OperatorProcess, wait

pytestmark = [pytest.mark.cluster]
STEPS = [{"mirror": "20%", "pauseSeconds": 1}, {"weight": "50%", "pauseSeconds": 1}]
ANALYSIS = {"minRequests": 10, "answers": {"samples": 3}}
ROLLOUT = {"minReadySeconds": 1, "canary": {"steps": STEPS, "analysis": ANALYSIS}}


@pytest.fixture(scope="module")
def gateway() -> Iterator[StubGateway]:
    stub = StubGateway()
    yield stub
    stub.close()


@pytest.fixture(scope="module")
def flags(gateway: StubGateway) -> tuple[str, ...]:
    return (f"--gateways={gateway.address}",)


def canary(cluster: Cluster, name: str) -> dict[str, Any]:
    return dict(cluster.status(name).get("canary") or {})


def phase(cluster: Cluster, name: str) -> str:
    return str(canary(cluster, name).get("phase"))


def running(cluster: Cluster, name: str) -> dict[str, int]:
    """Replicas by revision."""
    deployments = cluster.children(name, "deployments")
    return {
        item["metadata"]["labels"][LABEL_REVISION]: item["spec"]["replicas"]
        for item in deployments
        if item["spec"]["replicas"]
    }


def until_phase(gateway: StubGateway, cluster: Cluster, name: str, expected: str, **more: float) -> None:
    """Lets the gateway count so much more of the new revision in each look, until the canary is in this phase."""
    state, numbers = canary(cluster, name), count(1)

    def is_there() -> bool:
        number = next(numbers)
        figures = {kind: number * amount for kind, amount in more.items()}
        gateway.rollouts[f"default/{name}"] = {state["revision"]: figures, state["stableRevision"]: {}}
        return phase(cluster, name) == expected

    wait(is_there)


def edited(cluster: Cluster, gateway: StubGateway, name: str, image: str) -> tuple[str, str]:
    """Serves, is edited, and has a canary engine. Returns the old and the new revision."""
    cluster.apply(name, image="engine:1", unified={"replicas": 2}, rollout=ROLLOUT)
    wait(lambda: cluster.ready(name).get("status") == "True")
    old = cluster.status(name)["revision"]
    cluster.apply(name, image=image, unified={"replicas": 2}, rollout=ROLLOUT)
    wait(lambda: phase(cluster, name) == "Running")
    gateway.rollouts[f"default/{name}"] = {}
    new = canary(cluster, name)["revision"]
    wait(lambda: running(cluster, name) == {old: 2, new: 1})
    wait(lambda: canary(cluster, name).get("stepBegan"))
    return old, new


def works(cluster: Cluster) -> bool:
    """True once an operator that was just started has reconciled a service."""
    try:
        return cluster.reconciles() > 0
    except OSError:
        return False


def events(cluster: Cluster, name: str, reason: str) -> list[str]:
    found = cluster.plane.kubectl("get", "events", "-o", "json", f"--field-selector=reason={reason}").stdout
    return [item["message"] for item in json.loads(found)["items"] if item["involvedObject"]["name"] == name]


@pytest.mark.timeout(600)
def test_revisions_are_promoted_and_rolled_back_by_figures(
    plane_with_pods: ControlPlane,
    gateway: StubGateway,
    flags: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    with OperatorProcess(plane_with_pods, tmp_path / "first", *flags) as operator:
        cluster = Cluster(plane_with_pods, operator.url)
        old, new = edited(cluster, gateway, "good", "engine:2")
        wait(lambda: canary(cluster, "good").get("reason") == "FewRequests")
        until_phase(gateway, cluster, "good", "Promoted", requests=20, replays=2, divergence_sum=0.02)
        assert canary(cluster, "good")["reason"] == "AnalysisPassed"
        wait(lambda: running(cluster, "good") == {new: 2})
        wait(lambda: cluster.ready("good").get("status") == "True")
        wait(lambda: any("kept all limits" in message for message in events(cluster, "good", "CanaryPromoted")))

        old, new = edited(cluster, gateway, "bad", "engine:3")
        until_phase(gateway, cluster, "bad", "RolledBack", requests=5, errors=2)
        wait(lambda: running(cluster, "bad") == {old: 2})
        assert canary(cluster, "bad")["reason"] == "Errors"
        wait(lambda: cluster.ready("bad").get("reason") == "CanaryRolledBack")
        assert "requests failed (40.0%)" in cluster.ready("bad")["message"]
        wait(lambda: events(cluster, "bad", "CanaryRolledBack"))

    gateway.rollouts.clear()
    monkeypatch.setenv("KUBECONFIG", str(plane_with_pods.kubeconfig))
    monkeypatch.chdir(tmp_path)
    with OperatorProcess(plane_with_pods, tmp_path / "second", *flags) as operator:
        cluster = Cluster(plane_with_pods, operator.url)
        wait(lambda: works(cluster))
        cluster.look_again("bad")
        assert (phase(cluster, "bad"), running(cluster, "bad")) == ("RolledBack", {old: 2})
        assert cluster.status("bad")["revision"] == new, "the spec still asks for it"
        assert entry.main(["rollout", "promote", "bad"]) == 0
        wait(lambda: running(cluster, "bad") == {new: 2})
        wait(lambda: cluster.ready("bad").get("status") == "True" and phase(cluster, "bad") == "Promoted")
        assert entry.main(["rollout", "promote", "bad"]) == 2, "there is nothing to promote any more"
        capsys.readouterr()

        old, new = edited(cluster, gateway, "stopped", "engine:4")
        assert entry.main(["rollout", "pause", "stopped"]) == 0
        wait(lambda: canary(cluster, "stopped").get("reason") == "Paused")
        assert entry.main(["status", "stopped"]) == 1
        assert f"canary {new} beside {old}" in capsys.readouterr().out
        assert cluster.plane.kubectl("scale", "infsvc/stopped", "--replicas=4").returncode == 0
        wait(lambda: running(cluster, "stopped") == {old: 4, new: 1})
        assert entry.main(["rollout", "abort", "stopped"]) == 0
        wait(lambda: running(cluster, "stopped") == {old: 4} and canary(cluster, "stopped")["reason"] == "Aborted")
