"""The operator where answers to its writes arrive a second late, after the watch has reported what came next."""

from collections.abc import Iterator

import pytest

from mini_infer_contract import metrics as names
from tests.support.control_plane import ControlPlane
from tests.support.late_answers import LateAnswers
from tests.support.operator_process import LABEL, Cluster, OperatorProcess, wait

pytestmark = [pytest.mark.cluster]
LATE_S = 1.0


@pytest.fixture(scope="module")
def late(plane_with_pods: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with (
        LateAnswers(plane_with_pods.kubeconfig, LATE_S) as proxy,
        OperatorProcess(plane_with_pods, tmp_path_factory.mktemp("operator"), server=proxy.url) as operator,
    ):
        yield Cluster(plane_with_pods, operator.url)
    plane_with_pods.kubectl("delete", "infsvc", "--all")


def test_a_deleted_service_stays_gone_when_the_answer_to_its_status_arrives_late(late: Cluster) -> None:
    brief = [f"brief-{number}" for number in range(4)]
    for name in brief:
        late.apply(name)
        wait(lambda name=name: late.status(name), every_s=0.02)  # written, and the answer is on its way
        late.plane.kubectl("delete", "infsvc", name, "--wait=false")
    late.apply("fence")  # its answers come after all of the above
    wait(lambda: late.ready("fence").get("status") == "True")
    assert late.samples()[names.OPERATOR_SERVICES] == 1, "services in the operator's cache"
    wait(lambda: not [c for name in brief for c in late.children(name)])


def test_a_deployment_is_made_again_when_it_was_deleted_before_the_answer_to_its_patch(late: Cluster) -> None:
    late.apply("patched", unified={"replicas": 2})
    wait(lambda: late.ready("patched").get("status") == "True")
    late.apply("patched", unified={"replicas": 3})
    wait(lambda: [d for d in late.children("patched", "deployments") if d["spec"]["replicas"] == 3], every_s=0.05)
    (before,) = late.children("patched", "deployments")
    late.plane.kubectl("delete", "deployment", before["metadata"]["name"], "--wait=false")
    wait(
        lambda: [
            d
            for d in late.children("patched", "deployments")
            if d["metadata"]["uid"] != before["metadata"]["uid"] and d.get("status", {}).get("readyReplicas") == 3
        ]
    )
    wait(lambda: late.ready("patched").get("status") == "True")


def test_a_rollout_ends_when_pods_are_deleted_before_the_answer_to_their_draining_label(late: Cluster) -> None:
    gpus = {"replicas": 2, "parallelism": {"tensor": 4}}
    late.apply("full", image="gpu-engine:1", unified=gpus)  # all eight GPUs of the node
    wait(lambda: late.ready("full").get("status") == "True")
    old = late.status("full")["revision"]
    late.apply("full", image="gpu-engine:2", unified=gpus)
    deleted = set[str]()

    def is_rolled() -> bool:
        pods = late.get("pods", f"{LABEL}=full")
        for pod in pods:
            name, labels = pod["metadata"]["name"], pod["metadata"]["labels"]
            if "serving.mini-infer.io/draining" in labels and name not in deleted:
                deleted.add(name)
                late.plane.kubectl("delete", "pod", name, "--grace-period=0", "--force")
        status = late.status("full")
        return status["revision"] != old and late.ready("full").get("status") == "True"

    wait(is_rolled, limit_s=120, every_s=0.15)
    assert deleted
