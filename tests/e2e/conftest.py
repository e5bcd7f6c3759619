"""A cluster with our images in it, made once."""

import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, NodeCluster
from tests.e2e.commands import say
from tests.e2e.images import NAMES, build_image


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
            say("the cluster answers")
            for target, build in builds.items():
                archive = build.result()
                started = time.monotonic()
                found.load(archive)
                archive.unlink()
                say(f"loaded {target} in {time.monotonic() - started:.0f} s")
            yield found
        finally:
            builder.shutdown(cancel_futures=True)
            if isinstance(found, NodeCluster):
                found.down()
                say("the cluster is gone")
