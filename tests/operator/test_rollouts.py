"""Rollouts on a real API server: a moment's unreadiness, a full cluster, a revision that never comes up."""

import json
import time
from typing import Any

import pytest

from tests.operator.test_cluster import cluster  # noqa: F401 - the fixture
from tests.support.operator_process import Cluster, wait

pytestmark = [pytest.mark.cluster]
QUICK = {"minReadySeconds": 1}


def set_ready(cluster: Cluster, pod: dict[str, Any], *, ready: bool) -> None:  # noqa: F811
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    condition = {"type": "Ready", "status": str(ready), "lastTransitionTime": now}
    change = json.dumps({"status": {"conditions": [condition]}})
    name = pod["metadata"]["name"]
    done = cluster.plane.kubectl("patch", "pod", name, "--subresource=status", f"--patch={change}")
    assert done.returncode == 0, done.stderr


def deployments(cluster: Cluster, name: str) -> dict[str, int]:  # noqa: F811
    """Replicas by image."""
    found = cluster.children(name, "deployments")
    return {d["spec"]["template"]["spec"]["containers"][0]["image"]: d["spec"]["replicas"] for d in found}


def has_worked(cluster: Cluster, name: str) -> bool:  # noqa: F811
    """Whether the Deployment controller has noted that all were available: engines that never were may go."""
    conditions = [c for d in cluster.children(name, "deployments") for c in d["status"].get("conditions", ())]
    return any(c["type"] == "Progressing" and c["reason"] == "NewReplicaSetAvailable" for c in conditions)


def condition(cluster: Cluster, name: str, kind: str) -> dict[str, Any]:  # noqa: F811
    return next((dict(c) for c in cluster.status(name).get("conditions", ()) if c["type"] == kind), {})


def test_old_engines_stay_when_they_are_briefly_unready_in_a_stuck_rollout(cluster: Cluster) -> None:  # noqa: F811
    cluster.apply("blip", image="engine:1")
    wait(lambda: has_worked(cluster, "blip"))
    old = cluster.children("blip", "pods")
    cluster.apply("blip", image="engine:broken")
    wait(lambda: cluster.ready("blip").get("reason") == "ImagePullFailed")
    for pod in old:
        set_ready(cluster, pod, ready=False)
    wait(lambda: condition(cluster, "blip", "Available").get("status") == "False")
    cluster.look_again("blip")
    assert deployments(cluster, "blip") == {"engine:1": 2, "engine:broken": 1}
    for pod in old:
        set_ready(cluster, pod, ready=True)
    wait(lambda: condition(cluster, "blip", "Available").get("status") == "True")
    uids = {pod["metadata"]["uid"] for pod in old}
    assert uids <= {pod["metadata"]["uid"] for pod in cluster.children("blip", "pods")}
    cluster.apply("blip", image="engine:1")  # and back: the old revision never went
    wait(lambda: cluster.ready("blip").get("status") == "True")
    wait(lambda: {pod["metadata"]["uid"] for pod in cluster.children("blip", "pods")} == uids)  # the broken one may end


def test_an_engine_is_stopped_first_when_the_cluster_has_no_free_gpu(cluster: Cluster) -> None:  # noqa: F811
    gpus = {"replicas": 2, "parallelism": {"tensor": 4}}  # four GPUs each, all that the node has
    cluster.apply("full", image="gpu-engine:1", unified=gpus)
    wait(lambda: cluster.ready("full").get("status") == "True")
    cluster.apply("full", image="gpu-engine:2", unified=gpus)
    fewest = 2

    def rolled() -> bool:
        nonlocal fewest
        status = cluster.status("full")
        fewest = min(fewest, status["readyReplicas"])
        return deployments(cluster, "full") == {"gpu-engine:2": 2} and cluster.ready("full").get("status") == "True"

    wait(rolled, limit_s=120)
    assert fewest >= 1
    assert cluster.plane.kubectl("delete", "infsvc", "full").returncode == 0
    wait(lambda: not cluster.children("full", "pods"))


def test_no_rollout_happens_when_the_cluster_is_full_and_max_unavailable_is_zero(cluster: Cluster) -> None:  # noqa: F811
    gpus = {"replicas": 4, "parallelism": {"tensor": 2}}
    strict = {**QUICK, "maxUnavailable": 0, "progressDeadlineSeconds": 10}
    cluster.apply("strict", image="gpu-engine:1", unified=gpus, rollout=strict)
    wait(lambda: cluster.ready("strict").get("status") == "True")
    cluster.apply("strict", image="gpu-engine:2", unified=gpus, rollout=strict)
    reason = "ProgressDeadlineExceeded"
    late = wait(lambda: (c := condition(cluster, "strict", "Progressing")).get("reason") == reason and c, limit_s=60)
    assert "nvidia.com/gpu" in late["message"]
    assert deployments(cluster, "strict") == {"gpu-engine:1": 4, "gpu-engine:2": 1}
    assert cluster.status("strict")["readyReplicas"] == 4
    cluster.apply("strict", image="gpu-engine:1", unified=gpus, rollout=strict)
    wait(lambda: cluster.ready("strict").get("status") == "True")
    assert cluster.plane.kubectl("delete", "infsvc", "strict").returncode == 0


def test_old_engines_stay_when_a_new_one_was_ready_only_briefly(cluster: Cluster) -> None:  # noqa: F811
    cluster.apply("look", image="engine:1", rollout={"minReadySeconds": 600})
    wait(lambda: cluster.ready("look").get("status") == "True")
    cluster.apply("look", image="engine:2", rollout={"minReadySeconds": 600})

    def new_ready() -> list[dict[str, Any]]:
        pods = [p for p in cluster.children("look", "pods") if p["spec"]["containers"][0]["image"] == "engine:2"]
        return [p for p in pods for c in p["status"].get("conditions", ()) if c["type"] == "Ready"]

    (pod,) = wait(new_ready)
    cluster.look_again("look")
    assert deployments(cluster, "look") == {"engine:1": 2, "engine:2": 1}
    set_ready(cluster, pod, ready=False)
    wait(lambda: cluster.status("look")["readyReplicas"] == 2)
    cluster.look_again("look")
    assert deployments(cluster, "look") == {"engine:1": 2, "engine:2": 1}
    cluster.apply("look", image="engine:2", rollout={"minReadySeconds": 0})  # changing this restarts nothing
    set_ready(cluster, pod, ready=True)
    wait(lambda: deployments(cluster, "look") == {"engine:2": 2}, limit_s=60)


def test_engines_that_go_are_labelled_first_and_the_label_goes_when_they_stay(cluster: Cluster) -> None:  # noqa: F811
    cluster.apply("drained", unified={"replicas": 3})
    wait(lambda: cluster.ready("drained").get("status") == "True")

    def draining() -> list[dict[str, Any]]:
        pods = cluster.children("drained", "pods")
        return [p for p in pods if p["metadata"]["labels"].get("serving.mini-infer.io/draining") == "true"]

    cluster.apply("drained", unified={"replicas": 2})
    (chosen,) = wait(draining)
    assert chosen["metadata"]["annotations"]["controller.kubernetes.io/pod-deletion-cost"] == "-1"
    cluster.apply("drained", unified={"replicas": 3})
    wait(lambda: not draining())
    assert len(cluster.children("drained", "pods")) == 3
    cluster.apply("drained", unified={"replicas": 2})
    (chosen,) = wait(draining)
    wait(lambda: len(cluster.children("drained", "pods")) == 2)
    assert chosen["metadata"]["uid"] not in {p["metadata"]["uid"] for p in cluster.children("drained", "pods")}
