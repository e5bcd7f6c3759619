"""Prefill, decode and groups over nodes on a real API server, with a stand-in for LeaderWorkerSet's controller."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
import yaml

from mini_infer_operator.objects.render import render
from mini_infer_operator.observe import Observed
from mini_infer_operator.parse import parse_service
from mini_infer_operator.plan.plan import make_plan
from tests.support.control_plane import ControlPlane
from tests.support.leader_worker_sets import CRD, leader_worker_sets
from tests.support.operator_process import ROOT, Cluster, OperatorProcess, crd_without_refusals, wait
from tests.support.services import changed

pytestmark = [pytest.mark.cluster]
ROLE, REVISION = "serving.mini-infer.io/role", "serving.mini-infer.io/revision"
WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
CPU = {"device": "cpu"}


@pytest.fixture(scope="module")
def plane(plane_with_pods: ControlPlane) -> Iterator[ControlPlane]:
    """With a CRD that takes what engines cannot do yet."""
    crd = yaml.safe_dump(crd_without_refusals())
    applied = plane_with_pods.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=crd)
    assert applied.returncode == 0, applied.stderr  # another test's operator may own its fields
    yield plane_with_pods
    plane_with_pods.kubectl("delete", "infsvc,infscaler", "--all")
    plane_with_pods.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(ROOT / "crds"))


@pytest.fixture(scope="module")
def without_groups(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """No LeaderWorkerSet is served."""
    with OperatorProcess(plane, tmp_path_factory.mktemp("operator"), refuses=False) as operator:
        yield Cluster(plane, operator.url)


@pytest.fixture(scope="module")
def cluster(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    assert plane.kubectl("apply", "--server-side", "-f", str(CRD)).returncode == 0
    assert plane.kubectl("wait", "--for=condition=Established", "-f", str(CRD), "--timeout=30s").returncode == 0
    wait(lambda: plane.kubectl("get", "leaderworkersets").returncode == 0)  # an API server takes a moment for it
    folder = tmp_path_factory.mktemp("operator")
    with OperatorProcess(plane, folder, refuses=False) as operator, leader_worker_sets(plane.kubeconfig):
        yield Cluster(plane, operator.url)
    plane.kubectl("delete", "infsvc", "--all")
    plane.kubectl("delete", "-f", str(CRD))


def pair(cluster: Cluster, name: str, **decode: Any) -> None:
    cluster.apply(name, unified=None, prefill={"replicas": 1}, decode={"replicas": 2, **decode})


def replicas(cluster: Cluster, name: str) -> dict[tuple[str, str], int]:
    """By role and revision."""
    found = cluster.children(name, "deployments")
    labels = [deployment["spec"]["selector"]["matchLabels"] for deployment in found]
    return {(at[ROLE], at[REVISION]): d["spec"]["replicas"] for at, d in zip(labels, found, strict=True)}


def test_no_leader_worker_set_is_reported_when_the_cluster_has_no_such_kind(without_groups: Cluster) -> None:
    group = {"replicas": 1, "parallelism": {"tensor": 2, "nodes": 2}, "engine": CPU}
    without_groups.apply("nobody", unified=group)
    wait(lambda: without_groups.ready("nobody").get("reason") == "NoLeaderWorkerSet")
    assert "unified engines span several nodes" in without_groups.ready("nobody")["message"]
    without_groups.apply("nobody", unified={**group, "parallelism": {"tensor": 2}})
    wait(lambda: without_groups.ready("nobody").get("status") == "True")
    assert without_groups.plane.kubectl("delete", "infsvc", "nobody").returncode == 0


def test_prefill_and_decode_become_ready_with_their_own_children(cluster: Cluster) -> None:
    pair(cluster, "pair", parallelism={"tensor": 2}, engine=CPU)
    wait(lambda: cluster.ready("pair").get("status") == "True")
    revision = cluster.status("pair")["revision"]
    assert replicas(cluster, "pair") == {("prefill", revision): 1, ("decode", revision): 2}
    budgets = {b["metadata"]["name"]: b["spec"]["selector"] for b in cluster.children("pair", "poddisruptionbudgets")}
    assert {name: s["matchLabels"][ROLE] for name, s in budgets.items()} == {
        "pair-prefill": "prefill",
        "pair-decode": "decode",
    }
    services = {service["metadata"]["name"]: service for service in cluster.children("pair", "services")}
    assert services["pair-engines"]["spec"]["selector"][ROLE] == "decode"
    lines = cluster.plane.kubectl("get", "infsvc", "pair").stdout.splitlines()
    assert lines[1].split()[4:10] == ["3", "3", "1/1", "2/2", "1/2", "0"]
    message = cluster.ready("pair")["message"]
    assert message == "prefill 1 of 1 and decode 2 of 2 engines are ready"


def test_roles_roll_in_step_when_their_spec_changes(cluster: Cluster) -> None:
    pair(cluster, "step")
    wait(lambda: cluster.ready("step").get("status") == "True")
    before = cluster.status("step")["revision"]
    pair(cluster, "step", engine={"maxNumSeqs": 8})
    seen: list[dict[tuple[str, str], int]] = []

    def rolled() -> bool:
        seen.append(replicas(cluster, "step"))
        return not any(revision == before for _, revision in seen[-1])

    wait(rolled, limit_s=60)
    for counts in seen:
        old = {role: counts.get((role, before), 0) for role in ("prefill", "decode")}
        assert not old["decode"] or old["prefill"], seen
    wait(lambda: cluster.ready("step").get("status") == "True")


def test_the_message_names_the_role_when_one_fails(cluster: Cluster) -> None:
    pair(cluster, "fault", template={"spec": {"nodeSelector": {"there-is": "none"}}})
    reported = "prefill 1 of 1 and decode 0 of 2 engines are ready; fault-decode-"
    # The prefill engine may be ready last, and the scheduler may be slow to say why the others are not.
    wait(
        lambda: (r := cluster.ready("fault")).get("message", "").startswith(reported) and r["reason"] == "Unschedulable"
    )


def test_an_inference_scaler_scales_its_role(cluster: Cluster) -> None:
    pair(cluster, "byrole")
    spec = {"service": "byrole", "role": "decode"}
    scaler = {"apiVersion": "serving.mini-infer.io/v1alpha1", "kind": "InferenceScaler", "spec": spec}
    cluster.plane.apply({**scaler, "metadata": {"name": "byrole-decode", "namespace": "default"}})
    wait(lambda: cluster.ready("byrole").get("status") == "True")
    wait(lambda: [found["spec"].get("replicas") for found in cluster.get("infscaler")] == [2])
    assert cluster.plane.kubectl("scale", "infscaler/byrole-decode", "--replicas=3").returncode == 0
    wait(
        lambda: (
            {r["name"]: r["ready"] for r in cluster.status("byrole")["roles"]} == {"prefill": "1/1", "decode": "3/3"}
        )
    )
    assert cluster.plane.kubectl("delete", "infscaler/byrole-decode").returncode == 0


def test_availability_is_kept_when_an_edit_replaces_unified_by_roles(cluster: Cluster) -> None:
    cluster.apply("change", unified={"replicas": 2})
    wait(lambda: cluster.ready("change").get("status") == "True")
    wait(lambda: sum(d["status"].get("availableReplicas", 0) for d in cluster.children("change", "deployments")) == 2)
    pair(cluster, "change")
    available: list[int] = []

    def changed() -> bool:
        found = cluster.children("change", "deployments")
        answer = [d for d in found if d["spec"]["selector"]["matchLabels"][ROLE] != "prefill"]
        available.append(sum(d["status"].get("availableReplicas", 0) for d in answer))
        return cluster.ready("change").get("status") == "True" and "prefill" in json.dumps(cluster.status("change"))

    wait(changed, limit_s=60)
    assert min(available) >= 2


def group_pods(cluster: Cluster, name: str) -> dict[str, dict[str, Any]]:
    return {pod["metadata"]["name"]: pod for pod in cluster.children(name, "pods")}


def test_a_multi_node_group_starts_and_restarts_together(cluster: Cluster) -> None:
    cluster.apply("large", unified={"replicas": 2, "parallelism": {"tensor": 2, "nodes": 2}, "engine": CPU})
    wait(lambda: cluster.ready("large").get("status") == "True")
    revision = cluster.status("large")["revision"]
    (found,) = cluster.children("large", "leaderworkersets")
    assert found["metadata"]["name"] == f"large-unified-{revision}"
    pods = group_pods(cluster, "large")
    leader, worker = f"large-unified-{revision}-0", f"large-unified-{revision}-0-1"
    assert sorted(pods) == sorted(f"large-unified-{revision}-{end}" for end in ("0", "0-1", "1", "1-1"))
    environment = {e["name"]: e.get("value") for e in pods[worker]["spec"]["containers"][0]["env"]}
    address = f"{leader}.large-unified-{revision}.default"
    assert (environment["LWS_LEADER_ADDRESS"], environment["LWS_WORKER_INDEX"]) == (address, "1")
    assert "--nnodes=2" in pods[worker]["spec"]["containers"][0]["args"]
    assert cluster.status("large")["readyReplicas"] == 2

    assert cluster.plane.kubectl("delete", "pod", worker).returncode == 0

    def made_anew() -> bool:
        now = group_pods(cluster, "large")
        return {leader, worker} <= now.keys() and all(
            now[name]["metadata"]["uid"] != pods[name]["metadata"]["uid"] for name in (leader, worker)
        )

    wait(made_anew)
    other = f"large-unified-{revision}-1"
    assert group_pods(cluster, "large")[other]["metadata"]["uid"] == pods[other]["metadata"]["uid"]
    wait(lambda: cluster.ready("large").get("status") == "True")


def stateful_sets(found: dict[str, Any]) -> list[dict[str, Any]]:
    """As LeaderWorkerSet's controller makes them: one of all leaders, and one of the workers of each group.

    Its names stand in no label here that its stand-in knows, which else would look after these pods as well.
    """
    spec, name = found["spec"], f"{found['metadata']['name']}-real"
    groups, templates = spec["replicas"], spec["leaderWorkerTemplate"]
    expected = [(name, groups, 0, templates["leaderTemplate"])]
    expected += [(f"{name}-{n}", templates["size"] - 1, 1, templates["workerTemplate"]) for n in range(groups)]
    made = []
    for own, replicas, first, template in expected:
        labels = template["metadata"]["labels"] | {"set": own}
        pod = {**template, "metadata": {**template["metadata"], "labels": labels}}
        made.append(
            {
                "apiVersion": "apps/v1",
                "kind": "StatefulSet",
                "metadata": {"name": own, "namespace": "default"},
                "spec": {
                    "replicas": replicas,
                    "ordinals": {"start": first},
                    "podManagementPolicy": "Parallel",
                    "serviceName": name,
                    "selector": {"matchLabels": {"set": own}},
                    "template": pod,
                },
            }
        )
    return made


def settled(budget: dict[str, Any], pods: int) -> bool:
    status = budget.get("status", {})
    return bool(status.get("expectedPods") == status.get("currentHealthy") == pods and status["disruptionsAllowed"])


@pytest.mark.usefixtures("everything_works")
@pytest.mark.parametrize("allowed", [1, "50%"])
def test_only_one_group_loses_a_worker_when_pods_are_evicted(plane: ControlPlane, allowed: int | str) -> None:
    """Kubernetes counts a group's pods by StatefulSets: what is asked for in engines must hold all the same."""
    name = f"drained-{str(allowed).removesuffix('%')}"
    group = {"replicas": 2, "parallelism": {"tensor": 2, "nodes": 2}, "engine": CPU}
    spec = {"unified": group, "disruptionBudget": {"maxUnavailable": allowed}}
    service = parse_service(changed({"metadata": {"name": name, "uid": "u"}, "spec": spec}))
    manifests = render(service, make_plan(service, Observed(), datetime.now(UTC)), {}, None)
    (workload,) = (manifest for manifest in manifests if manifest["kind"] == "LeaderWorkerSet")
    (budget,) = (manifest for manifest in manifests if manifest["kind"] == "PodDisruptionBudget")
    del budget["metadata"]["ownerReferences"]
    sets = stateful_sets(workload)
    plane.apply(budget, *sets)
    cluster = Cluster(plane)
    try:
        found = wait(lambda: [b for b in cluster.children(name, "poddisruptionbudgets") if settled(b, pods=4)])
        assert found[0]["status"]["disruptionsAllowed"] == 1
        first, second = (f"{workers['metadata']['name']}-1" for workers in sets[1:])
        with cluster.without_room():
            evicted, refused = cluster.evict(first), cluster.evict(second)
        assert evicted.returncode == 0
        assert refused.returncode != 0
        assert "disruption budget" in refused.stderr
    finally:
        plane.kubectl("delete", "statefulset", *(one["metadata"]["name"] for one in sets))
        plane.kubectl("delete", "pdb", budget["metadata"]["name"])


