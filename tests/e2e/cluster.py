"""The cluster that the test runs on: the one that E2E_NODE's program makes, else that of KUBECONFIG."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client, config

from mini_infer_operator.local.ports import free_ports
from mini_infer_operator.objects.kinds import path_of
from tests.e2e.commands import log_line, program, run
from tests.support.control_plane import SPARING


class Cluster:
    """kubectl and helm on one kubeconfig."""

    def __init__(self, kubeconfig: str) -> None:
        self.environment = {"KUBECONFIG": kubeconfig, **SPARING}
        self._kubectl = program("kubectl")

    def kubectl(self, *arguments: str) -> str:
        return run(self._kubectl, *arguments, env=self.environment)

    def helm(self, *arguments: str) -> str:
        return run(program("helm"), *arguments, env=self.environment)

    def apply(self, manifests: str) -> None:
        """Create or change what is written there, as YAML."""
        run(self._kubectl, "apply", "--server-side", "-f", "-", env=self.environment, stdin=manifests)

    def post(self, path: str, body: str) -> None:
        """Create a subresource, such as an Eviction."""
        run(self._kubectl, "create", "--raw", path, "-f", "-", env=self.environment, stdin=body)

    def evict(self, pod: str, namespace: str, timeout_s: float = 60) -> None:
        """As `kubectl drain` does: refused by a disruption budget, it is tried again, though after less than 5 s."""
        metadata = {"name": pod, "namespace": namespace}
        eviction = json.dumps({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata})

        def evicted() -> bool:
            try:
                self.post(f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction", eviction)
            except RuntimeError as error:
                if "TooManyRequests" not in str(error):
                    raise
                return False
            return True

        wait_until(f"{pod} evicted", evicted, timeout_s)

    def get(self, *arguments: str) -> list[dict[str, Any]]:
        found = json.loads(self.kubectl("get", *arguments, "-o", "json"))
        return found.get("items", [found])

    def read(self, kind: str, namespace: str, name: str | None = None, labels: str = "") -> list[dict[str, Any]]:
        """Returns objects as `get` does, without a process: tests poll twice a second, and kubectl takes an eighth of a
        second of processor time.
        """
        call = self._api.param_serialize(
            "GET",
            path_of(kind, namespace, name),
            query_params=[("labelSelector", labels)],
            header_params={"Accept": "application/json"},
            auth_settings=["BearerToken"],
        )
        answer = self._api.call_api(*call, _request_timeout=60)
        body = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{kind} {name or labels}: {answer.status} {body.decode()}")
        found = json.loads(body)
        return list(found.get("items", [found]))

    @cached_property
    def _api(self) -> client.ApiClient:
        return config.new_client_from_config(self.environment["KUBECONFIG"])

    def load(self, archive: Path) -> None:
        """Give the cluster's nodes an image."""
        context = self.kubectl("config", "current-context").strip()
        if context.startswith("kind-") and shutil.which("kind"):
            run("kind", "load", "image-archive", archive, "--name", context.removeprefix("kind-"))
        elif context == "minikube" and shutil.which("minikube"):
            run("minikube", "image", "load", str(archive))
        elif context in ("docker-desktop", "rancher-desktop", "orbstack"):
            pass  # docker's images are the cluster's
        else:
            raise RuntimeError(
                f"do not know how to load images into {context!r}: use kind or minikube, or name a program in E2E_NODE"
            )

    def make_claim(self, namespace: str, name: str) -> None:
        """Create a PersistentVolumeClaim, of which the cluster's default StorageClass makes a volume."""
        self.apply(yaml.safe_dump(_claim(namespace, name)))

    @contextlib.contextmanager
    def reach(self, namespace: str, service: str) -> Iterator[str]:
        """The base URL of a NodePort Service: through a node's address where that is reachable, else port-forward."""
        node_port = self.get("service", service, "-n", namespace)[0]["spec"]["ports"][0]["nodePort"]
        for address in self.get("nodes")[0]["status"]["addresses"]:
            with contextlib.suppress(OSError), socket.create_connection((address["address"], node_port), timeout=2):
                yield f"http://{address['address']}:{node_port}"
                return
        log_line("the node's address cannot be reached from here: port-forward")
        with self.forward(namespace, f"service/{service}", "http") as url:
            yield url

    @contextlib.contextmanager
    def forward(self, namespace: str, target: str, target_port: str) -> Iterator[str]:
        """The base URL of a port of a Service or pod, through `kubectl port-forward`."""
        (port,) = free_ports(1)
        command = [self._kubectl, "port-forward", "-n", namespace, target, f"{port}:{target_port}"]
        forward = subprocess.Popen(
            command, env={**os.environ, **self.environment}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            wait_until("port-forward", lambda: _accepts(port), timeout_s=20)
            yield f"http://127.0.0.1:{port}"
        finally:
            forward.terminate()
            forward.wait(10)

    def explain(self, *namespaces: str) -> None:
        """Print what someone would look at first when it failed."""
        for namespace in namespaces:
            self._show("get", "infsvc,deployments,services,pods", "-o", "wide", "-n", namespace)
            self._show("get", "infsvc", "-o", "yaml", "-n", namespace)
            self._show("describe", "pods", "-n", namespace)
            self._show("get", "events", "--sort-by=.lastTimestamp", "-n", namespace)
            with contextlib.suppress(RuntimeError):
                for pod in self.get("pods", "-n", namespace):
                    self._show("logs", "--tail=60", "-n", namespace, pod["metadata"]["name"])

    def _show(self, *arguments: str) -> None:
        print(f"--- kubectl {' '.join(arguments)}")
        with contextlib.suppress(RuntimeError):
            print(self.kubectl(*arguments))


class NodeCluster(Cluster):
    """A cluster of our own, made and removed by the program named in E2E_NODE."""

    def __init__(self, node: str, folder: Path, *options: str) -> None:
        """A node that does not come up is made once more: nothing of ours runs on it yet."""
        self._node, self._folder = node, folder
        try:
            run(node, "up", folder, *options)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            log_line(f"the node did not come up, and is made once more: {error}")
            with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
                self.down()
            run(node, "up", folder, *options)
        super().__init__(str(folder / "kubeconfig.host"))

    def load(self, archive: Path) -> None:
        run(self._node, "load", self._folder, archive)

    def tag(self, image: str, name: str) -> None:
        """Give an image that is loaded another name beside its own."""
        self._ctr("images", "tag", image, name)

    def stop_container(self, container_id: str) -> None:
        """SIGSTOP to all processes of a container, as the kubelet names it: `containerd://...`."""
        self._signal(container_id, "SIGSTOP")

    def continue_container(self, container_id: str) -> None:
        """SIGCONT to all processes of a container that was stopped."""
        self._signal(container_id, "SIGCONT")

    def kill_container(self, container_id: str) -> None:
        """SIGKILL to all processes of a container."""
        self._signal(container_id, "SIGKILL")

    def _signal(self, container_id: str, signal: str) -> None:
        container = container_id.removeprefix("containerd://")
        self._ctr("task", "kill", "--all", "--signal", signal, container)

    def _ctr(self, *arguments: str) -> None:
        ctr = (program("ctr"), "-a", "/run/containerd/containerd.sock", "-n", "k8s.io")
        run(self._node, "exec", self._folder, *ctr, *arguments)

    def make_claim(self, namespace: str, name: str) -> None:
        """Create a PersistentVolumeClaim on a folder of the node, which has no provisioner."""
        volume = {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"{namespace}-{name}"},
            "spec": {
                "capacity": {"storage": "1Gi"},
                "accessModes": ["ReadWriteMany"],
                "storageClassName": "",
                "hostPath": {"path": str(self.make_folder(f"{namespace}-{name}"))},
            },
        }
        claim = _claim(namespace, name)
        claim["spec"] |= {"storageClassName": "", "volumeName": f"{namespace}-{name}"}
        self.apply(yaml.safe_dump_all([volume, claim]))

    def make_folder(self, name: str) -> Path:
        """Make a folder of the node that belongs to the images' user, and return its path there."""
        path = self._folder / "volumes" / name
        run(self._node, "exec", self._folder, "sh", "-c", f"mkdir -p {path} && chown 65532:65532 {path}")
        return path

    def restart(self, name: str) -> None:
        """Kill a program of the node itself, such as `kubelet`, and start it again as it was."""
        run(self._node, "exec", self._folder, "bash", "-c", _RESTART, "restart", name, self._folder)

    def down(self) -> None:
        run(self._node, "down", self._folder)


_RESTART = """
set -eu
pid=$(pidof "$1")
mapfile -d '' -t command <"/proc/$pid/cmdline"
mapfile -d '' -t variables <"/proc/$pid/environ"
kill -9 "$pid"
sleep 1
setsid env -i "${variables[@]}" "${command[@]}" >>"$2/log/$1-again.log" 2>&1 </dev/null &
"""


def _claim(namespace: str, name: str) -> dict[str, Any]:
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


def wait_until(what: str, condition: Callable[[], Any], timeout_s: float, every_s: float = 0.5) -> Any:
    """Ask until the answer is true and return it; fails with `what` when time is up."""
    deadline = time.monotonic() + timeout_s
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_s:.0f} s")
        time.sleep(every_s)
    return answer


def _accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
