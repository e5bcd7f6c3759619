"""Everything that happens to a service in a long day, one after the other, under load.

    E2E_NODE=... E2E_BUILD=... python -m tests.e2e.soak --minutes 15 --start-seconds 60

makes a cluster with our images and runs the steps until the time is over, then kills a gateway, which is the one step
that may cost requests: those that it has. It ends with 1 if any other request failed. `test_soak.py` runs the short
steps once.
"""

import argparse
import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import yaml

from mini_infer_operator.resource import LABEL_DRAINING
from tests.e2e.cluster import Cluster, NodeCluster, wait_until
from tests.e2e.commands import log_line
from tests.e2e.images import TAG, repository

NAME = "soak"
PAUSE_S = 0.5
"""Between steps. Load goes on through all of them, so what a step breaks later is counted with the next one."""

STALL_S = 25.0
"""Without an answer: an engine that hangs is silent for a minute before it is ended."""
SEEN_S = 10.0
"""Until a kubelet that ends a container has said so."""
HANG_LIMIT_S = 150.0
"""That minute, the grace period, and the new start."""


def engine_image() -> str:
    """As the cluster has it."""
    return f"{repository('engine-cpu')}:{TAG}"


class Service:
    """A dry-run service whose engines take `start_s` to start, as those with large weights do."""

    def __init__(self, cluster: Cluster, system: str, namespace: str, start_s: float) -> None:
        self.cluster = cluster
        self._system = system
        self._namespace = namespace
        self._start_s = start_s
        self._spec: dict[str, Any] = {
            "model": {"uri": "demo", "name": NAME},
            "rollout": {"minReadySeconds": min(3, round(start_s))},
            "unified": {
                "replicas": 2,
                "engine": {"maxNumSeqs": 16, "extraArgs": ["--dry-run"]},
                "template": {"spec": {"initContainers": [self._slow_start()]}},
            },
        }

    def _slow_start(self) -> dict[str, Any]:
        """What loads no weights takes its time before the engine begins."""
        wait = f"import time; time.sleep({self._start_s})"
        return {"name": "weights", "image": engine_image(), "command": ["python", "-c", wait]}

    def apply(self, **unified: Any) -> None:
        """Edit the role; `image` is the service's."""
        image = unified.pop("image", None)
        self._spec = {**self._spec, "unified": {**self._spec["unified"], **unified}}
        spec = {**self._spec, **({"image": image} if image else {})}
        manifest = {
            "apiVersion": "serving.mini-infer.io/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": NAME, "namespace": self._namespace},
            "spec": spec,
        }
        self.cluster.apply(yaml.safe_dump(manifest))

    def ready(self, limit_s: float = 0.0) -> None:
        """Wait until everything that is asked for runs, and nothing else."""

        def is_settled() -> bool:
            (found,) = self.cluster.read("InferenceService", self._namespace, NAME)
            status = found.get("status", {})
            conditions = {c["type"]: c["status"] for c in status.get("conditions", ())}
            current = status.get("observedGeneration") == found["metadata"]["generation"]
            desired = self._spec["unified"]["replicas"]
            if not (current and conditions.get("Ready") == "True" and status["replicas"] == desired):
                return False
            pods = [pod for pod in self.pods() if "deletionTimestamp" not in pod["metadata"]]
            return len(pods) == desired and all(is_ready(pod) for pod in pods)  # the status may lag behind a loss

        wait_until(f"{NAME} ready", is_settled, limit_s or 120 + 6 * self._start_s)

    def pods(self) -> list[dict[str, Any]]:
        """Engines, the oldest first."""
        found = self.cluster.read("Pod", self._namespace, labels=f"serving.mini-infer.io/service={NAME}")
        return sorted(found, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))

    def staying(self) -> list[dict[str, Any]]:
        """Engines that are not on their way out, the oldest first."""
        return [pod for pod in self.pods() if not is_leaving(pod)]

    def _containers(self) -> dict[str, str]:
        """Returns the container of each engine that stays, by pod: another one after a restart."""
        return {pod["metadata"]["name"]: pod["status"]["containerStatuses"][0]["containerID"] for pod in self.staying()}

    def begin_edit(self) -> None:
        """A new revision is to take the place of the old one."""
        self.apply(engine={**self._spec["unified"]["engine"], "maxNumSeqs": 8 + int(time.time()) % 200})

    def edit(self) -> None:
        """It has taken its place."""
        self.begin_edit()
        self.ready()

    def bad_edit_and_back(self) -> None:
        """An image that cannot be had, of which the kubelet tells after ten seconds, and the old one again."""
        self.apply(image="localhost/no-such-image:0")
        wait_until("an engine that cannot start", lambda: any(map(_lacks_its_image, self.pods())), 60)
        self.apply()
        self.ready()

    def scale(self) -> None:
        """One, three, one, and two again."""
        for replicas in (1, 3, 1, 2):
            self.apply(replicas=replicas)
            self.ready()

    def make_again(self) -> None:
        """Deleted from around its engines, which answer until it is made again and adopts them."""
        pods = self.pods()
        before, staying = _uids(pods), _uids(pod for pod in pods if not is_leaving(pod))
        self.cluster.kubectl("delete", "infsvc", NAME, "-n", self._namespace, "--cascade=orphan")
        time.sleep(3)
        self.apply()
        self.ready()
        assert staying <= _uids(self.pods()) <= before  # one that was scaled down may be on its way out

    def evict(self) -> None:
        """What `kubectl drain` does to one engine; a second one must wait."""
        first, second = (pod["metadata"]["name"] for pod in self.pods()[:2])
        self.cluster.evict(first, self._namespace)
        with contextlib.suppress(TimeoutError):  # refused, unless the first one's successor is ready already
            self.cluster.evict(second, self._namespace, timeout_s=0)
        time.sleep(2)
        self.ready()

    def lose_an_engine(self) -> None:
        """Gone without a word."""
        # Of the one before an edit there may still be a pod, which goes by itself.
        name = self.staying()[0]["metadata"]["name"]
        self.cluster.kubectl("delete", "pod", name, "-n", self._namespace, "--grace-period=0", "--force")
        time.sleep(2)
        self.ready()

    def drain_the_node(self) -> None:
        """`kubectl drain` of a cluster's only node: one engine goes, the other stays as its successor finds no node."""
        (node,) = (found["metadata"]["name"] for found in self.cluster.get("nodes"))
        selector = f"--pod-selector=serving.mini-infer.io/service={NAME}"
        try:
            with contextlib.suppress(RuntimeError):  # it gives up: the disruption budget holds the last engine
                self.cluster.kubectl("drain", node, selector, "--delete-emptydir-data", "--timeout=30s")
        finally:
            self.cluster.kubectl("uncordon", node)
        self.ready()

    def stall_the_engines(self) -> None:
        """All of them stop for as long as a starved node may leave them without time: they go on, none is ended."""
        assert isinstance(self.cluster, NodeCluster), "only who has the node can stop the first process of a container"
        before = self._containers()
        for container in before.values():
            self.cluster.stop_container(container)
        time.sleep(STALL_S)
        for container in before.values():
            self.cluster.continue_container(container)
        time.sleep(SEEN_S)
        assert self._containers() == before
        self.ready()

    def hang_an_engine(self) -> None:
        """All of its processes are stopped: it takes connections, and nothing comes back until its probe ends it."""
        assert isinstance(self.cluster, NodeCluster), "only who has the node can stop the first process of a container"
        pod = self.staying()[0]
        (container,) = pod["status"]["containerStatuses"]
        self.cluster.stop_container(container["containerID"])

        def restarted() -> bool:
            (found,) = self.cluster.get("pod", pod["metadata"]["name"], "-n", self._namespace)
            (now,) = found["status"]["containerStatuses"]
            return bool(now["restartCount"] > container["restartCount"])

        wait_until("the engine that hangs to be started anew", restarted, HANG_LIMIT_S)
        self.ready()

    def lose_the_operator(self) -> None:
        """In the middle of an edit."""
        self.begin_edit()
        selector = "app.kubernetes.io/component=operator"
        flags = ("-n", self._system, "-l", selector, "--grace-period=0", "--force")
        self.cluster.kubectl("delete", "pod", *flags)
        self.ready()

    def roll_the_gateway(self) -> None:
        """As an upgrade of the chart does."""
        self._roll("gateway")

    def roll_the_operator(self) -> None:
        """As well."""
        self._roll("operator")

    def lose_a_gateway(self) -> None:
        """Killed, with the requests that it has."""
        selector = "app.kubernetes.io/component=gateway"
        pod = self.cluster.get("pods", "-n", self._system, "-l", selector)[0]["metadata"]["name"]
        self.cluster.kubectl("delete", "pod", pod, "-n", self._system, "--grace-period=0", "--force")
        self._rolled("gateway")

    def steps(self) -> list[Callable[[], None]]:
        """What loses nothing, in order."""
        return [
            self.edit,
            self.bad_edit_and_back,
            self.scale,
            self.make_again,
            self.evict,
            self.lose_an_engine,
            self.lose_the_operator,
            self.roll_the_gateway,
        ]

    def long_steps(self) -> list[Callable[[], None]]:
        """As well, with those that take a while or a node of our own."""
        return [
            *self.steps(),
            self.drain_the_node,
            self.hang_an_engine,
            self.stall_the_engines,
            self.roll_the_operator,
        ]

    def _roll(self, part: str) -> None:
        self.cluster.kubectl("rollout", "restart", f"deployment/mini-infer-{part}", "-n", self._system)
        self._rolled(part)

    def _rolled(self, part: str) -> None:
        deployment = f"deployment/mini-infer-{part}"
        self.cluster.kubectl("rollout", "status", deployment, "-n", self._system, "--timeout=200s")


