"""What the chart renders, by helm itself: rights, hardening, and which values it refuses."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from mini_infer_operator.permissions import CRD_RULES, LEASE_RULES, PEER_ROOT_RULES, RULES
from mini_infer_operator.resource import GROUP, PLURAL

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts/mini-infer"
HELM = shutil.which("helm", path=os.environ.get("KUBEBUILDER_ASSETS", "") + os.pathsep + os.environ["PATH"])

needs_helm = pytest.mark.skipif(HELM is None, reason="helm is neither in KUBEBUILDER_ASSETS nor on PATH")
pytestmark = pytest.mark.cluster


def helm(*arguments: str, version: str = "1.36.0") -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    return subprocess.run([HELM, *arguments, f"--kube-version={version}"], capture_output=True, text=True, timeout=60)


def render(*settings: str) -> list[dict[str, Any]]:
    return templates(*settings, version="1.36.0")


def templates(*settings: str, version: str) -> list[dict[str, Any]]:
    """Returns what the chart renders for a version of Kubernetes."""
    flags = ["--namespace=here", *(f"--set={setting}" for setting in settings)]
    done = helm("template", "mini-infer", str(CHART), *flags, version=version)
    assert done.returncode == 0, done.stderr
    return [item for item in yaml.safe_load_all(done.stdout) if item]


def of_kind(items: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    return {item["metadata"]["name"]: item for item in items if item["kind"] == kind}


def test_the_charts_crds_equal_the_repositorys() -> None:
    ours = {path.name: path.read_text() for path in (CHART / "crds").iterdir()}
    assert ours == {path.name: path.read_text() for path in (ROOT / "crds").iterdir()}, "run: make crds"


@needs_helm
def test_the_chart_passes_helm_lint() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout


@needs_helm
def test_rbac_rules_equal_the_verbs_that_are_used() -> None:
    roles = of_kind(render(), "ClusterRole")
    assert roles["mini-infer-operator"]["rules"] == RULES
    assert of_kind(render(), "Role")["mini-infer-operator-lease"]["rules"] == LEASE_RULES
    assert of_kind(render(), "Role")["mini-infer-operator-peer-root"]["rules"] == PEER_ROOT_RULES
    pods = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}
    services = {"apiGroups": [GROUP], "resources": [PLURAL], "verbs": ["get", "list", "watch"]}
    assert roles["mini-infer-gateway"]["rules"] == [pods, services]
    assert roles["mini-infer-crd-upgrade"]["rules"] == CRD_RULES
    names = {"operator", "gateway", "view", "edit", "crd-upgrade"}
    assert set(roles) == {f"mini-infer-{name}" for name in names}


@needs_helm
def test_a_pre_upgrade_hook_upgrades_the_crd_unless_disabled() -> None:
    (job,) = of_kind(render(), "Job").values()
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-upgrade"
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    operator = of_kind(render(), "Deployment")["mini-infer-operator"]["spec"]["template"]["spec"]["containers"][0]
    assert (container["image"], container["args"]) == (operator["image"], ["--apply-crd"])
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    hooks = [item for item in render() if "helm.sh/hook" in item["metadata"].get("annotations", {})]
    assert {item["kind"] for item in hooks} >= {"ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Job"}
    assert not of_kind(render("crds.upgrade=false"), "Job")
    assert not of_kind(render("namespace=team"), "Job")
    assert of_kind(render("namespace=team", "crds.upgrade=true"), "Job")


@needs_helm
def test_rbac_is_namespaced_when_a_namespace_is_set() -> None:
    items = render("namespace=team", "rbac.aggregate=false")
    assert not of_kind(items, "ClusterRole")
    assert not of_kind(items, "ClusterRoleBinding")
    for kind in ("Role", "RoleBinding"):
        where = {item["metadata"]["name"]: item["metadata"]["namespace"] for item in items if item["kind"] == kind}
        own = {where.pop(f"mini-infer-operator-{name}") for name in ("lease", "peer-root")}  # where it runs
        assert set(where.values()) == {"team"}
        assert own == {"here"}
    arguments = {
        name: item["spec"]["template"]["spec"]["containers"][0]["args"]
        for name, item in of_kind(items, "Deployment").items()
    }
    assert "--namespaces=team" in arguments["mini-infer-operator"]
    assert "--namespace=team" in arguments["mini-infer-gateway"]


@needs_helm
def test_pods_run_as_non_root_with_a_read_only_root() -> None:
    deployments = of_kind(render(), "Deployment")
    assert set(deployments) == {"mini-infer-gateway", "mini-infer-operator"}
    for deployment in deployments.values():
        pod = deployment["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        (container,) = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"startupProbe", "readinessProbe", "livenessProbe", "resources"} <= set(container)


@needs_helm
@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("gateway.replica=3", "replica"),
        ("gateway.replicas=-1", "replicas"),
        ("gateway.service.type=Ingress", "type"),
        ("gateway.service.nodePort=70000", "nodePort"),
        ("engine.image.pullPolicy=Sometimes", "pullPolicy"),
        ("operator.replicas=0", "replicas"),
        ("namespace=Team A", "namespace"),
        ("operator.image.repository=", "repository"),
    ],
)
def test_a_chart_value_is_refused_by_name_when_it_is_invalid(setting: str, named: str) -> None:
    done = helm("template", "mini-infer", str(CHART), f"--set={setting}")
    assert done.returncode != 0
    assert named in done.stderr
