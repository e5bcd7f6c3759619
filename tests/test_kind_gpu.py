"""scripts/kind_gpu.sh with stand-ins for docker, kind and kubectl: what it checks, renders, and runs in which order."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.kubernetes_schemas import VERSIONS, faults

ROOT = Path(__file__).parents[1]
PROGRAM = str(ROOT / "scripts/kind_gpu.sh")
RECORDER = """#!/bin/sh
printf '%s\n' "$(basename "$0") $*" >>"$CALLS"
case "$(basename "$0") $*" in
  "docker info"*) echo "${RUNTIME:-nvidia}" ;;
  "docker inspect"*Pid*) echo 4711 ;;
  "docker inspect"*) echo 172.18.0.2 ;;
  "docker run"*) exit "${NO_GPU:-0}" ;;
  "kind create"*) cat >"$CALLS.config" ;;
  "kind get"*) echo "server: https://mini-infer-gpu-control-plane:6443" ;;
  nsenter*) exit 0 ;;
esac
"""


class Machine:
    """A machine with these programs on its PATH, and what was called."""

    def __init__(self, folder: Path, *programs: str) -> None:
        self.folder, self._calls = folder, folder / "calls"
        (folder / "bin").mkdir()
        for name in programs:
            (folder / "bin" / name).write_text(RECORDER)
            (folder / "bin" / name).chmod(0o755)

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        path = {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "CALLS": str(self._calls), **environment}
        return subprocess.run(
            [PROGRAM, *arguments], capture_output=True, text=True, env=os.environ | path, check=False, timeout=60
        )

    @property
    def calls(self) -> list[str]:
        return self._calls.read_text().splitlines() if self._calls.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path, "docker", "kind", "kubectl", "nsenter", "sudo")


def test_the_node_has_all_gpus_and_the_folder_of_the_test(tmp_path: Path, machine: Machine) -> None:
    done = machine.run("config", "/scratch/x")
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load(done.stdout)
    assert (config["kind"], config["apiVersion"], config["name"]) == (
        "Cluster",
        "kind.x-k8s.io/v1alpha4",
        "mini-infer-gpu",
    )
    (node,) = config["nodes"]
    assert node["role"] == "control-plane"
    mounts = {mount["containerPath"]: mount["hostPath"] for mount in node["extraMounts"]}
    assert mounts == {"/var/run/nvidia-container-devices/all": "/dev/null", "/scratch/x": "/scratch/x"}
    assert machine.calls == []


def test_a_cluster_is_made_checked_and_given_the_device_plugin(tmp_path: Path, machine: Machine) -> None:
    done = machine.run("up", str(tmp_path / "node"), "--gpus", "real", NAME="mini-infer-gpu")
    assert done.returncode == 0, done.stderr
    verbs = [" ".join(call.split()[:2]) for call in machine.calls if call.startswith(("docker", "kind", "kubectl"))]
    order = ["docker info", "docker run", "kind create", "kind get", "docker exec"]
    assert [verb for verb in verbs if not verb.startswith("kubectl")] == order
    assert "nvidia-ctk runtime configure --runtime=containerd --set-as-default" in "\n".join(machine.calls)
    assert (tmp_path / "node/kubeconfig").read_text() == "server: https://127.0.0.1:6443\n"
    config = yaml.safe_load((tmp_path / "calls.config").read_text())
    assert config["nodes"][0]["extraMounts"][-1]["hostPath"] == str(tmp_path), "engines mount folders beside DIR"
    assert any("apply --server-side -f" in call and "device_plugin.yaml" in call for call in machine.calls)


def test_the_protocol_of_e2e_node_reaches_docker_and_kind(machine: Machine) -> None:
    assert machine.run("load", "DIR", "image.tar").returncode == 0
    assert machine.run("address").stdout == "172.18.0.2\n"
    assert machine.run("exec", "DIR", "env", "A=b", "python").returncode == 0
    assert machine.run("down", "DIR").returncode == 0
    joined = "\n".join(machine.calls)
    assert "kind load image-archive image.tar --name mini-infer-gpu" in joined
    assert "nsenter --target 4711 --net env A=b python" in joined
    assert machine.calls[-1] == "kind delete cluster --name mini-infer-gpu"


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (("up", "DIR"), {"RUNTIME": "runc"}, "nvidia-ctk runtime configure --runtime=docker --set-as-default"),
        (("up", "DIR"), {"NO_GPU": "1"}, "accept-nvidia-visible-devices-as-volume-mounts=true"),
        (("up", "DIR", "--gpus", "2"), {}, "write --gpus real"),
        (("up",), {}, "usage:"),
        (("start", "DIR"), {}, "there is no command start"),
    ],
)
def test_the_remedy_is_named_when_a_cluster_cannot_be_made(
    machine: Machine, arguments: tuple[str, ...], environment: dict[str, str], message: str
) -> None:
    done = machine.run(*arguments, **environment)
    assert done.returncode == 1
    assert message in done.stderr
    assert not any(call.startswith("kind create") for call in machine.calls)


def test_every_version_knows_the_fields_of_the_device_plugins_objects() -> None:
    (daemon_set,) = yaml.safe_load_all((ROOT / "scripts/kind_gpu_device_plugin.yaml").read_text())
    template = {"apiVersion": "v1", "kind": "Pod", **daemon_set["spec"]["template"]}
    assert [line for version in VERSIONS for line in faults(template, version)] == []
