"""What a cluster loses on a bad day besides engines: the operator that works, and programs of the node itself."""

import time
from collections.abc import Callable

from tests.e2e.cluster import NodeCluster, wait_until
from tests.e2e.soak import Service

LEASE_NAMESPACE, LEASE = "kube-system", "mini-infer-operator"


class Losses:
    """Steps as those of `Service`, on a cluster whose node is ours; the release has two operators."""

    def __init__(self, cluster: NodeCluster, service: Service, system: str) -> None:
        self._cluster, self._service, self._system = cluster, service, system

    def lose_the_leader(self) -> None:
        """The operator that holds the Lease, in the middle of an edit; the other one goes on."""
        holder = self._holder()
        self._service.begin_edit()
        pod = next(name for name in self._operators() if name in holder)
        self._cluster.kubectl("delete", "pod", pod, "-n", self._system, "--grace-period=0", "--force")
        wait_until("another leader", lambda: self._holder() not in ("", holder), 60)
        self._service.ready()

    def restart_the_kubelet(self) -> None:
        """Killed while an engine is to be started."""
        self._service.begin_edit()
        self._cluster.restart("kubelet")
        self._service.ready()

    def restart_the_container_runtime(self) -> None:
        """Killed as well; containers go on."""
        self._service.begin_edit()
        self._cluster.restart("containerd")
        self._service.ready()

    def restart_the_api_server(self) -> None:
        """Killed with an edit under way: gateways keep their engines, operators go on when it is back."""
        self._service.begin_edit()
        self._cluster.restart("kube-apiserver")
        self._answers()
        self._service.ready()

    def restart_the_controllers(self) -> None:
        """Programs that work on Deployments, and the scheduler."""
        self._service.begin_edit()
        self._cluster.restart("kube-controller-manager")
        self._cluster.restart("kube-scheduler")
        self._service.ready()

    def lose_an_engine_without_the_api_server(self) -> None:
        """An engine's processes are killed while nobody can be told: gateways find out by themselves."""
        (pod, *_) = self._service.staying()
        (container,) = pod["status"]["containerStatuses"]
        self._cluster.restart("kube-apiserver")
        self._cluster.kill_container(container["containerID"])
        self._answers()
        time.sleep(2)
        self._service.ready()

    def steps(self) -> list[Callable[[], None]]:
        """Returns all of them, in order."""
        return [
            self.lose_the_leader,
            self.restart_the_kubelet,
            self.restart_the_container_runtime,
            self.restart_the_api_server,
            self.restart_the_controllers,
            self.lose_an_engine_without_the_api_server,
        ]

    def _operators(self) -> list[str]:
        selector = "app.kubernetes.io/component=operator"
        return [pod["metadata"]["name"] for pod in self._cluster.get("pods", "-n", self._system, "-l", selector)]

    def _holder(self) -> str:
        (lease,) = self._cluster.get("lease", LEASE, "-n", LEASE_NAMESPACE)
        return str(lease["spec"].get("holderIdentity") or "")

    def _answers(self) -> None:
        def answers() -> bool:
            try:
                return bool(self._cluster.get("nodes"))
            except RuntimeError:
                return False

        wait_until("the API server", answers, 60)
