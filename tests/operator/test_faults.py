"""Broken watches, 410, 429, an API server that is away, restarted or slow: nothing is missed and nothing is doubled."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mini_infer_contract import metrics as names
from tests.support.control_plane import ControlPlane
from tests.support.faulty_api_server import FaultyApiServer
from tests.support.operator_process import Cluster, OperatorProcess, wait

pytestmark = [pytest.mark.cluster]
OUTAGE_S = 5.0


@pytest.fixture(scope="module")
def proxy(plane_with_pods: ControlPlane) -> Iterator[FaultyApiServer]:
    with FaultyApiServer(plane_with_pods.kubeconfig) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def running(
    plane_with_pods: ControlPlane, proxy: FaultyApiServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("operator")
    with OperatorProcess(plane_with_pods, folder, server=proxy.url) as operator:
        yield Cluster(plane_with_pods, operator.url)


@pytest.fixture
def cluster(running: Cluster) -> Iterator[Cluster]:
    yield running
    running.clear()


def is_ready(cluster: Cluster, name: str, engines: int) -> bool:
    status = cluster.status(name)
    return cluster.ready(name).get("status") == "True" and status.get("readyReplicas") == engines


def begin(cluster: Cluster) -> None:
    for name in ("still", "kept", "gone"):
        cluster.apply(name, unified={"replicas": 1})
    wait(lambda: all(is_ready(cluster, name, 1) for name in ("still", "kept", "gone")))


def uids_of(children: list[dict[str, Any]]) -> dict[str, str]:
    return {f"{c['kind']} {c['metadata']['name']}": c["metadata"]["uid"] for c in children}


def change(cluster: Cluster) -> dict[str, str]:
    """One service goes, one comes, one is edited, and one's Deployment is deleted. Returns what must stay."""
    uids = uids_of(cluster.children("kept"))
    (deployment,) = cluster.children("still", "deployments")
    assert cluster.plane.kubectl("delete", "infsvc", "gone").returncode == 0
    cluster.plane.kubectl("delete", "deployment", deployment["metadata"]["name"])
    cluster.apply("kept", unified={"replicas": 2})
    cluster.apply("born", unified={"replicas": 1})
    return uids | {"deleted": deployment["metadata"]["uid"]}


def is_as_it_should_be(cluster: Cluster, uids: dict[str, str]) -> bool:
    """Nothing is missed: all are ready and no ghost is known. Nothing is doubled: what was not touched is the same.

    A service whose Deployment is gone may still be reported as ready: one kind's watch is back before another's.
    """
    if not (is_ready(cluster, "still", 1) and is_ready(cluster, "kept", 2) and is_ready(cluster, "born", 1)):
        return False
    kinds = Counter(["ControllerRevision", "Deployment", "PodDisruptionBudget", "Service", "Service"])
    children = {name: cluster.children(name) for name in ("still", "kept", "born")}
    counts = [Counter(child["kind"] for child in found) for found in children.values()]
    assert all(count <= kinds for count in counts), children
    assert uids_of(children["kept"]) | {"deleted": uids["deleted"]} == uids
    assert uids["deleted"] not in uids_of(children["still"]).values()
    if any(count != kinds for count in counts):
        return False
    known = cluster.samples()[names.OPERATOR_SERVICES]
    return known == len(cluster.get("infsvc")) and not cluster.children("gone")


def cut(proxy: FaultyApiServer) -> None:
    proxy.end_watches()


def away(proxy: FaultyApiServer) -> None:
    proxy.is_away = True
    proxy.end_watches()


def busy(proxy: FaultyApiServer) -> None:
    proxy.is_busy = True
    proxy.end_watches()


def blind(proxy: FaultyApiServer) -> None:
    proxy.is_blind = True


def nothing(proxy: FaultyApiServer) -> None:
    pass


def expired(proxy: FaultyApiServer) -> None:
    proxy.end_watches(410)


def broken(proxy: FaultyApiServer) -> None:
    """As etcd's errors come: kopf ends on them, and is started anew."""
    proxy.end_watches(500)


Fault = Callable[[FaultyApiServer], None]


@pytest.mark.parametrize(
    ("before", "after"),
    [(cut, cut), (away, nothing), (busy, nothing), (blind, expired), (blind, broken)],
    ids=["watches are cut", "API server is away", "429 with Retry-After", "410 Gone", "ERROR 500"],
)
def test_no_change_is_missed_or_doubled_when(
    cluster: Cluster, proxy: FaultyApiServer, before: Fault, after: Fault
) -> None:
    begin(cluster)
    before(proxy)
    begun = time.monotonic()
    try:
        uids = change(cluster)
        while proxy.is_away or proxy.is_busy:
            time.sleep(0.1)
            proxy.is_away = proxy.is_away and time.monotonic() - begun < OUTAGE_S
            proxy.is_busy = proxy.is_busy and time.monotonic() - begun < OUTAGE_S
    finally:
        proxy.is_away = proxy.is_busy = proxy.is_blind = False
    after(proxy)
    wait(lambda: is_as_it_should_be(cluster, uids))


def test_nothing_is_missed_or_doubled_when_the_api_server_is_500_ms_away(
    cluster: Cluster, proxy: FaultyApiServer
) -> None:
    proxy.delay_s = 0.5
    try:
        begin(cluster)
        uids = change(cluster)
        wait(lambda: is_as_it_should_be(cluster, uids), limit_s=90)
    finally:
        proxy.delay_s = 0.0


def test_nothing_is_missed_or_doubled_when_the_api_server_is_restarted(cluster: Cluster) -> None:
    begin(cluster)
    cluster.plane.restart_api_server()
    uids = change(cluster)
    wait(lambda: is_as_it_should_be(cluster, uids), limit_s=90)
