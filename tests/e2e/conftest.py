"""A cluster with our images in it and the release, made once; a namespace for each test."""

import itertools
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, NodeCluster
from tests.e2e.commands import log_line
from tests.e2e.images import NAMES, build_image
from tests.e2e.release import CRDS, SYSTEM, Release


def pytest_sessionstart() -> None:
    """Ends with SIGTERM as with Ctrl-C: a cluster of our own is taken down."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    node, kubeconfig = os.environ.get("E2E_NODE"), os.environ.get("KUBECONFIG")
    if not node and not kubeconfig:
        pytest.skip("no cluster: set KUBECONFIG (kind, minikube), or E2E_NODE to a program that makes one")
    print()
    # Images pass through here, a gigabyte in all; the node's state lies beside them.
    with tempfile.TemporaryDirectory(prefix="mini-infer-e2e-") as folder, ThreadPoolExecutor(1) as builder:
        builds = {target: builder.submit(build_image, target, Path(folder)) for target in NAMES}
        found = None
        try:
            found = NodeCluster(node, Path(folder) / "node") if node else Cluster(kubeconfig or "")
            log_line("the cluster answers")
            for target, build in builds.items():
                archive = build.result()
                started = time.monotonic()
                found.load(archive)
                archive.unlink()
                log_line(f"loaded {target} in {time.monotonic() - started:.0f} s")
            yield found
        finally:
            builder.shutdown(cancel_futures=True)
            if isinstance(found, NodeCluster):
                found.down()
                log_line("the cluster is gone")


@pytest.fixture(scope="session")
def _release(cluster: Cluster) -> Iterator[Release]:
    release = Release(cluster)
    try:
        yield release
    finally:
        release.clear()


@pytest.fixture
def release(_release: Release) -> Release:
    """The chart's, installed by the first test that asks for it."""
    _release.install()
    return _release


@pytest.fixture
def no_release(_release: Release) -> Release:
    """For a test that installs one itself; what others left is uninstalled."""
    _release.uninstall()
    return _release


_NUMBERS = itertools.count(1)


@pytest.fixture
def namespace(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """An empty one, of a name that no other test has; explains a failure and leaves nothing behind.

    Nobody waits until it is gone: when Kubernetes looks again at a namespace in which it found pods depends on their
    grace period, not on their end. With engines (300 s) it took 116 s, and they had ended after 12.
    """
    name = f"mini-infer-e2e-{next(_NUMBERS)}"
    failed_before = request.session.testsfailed
    cluster.kubectl("create", "namespace", name)
    try:
        yield name
    finally:
        if request.session.testsfailed > failed_before:
            cluster.explain(SYSTEM, name)
        if cluster.get("crd", "--field-selector", f"metadata.name={CRDS[0]}"):
            cluster.kubectl("delete", "infsvc", "--all", "-n", name)
        cluster.kubectl("delete", "pods", "--all", "-n", name, "--grace-period=0", "--force")
        cluster.kubectl("delete", "namespace", name, "--wait=false")
