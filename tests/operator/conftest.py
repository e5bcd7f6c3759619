"""One control plane for all tests that need the real API server; it starts in about five seconds."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mini_infer_operator import parse
from mini_infer_operator.resource import InferenceService
from mini_infer_operator.resource.not_yet import NOT_YET
from tests.support.control_plane import ControlPlane, find_programs
from tests.support.operator_process import Cluster

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    programs = find_programs()
    if programs is None:
        pytest.skip("needs etcd, kube-apiserver and kubectl in the folder named by KUBEBUILDER_ASSETS (setup-envtest)")
    plane = ControlPlane(programs, tmp_path_factory.mktemp("control-plane"))
    try:
        plane.start()
        made = plane.kubectl("apply", "--server-side", "-f", str(ROOT / "crds"))
        assert made.returncode == 0, made.stderr
        for _ in range(50):  # kubectl gives up where the CRD has no conditions at all yet
            waited = plane.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
            if waited.returncode == 0:
                break
        assert waited.returncode == 0, waited.stderr
        yield plane
    finally:
        plane.stop()


@pytest.fixture(scope="session")
def plane_with_pods(control_plane: ControlPlane) -> ControlPlane:
    """The control plane where it also schedules pods, which kwok then runs."""
    if not control_plane.runs_pods:
        pytest.skip("needs kube-controller-manager, kube-scheduler and kwok in the folder named by KUBEBUILDER_ASSETS")
    return control_plane


@pytest.fixture
def cluster(plane_with_pods: ControlPlane) -> Iterator[Cluster]:
    """Without services and without an operator: the test starts its own."""
    cluster = Cluster(plane_with_pods)
    yield cluster
    cluster.clear()


@pytest.fixture
def everything_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Services are not refused for what engines cannot do yet: what the operator makes of them is tested before."""
    rules = tuple(rule for rule in InferenceService.rules if rule not in NOT_YET)
    monkeypatch.setattr(InferenceService, "rules", rules)
    monkeypatch.setattr(parse, "_checked", parse._checked.__wrapped__)  # what stays parsed knows the other rules