def _uids(pods: Iterable[dict[str, Any]]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods}


def is_leaving(pod: dict[str, Any]) -> bool:
    metadata = pod["metadata"]
    return "deletionTimestamp" in metadata or LABEL_DRAINING in metadata.get("labels", {})


def _lacks_its_image(pod: dict[str, Any]) -> bool:
    statuses = pod["status"].get("initContainerStatuses", []) + pod["status"].get("containerStatuses", [])
    return any("Image" in status["state"].get("waiting", {}).get("reason", "") for status in statuses)


def is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod["status"].get("conditions", ())
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def run_steps(steps: Sequence[Callable[[], None]], until_s: float, failed: Callable[[], int]) -> None:
    """Every step once, and again while there is time."""
    for number in itertools.count():
        if number >= len(steps) and time.monotonic() >= until_s:
            return
        begun_s, step = time.monotonic(), steps[number % len(steps)]
        step()
        time.sleep(PAUSE_S)
        log_line(f"{step.__name__}: {time.monotonic() - begun_s:.0f} s, {failed()} requests failed so far")


def main() -> int:
    """The long form."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--start-seconds", type=float, default=60.0, help="how long an engine takes to start")
    parser.add_argument("--rate", type=float, default=15.0, help="requests a second")
    options = parser.parse_args()
    from tests.e2e import test_soak

    return test_soak.in_a_cluster_of_its_own(options.minutes * 60, options.start_seconds, options.rate)


if __name__ == "__main__":
    sys.exit(main())
