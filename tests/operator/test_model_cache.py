"""Models on volumes, on a real API server: a Job copies, engines wait for it, and the status says how far it is."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mini_infer_engine.tools.fetch.command import build_parser
from mini_infer_operator.launch import cached_folder
from tests.support.control_plane import ControlPlane
from tests.support.operator_process import Cluster, OperatorProcess, wait

pytestmark = [pytest.mark.cluster]
FIRST, SECOND = "https://models.example.org/first", "https://models.example.org/second"


@pytest.fixture(scope="module")
def cluster(plane_with_pods: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with OperatorProcess(plane_with_pods, tmp_path_factory.mktemp("operator")) as operator:
        plane_with_pods.apply(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": {"name": "weights", "namespace": "default"},
                "spec": {
                    "accessModes": ["ReadWriteMany"],
                    "resources": {"requests": {"storage": "1Gi"}},
                    "volumeName": "weights",
                },
            },
            {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {"name": "weights"},
                "spec": {
                    "accessModes": ["ReadWriteMany"],
                    "capacity": {"storage": "1Gi"},
                    "hostPath": {"path": "/nowhere"},
                    "claimRef": {"name": "weights", "namespace": "default"},
                },
            },
        )
        yield Cluster(plane_with_pods, operator.url)


def jobs_of(cluster: Cluster, name: str) -> list[dict[str, Any]]:
    return cluster.children(name, "jobs")


def cache_of(cluster: Cluster, name: str) -> dict[str, Any]:
    return dict(cluster.status(name).get("modelCache", {}))


def end_pods(cluster: Cluster, job: str, phase: str) -> None:
    """Writes that the Job's pods have ended, as a kubelet would."""
    selector = f"batch.kubernetes.io/job-name={job}"
    found = wait(lambda: [p for p in cluster.get("pods", selector) if p["status"].get("phase") == "Running"])
    for pod in found:
        code = 0 if phase == "Succeeded" else 1
        ended = {"terminated": {"exitCode": code, "finishedAt": pod["status"]["startTime"]}}
        statuses = [{**status, "ready": False, "state": ended} for status in pod["status"].get("containerStatuses", ())]
        change = json.dumps({"status": {"phase": phase, "containerStatuses": statuses}})
        done = cluster.plane.kubectl("patch", "pod", pod["metadata"]["name"], "--subresource=status", "-p", change)
        assert done.returncode == 0, done.stderr


def test_a_job_copies_and_the_status_follows_it_when_a_cache_is_asked_for(cluster: Cluster) -> None:
    cluster.apply("copied", model={"uri": FIRST, "cache": {"claim": "weights"}}, unified={"replicas": 1})
    (job,) = wait(lambda: jobs_of(cluster, "copied"))
    name = job["metadata"]["name"]
    arguments = job["spec"]["template"]["spec"]["containers"][0]["args"]
    assert arguments[:2] == [FIRST, f"/cache/{cached_folder(FIRST)}"]
    (deployment,) = wait(lambda: cluster.children("copied", "deployments"))
    engine = deployment["spec"]["template"]["spec"]
    assert f"--model=/model/{cached_folder(FIRST)}" in engine["containers"][0]["args"]
    assert engine["initContainers"][0]["args"] == ["--await", f"/model/{cached_folder(FIRST)}"]
    wait(lambda: cache_of(cluster, "copied").get("state") == "Copying")
    (deployment,) = cluster.children("copied", "deployments")
    assert deployment["spec"]["replicas"] == 0, "engines that wait would occupy GPUs"
    assert cluster.get("pods", "serving.mini-infer.io/service=copied") == []
    end_pods(cluster, name, "Succeeded")
    wait(lambda: cache_of(cluster, "copied") == {"claim": "weights", "state": "Ready", "percent": 100})
    wait(lambda: cluster.ready("copied").get("status") == "True")
    assert cluster.status("copied")["replicas"] == 1, "the Job's pods are no engines"

    # Another model is another Job, which leaves the folder of the engines that still run.
    cluster.apply("copied", model={"uri": SECOND, "cache": {"claim": "weights"}}, unified={"replicas": 1})
    (second,) = wait(lambda: [j for j in jobs_of(cluster, "copied") if j["metadata"]["name"] != name])
    kept = [a for a in second["spec"]["template"]["spec"]["containers"][0]["args"] if a.startswith("--keep=")]
    assert kept == [f"--keep={cached_folder(FIRST).removeprefix('mini-infer/')}"]
    assert cluster.status("copied")["readyReplicas"] == 1, "the old engine serves until the new model is there"
    end_pods(cluster, second["metadata"]["name"], "Succeeded")
    wait(lambda: [j["metadata"]["name"] for j in jobs_of(cluster, "copied")] == [second["metadata"]["name"]])


def test_the_job_is_made_again_when_somebody_deletes_it(cluster: Cluster) -> None:
    cluster.apply("again", model={"uri": FIRST, "cache": {"claim": "weights"}}, unified={"replicas": 0})
    (job,) = wait(lambda: jobs_of(cluster, "again"))
    done = cluster.plane.kubectl("delete", "job", job["metadata"]["name"])
    assert done.returncode == 0, done.stderr
    wait(lambda: [j for j in jobs_of(cluster, "again") if j["metadata"]["uid"] != job["metadata"]["uid"]])


def test_the_job_goes_when_the_service_goes(cluster: Cluster) -> None:
    cluster.apply("gone", model={"uri": FIRST, "cache": {"claim": "weights"}}, unified={"replicas": 0})
    wait(lambda: jobs_of(cluster, "gone"))
    done = cluster.plane.kubectl("delete", "infsvc", "gone")
    assert done.returncode == 0, done.stderr
    wait(lambda: not jobs_of(cluster, "gone"))


def test_the_example_is_accepted_when_a_job_of_ones_own_copies(cluster: Cluster) -> None:
    example = Path(__file__).parents[2] / "examples/jobs/fetch-model.yaml"
    done = cluster.plane.kubectl("create", "--dry-run=server", "--validate=strict", "-f", str(example))
    assert done.returncode == 0, done.stderr
    command = yaml.safe_load(example.read_text())["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[:2] == ["mini-infer", "fetch"]
    options = build_parser().parse_args(command[2:])
    assert str(options.folder) == "/weights/qwen3/0.6b", "which examples/volume.yaml serves"


def test_pods_copy_onto_their_nodes_and_the_status_says_so_when_the_cache_is_a_host_path(cluster: Cluster) -> None:
    model = {"uri": "s3://models/qwen3", "cache": {"hostPath": "/var/lib/models"}}
    cluster.apply("onto-nodes", model=model, unified={"replicas": 1})
    wait(lambda: cluster.ready("onto-nodes").get("reason") == "PodSecurity")
    assert jobs_of(cluster, "onto-nodes") == []
