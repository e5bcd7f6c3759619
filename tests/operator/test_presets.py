"""InferencePresets on a real API server: services take their fields, and roll when they change."""

from typing import Any

import pytest

from mini_infer_operator.cli import entry
from tests.operator.test_cluster import cluster
from tests.support.control_plane import ControlPlane
from tests.support.operator_process import Cluster, OperatorProcess, wait
from tests.support.services import VALID_PRESET, changed

__all__ = ["cluster"]  # the fixture: an operator that runs
pytestmark = [pytest.mark.cluster]
ONE = {"unified": {"replicas": 1}}


def store(plane: ControlPlane, name: str, **spec: Any) -> None:
    plane.apply(changed({"metadata": {"name": name}, "spec": {"match": None, **spec}}, VALID_PRESET))


def preset_of(cluster: Cluster, name: str) -> dict[str, Any]:
    return dict(cluster.status(name).get("preset", {}))


def arguments(cluster: Cluster, name: str) -> list[list[str]]:
    found = cluster.children(name, "deployments")
    return [item["spec"]["template"]["spec"]["containers"][0]["args"] for item in found]


def test_services_roll_and_name_the_generation_when_their_preset_changes(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store(cluster.plane, "shared", engine={"maxModelLen": 512, "maxNumSeqs": 3})
    cluster.apply("shares", preset="shared", unified={"replicas": 1, "engine": {"maxNumSeqs": 4}})
    cluster.apply("apart", **ONE)
    wait(lambda: cluster.ready("shares").get("status") == cluster.ready("apart").get("status") == "True")
    found = preset_of(cluster, "shares")
    assert (found["name"], found["generation"], found["chosenBy"]) == ("shared", 1, "Name")
    assert found["fields"] == ["unified.engine.maxModelLen"]
    (first,) = arguments(cluster, "shares")
    assert {"--max-model-len=512", "--max-num-seqs=4"} <= {*first}
    apart = cluster.status("apart")
    assert "preset" not in apart

    store(cluster.plane, "shared", engine={"maxModelLen": 1024})
    wait(lambda: preset_of(cluster, "shares").get("generation") == 2)
    wait(lambda: cluster.ready("shares").get("reason") == "AllReplicasReady")
    wait(lambda: len(arguments(cluster, "shares")) == 1)
    assert "--max-model-len=1024" in arguments(cluster, "shares")[0]
    assert cluster.status("apart") == apart

    # Back to the revision before: the preset would bring its change again, so the service leaves it.
    monkeypatch.setenv("KUBECONFIG", str(cluster.plane.kubeconfig))
    assert entry.main(["rollout", "undo", "shares"]) == 0
    assert "preset: shared -> none" in capsys.readouterr().out
    wait(lambda: arguments(cluster, "shares") == [first])
    assert preset_of(cluster, "shares") == {}


def test_a_service_waits_for_its_preset_when_there_is_none_of_this_name(cluster: Cluster) -> None:
    cluster.apply("early", preset="later", **ONE)
    wait(lambda: cluster.ready("early").get("reason") == "PresetNotFound")
    assert cluster.children("early", "deployments") == []
    store(cluster.plane, "later", image="engine:later")
    wait(lambda: cluster.ready("early").get("status") == "True")
    revision = cluster.status("early")["revision"]
    done = cluster.plane.kubectl("delete", "infpreset", "later")
    assert done.returncode == 0, done.stderr
    wait(lambda: cluster.ready("early").get("reason") == "PresetNotFound")
    (deployment,) = cluster.children("early", "deployments")
    assert deployment["metadata"]["labels"]["serving.mini-infer.io/revision"] == revision
    cluster.plane.kubectl("scale", "infsvc/early", "--replicas=2")
    wait(lambda: cluster.status("early").get("readyReplicas") == 2)
    assert cluster.ready("early")["reason"] == "PresetNotFound"
    assert cluster.status("early")["revision"] == revision
    assert preset_of(cluster, "early")["name"] == "later"
    cluster.plane.kubectl("scale", "infsvc/early", "--replicas=1")
    wait(lambda: cluster.status("early").get("readyReplicas") == 1)
    store(cluster.plane, "later", image="engine:later")
    wait(lambda: cluster.ready("early").get("status") == "True")


def test_a_preset_applies_by_family_and_a_paused_service_waits(cluster: Cluster) -> None:
    claim = {"uri": "pvc://weights/falcon-7b"}
    cluster.apply("matched", model=claim, **ONE)
    wait(lambda: cluster.children("matched", "deployments"))
    store(cluster.plane, "falcon", match={"families": ["falcon"]}, engine={"maxModelLen": 256})
    wait(lambda: preset_of(cluster, "matched").get("chosenBy") == "Match")
    wait(lambda: ["--max-model-len=256" in found for found in arguments(cluster, "matched")] == [True])
    cluster.apply("matched", model=claim, rollout={"paused": True, "minReadySeconds": 1}, **ONE)
    before = cluster.reconciles()
    store(cluster.plane, "falcon", match={"families": ["falcon"]}, engine={"maxModelLen": 128})
    cluster.wait_for_reconcile(before)
    cluster.look_again("matched")
    assert ["--max-model-len=256" in found for found in arguments(cluster, "matched")] == [True]
    assert preset_of(cluster, "matched")["generation"] == 1
    cluster.apply("matched", model=claim, **ONE)
    wait(lambda: preset_of(cluster, "matched").get("generation") == 2)
    cluster.plane.kubectl("delete", "infpreset", "falcon")
    wait(lambda: not preset_of(cluster, "matched"))


def test_an_operator_of_single_namespaces_reads_no_presets(plane_with_pods: ControlPlane, tmp_path: Any) -> None:
    cluster = Cluster(plane_with_pods)
    store(plane_with_pods, "unseen", image="engine:unseen")
    with OperatorProcess(plane_with_pods, tmp_path, "--namespaces=default", "--operator-class=alone"):
        cluster.apply("within", preset="unseen", operatorClass="alone", **ONE)
        cluster.apply("without", operatorClass="alone", **ONE)
        wait(lambda: cluster.ready("within").get("reason") == "PresetNotFound")
        wait(lambda: cluster.ready("without").get("status") == "True")
    plane_with_pods.kubectl("delete", "infsvc", "within", "without")
