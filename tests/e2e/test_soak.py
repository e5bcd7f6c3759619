"""Each step of a long day once, under load: no request fails where an engine lives (soak.py runs them for longer)."""

import os
import tempfile
import time
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, NodeCluster
from tests.e2e.commands import say
from tests.e2e.images import NAMES, build_image
from tests.e2e.load import OpenLoad
from tests.e2e.soak import NAME, Service, run_steps
from tests.e2e.test_platform import RELEASE, SYSTEM, USER, install, namespaces  # noqa: F401 - a fixture


def under_load(cluster: Cluster, duration_s: float, start_s: float, rate: float) -> OpenLoad:
    """Install, start the service, and go through the steps; returns what the load saw."""
    install(cluster)
    service = Service(cluster, SYSTEM, USER, start_s)
    service.apply()
    service.ready(240)
    cluster.kubectl("rollout", "status", f"deployment/{RELEASE}-gateway", "-n", SYSTEM, "--timeout=100s")
    with cluster.reach(SYSTEM, f"{RELEASE}-gateway") as url, OpenLoad(url, NAME, rate) as load:
        time.sleep(3)
        run_steps(service, time.monotonic() + duration_s, lambda: load.result.failures.total())
    say(load.result.line())
    return load


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("namespaces")
def test_nothing_is_lost(cluster: Cluster) -> None:
    load = under_load(cluster, duration_s=0, start_s=2, rate=10)
    assert load.result.done > 300
    assert dict(load.result.failures) == {}


def in_a_cluster_of_its_own(duration_s: float, start_s: float, rate: float) -> int:
    """The long form; the exit code."""
    node = os.environ["E2E_NODE"]
    with tempfile.TemporaryDirectory(prefix="mini-infer-soak-") as folder:
        cluster = NodeCluster(node, Path(folder) / "node")
        try:
            for target in NAMES:
                cluster.load(build_image(target, Path(folder)))
            for namespace in (SYSTEM, USER):
                cluster.kubectl("create", "namespace", namespace)
            load = under_load(cluster, duration_s, start_s, rate)
        except Exception:
            cluster.explain(SYSTEM, USER)
            raise
        finally:
            cluster.down()
    return 1 if load.result.failures else 0
