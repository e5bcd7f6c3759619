"""The operator as a process, on a real API server with fake nodes: apply, scale, edit, break, delete."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from base64 import b64decode
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from mini_infer_contract import metrics as names
from mini_infer_contract.peer_auth import PeerSecret
from mini_infer_operator.objects.api import KubernetesApi
from mini_infer_operator.objects.backend import ClusterBackend
from mini_infer_operator.objects.cache import ObjectCache
from mini_infer_operator.objects.kinds import KINDS
from mini_infer_operator.reconcile import reconcile
from mini_infer_operator.settings import OperatorSettings
from tests.support.api_servers import server_of
from tests.support.control_plane import ControlPlane
from tests.support.operator_process import CHILDREN, LABEL, Cluster, OperatorProcess, wait
from tests.support.services import changed

pytestmark = [pytest.mark.cluster]


@pytest.fixture(scope="module")
def cluster(plane_with_pods: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with OperatorProcess(plane_with_pods, tmp_path_factory.mktemp("operator")) as operator:
        yield Cluster(plane_with_pods, operator.url)


def test_a_service_becomes_ready_with_all_its_children(cluster: Cluster) -> None:
    cluster.apply("alpha")
    wait(lambda: cluster.ready("alpha").get("status") == "True")
    children = cluster.children("alpha")
    (service,) = [s for s in cluster.get("infsvc") if s["metadata"]["name"] == "alpha"]
    revision = service["status"]["revision"]
    assert {(c["kind"], c["metadata"]["name"]) for c in children} == {
        ("Deployment", f"alpha-unified-{revision}"),
        ("ControllerRevision", f"alpha-unified-{revision}"),
        ("Service", "alpha-engines"),
        ("Service", "alpha-weights"),
        ("PodDisruptionBudget", "alpha-engines"),
    }
    for child in children:
        (owner,) = child["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == (service["metadata"]["uid"], True)
    status = service["status"]
    assert (status["replicas"], status["readyReplicas"], status["model"]) == (2, 2, "alpha")
    assert status["observedGeneration"] == service["metadata"]["generation"]
    assert status["url"] == "http://alpha-engines.default.svc:8000"
    managers = {entry["manager"] for entry in service["metadata"]["managedFields"]}
    assert managers == {"kubectl", "mini-infer-operator-status"}
    assert "finalizers" not in service["metadata"]
    assert "annotations" not in service["metadata"]


def test_kubectl_get_shows_the_printer_columns(cluster: Cluster) -> None:
    cluster.apply("columns", model={"name": "My/Model"})
    wait(lambda: cluster.ready("columns").get("status") == "True")
    lines = cluster.plane.kubectl("get", "infsvc", "columns").stdout.splitlines()
    columns = "NAME READY REASON MODEL REPLICAS READY REPLICAS PREFILL DECODE TP GPUS AGE"
    assert lines[0].split() == columns.split()
    assert lines[1].split()[:7] == ["columns", "True", "AllReplicasReady", "My/Model", "2", "2", "0"]


def test_a_services_peer_secret_equals_the_one_derived_by_gateways(cluster: Cluster) -> None:
    cluster.apply("keyed")
    wait(lambda: cluster.ready("keyed").get("status") == "True")
    root, derived = (
        json.loads(cluster.plane.kubectl("get", "secret", name, "-o", "json").stdout)
        for name in ("mini-infer-peer-root", "keyed-peers")
    )
    secret = PeerSecret(bytes.fromhex(b64decode(root["data"]["key"]).decode()))
    assert b64decode(derived["data"]["key"]).decode() == secret.for_service("default/keyed").hex()
    (owner,) = derived["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"]) == ("InferenceService", "keyed")
    (pod, *_) = cluster.children("keyed", "pods")
    assert pod["metadata"]["annotations"]["serving.mini-infer.io/peer-auth"] == "service"
    assert "keyed-peers" in {volume.get("secret", {}).get("secretName") for volume in pod["spec"]["volumes"]}


def has_settled(cluster: Cluster, name: str) -> bool:
    """Returns True once the Deployment controller has noted that all engines are available: it writes nothing more."""
    conditions = [c for d in cluster.children(name, "deployments") for c in d.get("status", {}).get("conditions", ())]
    return any(c["type"] == "Progressing" and c["reason"] == "NewReplicaSetAvailable" for c in conditions)


def test_no_writes_are_made_when_a_service_is_at_rest(cluster: Cluster) -> None:
    cluster.apply("rest", unified={"resources": {"requests": {"cpu": "0.25", "memory": "1024Mi"}}})
    wait(lambda: cluster.ready("rest").get("status") == "True")

    def versions() -> dict[str, str]:
        items = cluster.children("rest") + [s for s in cluster.get("infsvc") if s["metadata"]["name"] == "rest"]
        return {f"{i['kind']}/{i['metadata']['name']}": i["metadata"]["resourceVersion"] for i in items}

    def is_only_read_by_a_reconcile() -> bool:
        before, since = versions(), cluster.reconciles()
        (poked,) = [key for key in before if key.startswith("ControllerRevision/")]
        poke = cluster.plane.kubectl(
            "label", poked, "--overwrite", f"poke={time.time_ns()}"
        )  # an event, so a reconcile
        assert poke.returncode == 0, poke.stderr
        cluster.wait_for_reconcile(since)
        after = versions()
        assert after.pop(poked) != before.pop(poked)
        return after == before

    wait(lambda: has_settled(cluster, "rest"))
    cluster.look_again("rest")
    wait(is_only_read_by_a_reconcile)  # at last: Kubernetes' controllers write what they have counted when they can


async def test_no_rollout_starts_when_a_newer_operator_renders_differently(cluster: Cluster) -> None:
    cluster.apply("upgrade")
    wait(lambda: cluster.ready("upgrade").get("status") == "True")
    (before,) = cluster.children("upgrade", "deployments")
    newer = OperatorSettings(engine_image="engine:1", engine_image_pull_policy="Always")
    async with server_of(cluster.plane.kubeconfig) as client:
        api, cache = KubernetesApi(client), ObjectCache()
        for kind in KINDS:
            if "watch" in kind.verbs and not kind.optional:
                cache.replace(kind.name, None, (await api.list(kind.name, None))[0])
        await reconcile(ClusterBackend(api, cache, newer, "default", "upgrade"))
    (after,) = cluster.children("upgrade", "deployments")
    assert after["metadata"]["generation"] == before["metadata"]["generation"]
    assert after["spec"]["template"]["spec"]["containers"][0]["imagePullPolicy"] == "IfNotPresent"


def test_revision_and_pods_are_kept_when_a_service_is_scaled(cluster: Cluster) -> None:
    cluster.apply("scale", unified={"replicas": 1})
    wait(lambda: cluster.ready("scale").get("status") == "True")
    (pod,) = cluster.children("scale", "pods")
    revision = cluster.status("scale")["revision"]
    cluster.apply("scale", unified={"replicas": 3})
    wait(lambda: cluster.status("scale")["readyReplicas"] == 3)
    assert cluster.status("scale")["revision"] == revision
    assert pod["metadata"]["uid"] in {p["metadata"]["uid"] for p in cluster.children("scale", "pods")}
    cluster.apply("scale", unified={"replicas": 0})
    wait(lambda: cluster.ready("scale").get("reason") == "ScaledToZero")
    wait(lambda: not cluster.children("scale", "pods"))


def test_an_edit_replaces_engines_without_losing_availability(cluster: Cluster) -> None:
    cluster.apply("edit")
    wait(lambda: cluster.ready("edit").get("status") == "True")
    before = cluster.status("edit")["revision"]
    # Ready comes first: available are those that have been ready for minReadySeconds.
    wait(lambda: sum(d["status"].get("availableReplicas", 0) for d in cluster.children("edit", "deployments")) == 2)
    cluster.apply("edit", unified={"engine": {"maxNumSeqs": 8}})
    available: list[int] = []

    def rolled() -> bool:
        deployments = cluster.children("edit", "deployments")
        available.append(sum(d["status"].get("availableReplicas", 0) for d in deployments))
        assert sum(d["spec"]["replicas"] for d in deployments) <= 3
        return cluster.status("edit")["revision"] != before and len(deployments) == 1

    wait(rolled, limit_s=60)
    wait(lambda: cluster.ready("edit").get("status") == "True")
    assert min(available) >= 2
    kinds = [child["kind"] for child in cluster.children("edit")]
    assert sorted(kinds) == ["ControllerRevision"] * 2 + [
        "Deployment",
        "PodDisruptionBudget",
        "Service",
        "Service",
    ]  # one is history


def test_the_second_eviction_is_refused_until_the_first_is_replaced(cluster: Cluster) -> None:
    cluster.apply("evict")
    wait(lambda: cluster.ready("evict").get("status") == "True")
    wait(lambda: cluster.children("evict", "poddisruptionbudgets")[0].get("status", {}).get("disruptionsAllowed") == 1)
    first, second = (pod["metadata"]["name"] for pod in cluster.children("evict", "pods"))
    with cluster.without_room():
        assert cluster.evict(first).returncode == 0
        refused = cluster.evict(second)
    assert refused.returncode != 0
    assert "disruption budget" in refused.stderr
    cluster.apply("evict", disruptionBudget={"enabled": False})
    wait(lambda: not cluster.children("evict", "poddisruptionbudgets"))


def test_orphaned_children_are_adopted_when_the_service_is_recreated(cluster: Cluster) -> None:
    """`kubectl delete --cascade=orphan`, an edit, and apply again: the standard way to make a resource anew."""
    cluster.apply("adopt")
    wait(lambda: cluster.ready("adopt").get("status") == "True")
    (old,) = cluster.children("adopt", "deployments")
    pods = {pod["metadata"]["uid"] for pod in cluster.children("adopt", "pods")}
    assert cluster.plane.kubectl("delete", "infsvc", "adopt", "--cascade=orphan").returncode == 0
    wait(lambda: all("ownerReferences" not in child["metadata"] for child in cluster.children("adopt")))

    cluster.apply("adopt")
    wait(lambda: cluster.ready("adopt").get("status") == "True")
    (service,) = [s for s in cluster.get("infsvc") if s["metadata"]["name"] == "adopt"]
    children = cluster.children("adopt")
    assert {c["metadata"]["ownerReferences"][0]["uid"] for c in children} == {service["metadata"]["uid"]}
    assert old["metadata"]["uid"] in {child["metadata"]["uid"] for child in children}
    assert {pod["metadata"]["uid"] for pod in cluster.children("adopt", "pods")} == pods

    assert cluster.plane.kubectl("delete", "infsvc", "adopt", "--cascade=orphan").returncode == 0
    wait(lambda: all("ownerReferences" not in child["metadata"] for child in cluster.children("adopt")))
    cluster.apply("adopt", unified={"engine": {"maxNumSeqs": 8}})  # the orphan is now of an older revision
    wait(lambda: old["metadata"]["uid"] not in {c["metadata"]["uid"] for c in cluster.children("adopt")})
    wait(lambda: cluster.ready("adopt").get("status") == "True")
    assert len(cluster.children("adopt")) == 6  # with the older ControllerRevision, which is history


def test_the_service_adopts_planned_manifests_when_they_were_applied_before(cluster: Cluster, tmp_path: Path) -> None:
    service = tmp_path / "service.yaml"
    service.write_text(yaml.safe_dump(changed({"metadata": {"name": "planned"}})))
    command = [sys.executable, "-m", "mini_infer_operator.cli", "plan", "-f", str(service), "--engine-image=engine:1"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    manifests = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert cluster.plane.kubectl("apply", "-f", "-", stdin=manifests).returncode == 0
    wait(lambda: all(d["status"].get("readyReplicas") == 2 for d in cluster.children("planned", "deployments")))
    pods = {pod["metadata"]["uid"] for pod in cluster.children("planned", "pods")}
    cluster.plane.apply(yaml.safe_load(service.read_text()))
    wait(lambda: cluster.ready("planned").get("status") == "True")
    assert {pod["metadata"]["uid"] for pod in cluster.children("planned", "pods")} == pods


def test_identity_is_kept_when_a_label_is_changed_by_hand(cluster: Cluster) -> None:
    cluster.apply("labels")
    wait(lambda: cluster.ready("labels").get("status") == "True")
    (deployment,) = cluster.children("labels", "deployments")
    name, revision = deployment["metadata"]["name"], "serving.mini-infer.io/revision"
    cluster.plane.kubectl("label", "deployment", name, f"{revision}=other", "--overwrite")
    wait(lambda: cluster.children("labels", "deployments")[0]["metadata"]["labels"][revision] != "other")
    cluster.plane.kubectl("label", "deployment", name, f"{LABEL}-")  # now our watch does not see it any more
    wait(lambda: len(cluster.children("labels", "deployments")) == 1)
    assert cluster.children("labels", "deployments")[0]["metadata"]["uid"] == deployment["metadata"]["uid"]
    assert len(cluster.children("labels", "controllerrevisions")) == 1


def test_a_child_is_recreated_when_it_is_deleted(cluster: Cluster) -> None:
    cluster.apply("heal")
    wait(lambda: cluster.ready("heal").get("status") == "True")
    for child in cluster.children("heal"):
        kind, name = child["kind"], child["metadata"]["name"]
        assert cluster.plane.kubectl("delete", kind, name, "--wait=false").returncode == 0

        def back(kind: str = kind, name: str = name, old_uid: str = child["metadata"]["uid"]) -> bool:
            found = [c["metadata"] for c in cluster.children("heal") if c["kind"] == kind]
            return any(metadata["name"] == name and metadata["uid"] != old_uid for metadata in found)

        wait(back)


def test_drift_is_repaired_when_a_child_is_changed(cluster: Cluster) -> None:
    cluster.apply("drift")
    wait(lambda: cluster.ready("drift").get("status") == "True")
    (deployment,) = cluster.children("drift", "deployments")
    cluster.plane.kubectl("scale", "deployment", deployment["metadata"]["name"], "--replicas=5")
    # Those above the wanted number drain first, and each is asked what it runs: a second where nobody answers.
    wait(lambda: cluster.children("drift", "deployments")[0]["spec"]["replicas"] == 2)


@pytest.mark.parametrize(
    ("command", "field"),
    [
        (["set", "env", "FOO=bar"], "spec.template.spec.containers[engine].env[FOO]"),
        (["rollout", "pause"], "spec.paused"),
        ({"template": {"spec": {"hostNetwork": True}}}, "spec.template.spec.hostNetwork"),
        (
            {"template": {"spec": {"containers": [{"name": "evil", "image": "evil:2"}]}}},
            "spec.template.spec.containers[evil]",
        ),
        ({"strategy": {"type": "Recreate", "rollingUpdate": None}}, "spec.strategy"),
    ],
    ids=["variable", "paused", "host network", "sidecar", "strategy"],
)
def test_a_field_is_removed_and_an_event_recorded_when_somebody_adds_it(
    cluster: Cluster, command: list[str] | dict[str, Any], field: str
) -> None:
    cluster.apply("added")
    wait(lambda: cluster.ready("added").get("status") == "True")
    (before,) = cluster.children("added", "deployments")
    name = before["metadata"]["name"]
    patch = ["patch", "deployment", name, "--patch", json.dumps({"spec": command})]
    arguments = patch if isinstance(command, dict) else [*command[:2], f"deployment/{name}", *command[2:]]
    done = cluster.plane.kubectl(*arguments)
    assert done.returncode == 0, done.stderr

    def repaired() -> bool:
        (after,) = cluster.children("added", "deployments")
        changed = after["metadata"]["generation"] > before["metadata"]["generation"]
        return changed and after["spec"] == before["spec"]

    wait(repaired)
    wait(lambda: f"{field}" in cluster.plane.kubectl("describe", "infsvc", "added").stdout)


@pytest.mark.parametrize(
    ("command", "reported"),
    [
        (["scale", "--replicas=5"], "kubectl had set spec.replicas"),
        (["set", "image", "engine=other:2"], "kubectl-set had set spec.template.spec.containers[engine].image"),
        (["set", "env", "HOME=/root"], "kubectl-set had set spec.template.spec.containers[engine].env[HOME].value"),
        (["set", "env", "HOME-"], "somebody had removed spec.template.spec.containers[engine].env[HOME]"),
    ],
    ids=["replicas", "image", "variable", "variable removed"],
)
def test_a_field_of_the_operator_is_put_back_with_an_event_when_somebody_changes_it(
    cluster: Cluster, command: list[str], reported: str
) -> None:
    cluster.apply("changed")
    wait(lambda: cluster.ready("changed").get("status") == "True")
    (before,) = cluster.children("changed", "deployments")
    verbs = [word for word in command if word.isalpha()]
    target = f"deployment/{before['metadata']['name']}"
    done = cluster.plane.kubectl(*verbs, target, *command[len(verbs) :])
    assert done.returncode == 0, done.stderr

    def repaired() -> bool:
        (after,) = cluster.children("changed", "deployments")
        changed = after["metadata"]["generation"] > before["metadata"]["generation"]
        return changed and after["spec"] == before["spec"]

    wait(repaired)
    wait(lambda: f"{reported}; it was put back" in cluster.plane.kubectl("describe", "infsvc", "changed").stdout)


def test_foreign_labels_and_allowed_managers_are_left_alone(cluster: Cluster) -> None:
    annotations = {"serving.mini-infer.io/ignore-managers": "mesh"}  # there before the change: watches have no order
    spec = {"rollout": {"minReadySeconds": 1}}
    cluster.plane.apply(changed({"metadata": {"name": "tolerant", "annotations": annotations}, "spec": spec}))
    wait(lambda: cluster.ready("tolerant").get("status") == "True")
    (deployment,) = cluster.children("tolerant", "deployments")
    name = deployment["metadata"]["name"]
    cluster.plane.kubectl("label", "deployment", name, "argocd.argoproj.io/instance=app")
    sidecar = {"spec": {"template": {"spec": {"containers": [{"name": "proxy", "image": "proxy:1"}]}}}}
    cluster.plane.kubectl("patch", "deployment", name, f"--patch={json.dumps(sidecar)}", "--field-manager=mesh")
    cluster.plane.kubectl("rollout", "restart", f"deployment/{name}")
    cluster.look_again("tolerant")
    pod = cluster.children("tolerant", "pods")[-1]["metadata"]["name"]
    cluster.plane.kubectl("label", "pod", pod, "serving.mini-infer.io/draining=true")
    cluster.look_again("tolerant")
    by_name = {p["metadata"]["name"]: p["metadata"]["labels"] for p in cluster.children("tolerant", "pods")}
    assert by_name.get(pod, {}).get("serving.mini-infer.io/draining", "true") == "true"
    (after,) = cluster.children("tolerant", "deployments")
    template = after["spec"]["template"]
    assert {container["name"] for container in template["spec"]["containers"]} == {"engine", "proxy"}
    assert "kubectl.kubernetes.io/restartedAt" in template["metadata"]["annotations"]
    assert after["metadata"]["labels"]["argocd.argoproj.io/instance"] == "app"


def test_decisions_appear_as_events_in_kubectl_describe(cluster: Cluster) -> None:
    cluster.apply("told")
    wait(lambda: cluster.ready("told").get("status") == "True")
    cluster.apply("told", unified={"replicas": 1})
    wait(lambda: cluster.status("told").get("readyReplicas") == 1)
    revision = cluster.status("told")["revision"]

    def described() -> str:
        return cluster.plane.kubectl("describe", "infsvc", "told").stdout.partition("\nEvents:")[2]

    expected = (
        "goes from 2 to 1 engine",
        f"unified revision {revision} starts with 2 engines, image engine:1",
        f"the first engine of unified revision {revision} is ready after",
    )
    lines = wait(lambda: all(sentence in (text := described()) for sentence in expected) and text)
    wait(lambda: ["Normal", "AllReplicasReady"] in [line.split()[:2] for line in described().splitlines()])
    assert lines.count("RevisionStarted") == lines.count("ScaledDown") == 1


def test_the_operator_exports_its_metrics(cluster: Cluster) -> None:
    cluster.apply("counted")
    wait(lambda: cluster.ready("counted").get("status") == "True")
    seen = wait(lambda: (s := cluster.samples())[names.OPERATOR_QUEUE_DEPTH] == 0 and s)
    reported = {value for name, value in vars(names).items() if name.startswith("OPERATOR_")}
    histograms = {
        names.OPERATOR_RECONCILE_DURATION,
        names.OPERATOR_ROLLOUT_DURATION,
        names.OPERATOR_ENGINE_START,
    }
    quiet = {names.OPERATOR_RECONCILE_ERRORS}
    assert reported - histograms - quiet <= set(seen)
    assert {f"{name}_count" for name in histograms} <= set(seen)
    assert seen[names.OPERATOR_SERVICES] == len(cluster.get("infsvc"))
    assert seen[f"{names.OPERATOR_RECONCILE_DURATION}_count"] == seen[names.OPERATOR_RECONCILES] > 0
    assert seen[names.OPERATOR_OLDEST_UNSYNCED] == 0
    with urllib.request.urlopen(f"{cluster.operator_url}/healthz", timeout=60) as answer:
        assert json.loads(answer.read()) == {"ok": True, "problems": []}


def test_the_owner_is_reported_when_services_share_a_model_name(cluster: Cluster) -> None:
    cluster.apply("first-claim", model={"name": "shared"})
    wait(lambda: cluster.status("first-claim").get("model") == "shared")
    (first,) = [one for one in cluster.get("infsvc") if one["metadata"]["name"] == "first-claim"]
    created = datetime.fromisoformat(first["metadata"]["creationTimestamp"])
    wait(lambda: datetime.now(UTC) - created >= timedelta(seconds=1))  # creation times have whole seconds
    cluster.apply("another-claim", model={"name": "shared"})
    wait(lambda: cluster.status("another-claim").get("model") == "default/another-claim")

    def owned(name: str) -> list[str]:
        return [c["message"] for c in cluster.status(name)["conditions"] if c["type"] == "ModelNameOwned"]

    wait(lambda: "default/another-claim claim it too" in (owned("first-claim") or [""])[0])
    assert "reach default/first-claim, which is older" in owned("another-claim")[0]
    assert cluster.plane.kubectl("delete", "infsvc", "first-claim").returncode == 0
    wait(lambda: cluster.status("another-claim").get("model") == "shared" and not owned("another-claim"))

    def has_event(reason: str) -> bool:
        chosen = f"--field-selector=reason={reason},involvedObject.name=another-claim"
        return bool(cluster.plane.kubectl("get", "events", chosen, "-o=name").stdout)

    wait(lambda: has_event("ModelNameLost") and has_event("ModelNameGained"))


def test_no_children_are_left_when_a_service_is_deleted(cluster: Cluster) -> None:
    cluster.apply("gone")
    wait(lambda: cluster.ready("gone").get("status") == "True")
    assert cluster.plane.kubectl("delete", "infsvc", "gone").returncode == 0
    wait(lambda: not cluster.children("gone", f"{CHILDREN},pods,replicasets"))


def test_the_reason_is_reported_when_a_pod_does_not_start(cluster: Cluster) -> None:
    cluster.apply("broken", image="engine:broken")
    ready = wait(lambda: (r := cluster.ready("broken")).get("reason") == "ImagePullFailed" and r)
    assert "ImagePullBackOff: there is no such image" in ready["message"]
    cluster.apply("broken", image="engine:2")
    wait(lambda: cluster.ready("broken").get("status") == "True")


def test_the_api_servers_message_is_reported_when_it_refuses_a_child(cluster: Cluster) -> None:
    cluster.apply("refused", unified={"template": {"spec": {"tolerations": [{"key": "a b", "operator": "Exists"}]}}})
    ready = wait(lambda: (r := cluster.ready("refused")).get("reason") == "Refused" and r)
    assert "tolerations[0].key" in ready["message"]
    cluster.apply("refused")
    assert cluster.plane.kubectl("delete", "infsvc", "refused").returncode == 0


def test_a_foreign_object_is_left_alone_when_its_name_collides(cluster: Cluster) -> None:
    theirs = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "taken-engines", "namespace": "default"},
        "spec": {"ports": [{"port": 1}]},
    }
    cluster.plane.apply(theirs)
    cluster.apply("taken")
    ready = wait(lambda: (r := cluster.ready("taken")).get("reason") == "NameTaken" and r)
    assert "Service taken-engines exists and does not belong" in ready["message"]
    assert cluster.plane.kubectl("delete", "service", "taken-engines").returncode == 0
    cluster.plane.kubectl("annotate", "infsvc", "taken", "look=again")  # or in a minute by itself
    wait(lambda: cluster.ready("taken").get("status") == "True")
