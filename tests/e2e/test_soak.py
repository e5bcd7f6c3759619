"""Each step of a long day once, under load: no request fails where an engine lives (soak.py has more, for longer)."""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, NodeCluster
from tests.e2e.commands import log_line
from tests.e2e.images import NAMES, build_image
from tests.e2e.load import CONNECTIONS, OpenLoad, Result
from tests.e2e.release import RELEASE, SYSTEM, Release
from tests.e2e.soak import NAME, Service, run_steps


def started(release: Release, namespace: str, start_s: float) -> Service:
    """The service, ready, as is the platform."""
    service = Service(release.cluster, SYSTEM, namespace, start_s)
    service.apply()
    service.ready(240)
    release.wait()
    return service


def under_load(cluster: Cluster, steps: Sequence[Callable[[], None]], duration_s: float, rate: float) -> Result:
    """Go through the steps; returns what the load saw."""
    with cluster.reach(SYSTEM, f"{RELEASE}-gateway") as url, OpenLoad(url, NAME, rate) as load:
        time.sleep(3)
        run_steps(steps, time.monotonic() + duration_s, lambda: load.result.failures.total())
    log_line(load.result.line())
    return load.result


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_request_fails_in_a_soak(cluster: Cluster, release: Release, namespace: str) -> None:
    seen = under_load(cluster, started(release, namespace, start_s=1).steps(), duration_s=0, rate=10)
    assert seen.done > 300
    assert dict(seen.failures) == {}


def in_a_cluster_of_its_own(duration_s: float, start_s: float, rate: float) -> int:
    """The long form; the exit code."""
    node = os.environ["E2E_NODE"]
    with tempfile.TemporaryDirectory(prefix="mini-infer-soak-") as folder:
        cluster = NodeCluster(node, Path(folder) / "node")
        try:
            for target in NAMES:
                cluster.load(build_image(target, Path(folder)))
            release = Release(cluster)
            release.install()
            service = started(release, "default", start_s)
            seen = under_load(cluster, service.long_steps(), duration_s, rate)
            lossy = under_load(cluster, [service.lose_a_gateway], 0, rate)
        except Exception:
            cluster.explain(SYSTEM, "default")
            raise
        finally:
            cluster.down()
    # Requests of a gateway that is killed break, as do those that are sent on a connection to it; none is refused.
    refused = [failure for failure in lossy.failures if failure[:3].isdigit()]
    return 1 if seen.failures or refused or lossy.failures.total() > CONNECTIONS else 0