def test_the_highest_group_is_drained_first_when_groups_scale_down(cluster: Cluster) -> None:
    spec = {"parallelism": {"tensor": 2, "nodes": 2}, "engine": CPU}
    cluster.apply("shrink", unified={"replicas": 2, **spec})
    wait(lambda: cluster.ready("shrink").get("status") == "True")
    kept = {n: p["metadata"]["uid"] for n, p in group_pods(cluster, "shrink").items() if "-0" in n[-4:]}
    since = cluster.plane.audit_log.stat().st_size
    cluster.apply("shrink", unified={"replicas": 1, **spec})
    wait(lambda: len(group_pods(cluster, "shrink")) == 2)
    labelled = {name for name in cluster.patched_pods(since) if name.startswith("shrink-")}
    assert {name[-2:] for name in labelled} == {"-1"}
    assert all(name.rsplit("-unified-")[1].split("-")[1] == "1" for name in labelled)
    assert {n: p["metadata"]["uid"] for n, p in group_pods(cluster, "shrink").items()} == kept


def test_old_engines_stay_until_the_group_is_ready_when_nodes_grow(cluster: Cluster) -> None:
    cluster.apply("grow", unified={"replicas": 1, "engine": CPU})
    wait(lambda: cluster.ready("grow").get("status") == "True")
    (old,) = cluster.children("grow", "pods")
    cluster.apply("grow", unified={"replicas": 1, "engine": CPU, "parallelism": {"tensor": 2, "nodes": 2}})
    ready_groups: list[bool] = []

    def rolled() -> bool:
        pods = group_pods(cluster, "grow")
        leaders = [p for p in pods.values() if p["metadata"]["labels"].get(WORKER_INDEX) == "0"]
        conditions = [condition for p in leaders for condition in p["status"].get("conditions", ())]
        ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
        ready_groups.append(ready or old["metadata"]["name"] in pods)
        return ready and old["metadata"]["name"] not in pods

    wait(rolled, limit_s=60)
    assert all(ready_groups)
    wait(lambda: not cluster.children("grow", "deployments"))
    wait(lambda: cluster.ready("grow").get("status") == "True")
