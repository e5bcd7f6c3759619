"""The chart's release in a cluster, with the images that are built here; knows nothing of what is served."""

import time
from pathlib import Path

import pytest

from mini_infer_operator.resource import GROUP, PLURAL, SCALER_PLURAL
from tests.e2e.cluster import Cluster, wait_until
from tests.e2e.commands import ROOT, log_line
from tests.e2e.images import TAG, repository
from tests.support.leader_worker_sets import CRD as LEADER_WORKER_SETS

RELEASE = "mini-infer"
SYSTEM = "mini-infer-e2e-system"
"""The release's namespace."""
SERVICE_KINDS = (
    "deployments,replicasets,pods,services,endpointslices,controllerrevisions,poddisruptionbudgets,networkpolicies"
)
RELEASE_KINDS = (
    f"{SERVICE_KINDS},serviceaccounts,roles,rolebindings,clusterroles,clusterrolebindings,secrets,configmaps"
)
CRDS = (f"{PLURAL}.{GROUP}", f"{SCALER_PLURAL}.{GROUP}")
MAX_LOCAL_PREFILL_TOKENS = 16
"""A prompt this long goes to a prefill engine where a service has some: those of the tests are short."""


class Release:
    """Installed once for all tests that need one, since that and its end take longer than most of what they look at."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.begun_s = 0.0
        """When `helm install` began."""
        self._installed = False

    def install(self, chart: Path = ROOT / "charts/mini-infer", tag: str = TAG, **values: str) -> None:
        """Nothing where it is there; a cluster that has a release of somebody else's fails the test. `values` are by
        their dotted names.
        """
        if self._installed:
            return
        if self.cluster.get("crd", "--field-selector", f"metadata.name={CRDS[0]}"):
            pytest.fail(f"this cluster has {CRDS[0]} already: the test would remove it, with everything made of it")
        self._installed = True
        # Before the operator starts, which else would look for this kind again within a minute only.
        self.cluster.kubectl("apply", "--server-side", "-f", str(LEADER_WORKER_SETS))
        self.begun_s = time.monotonic()
        threshold = {"gateway.options.maxLocalPrefillTokens": str(MAX_LOCAL_PREFILL_TOKENS)}
        flags = release_flags(tag, **threshold, **values)
        self.cluster.helm("install", RELEASE, str(chart), "-n", SYSTEM, "--create-namespace", *flags)
        log_line(f"helm install took {time.monotonic() - self.begun_s:.0f} s")

    def wait(self) -> None:
        """Until gateway and operator are what was asked for last."""
        for part in ("gateway", "operator"):
            deployment = f"deployment/{RELEASE}-{part}"
            self.cluster.kubectl("rollout", "status", deployment, "-n", SYSTEM, "--timeout=200s")

    def uninstall(self) -> None:
        """Nothing where it is not there."""
        if not self._installed:
            return
        self._installed = False
        if RELEASE in self.cluster.helm("list", "--short", "-n", SYSTEM).split():
            self.cluster.helm("uninstall", RELEASE, "-n", SYSTEM)
        self.cluster.kubectl("delete", "crd", *CRDS, "--ignore-not-found")
        self.cluster.kubectl("delete", "-f", str(LEADER_WORKER_SETS), "--ignore-not-found", "--timeout=60s")

    def clear(self) -> None:
        """Uninstall, and remove its namespace, which is gone some time later."""
        self.uninstall()
        self.cluster.kubectl("delete", "namespace", SYSTEM, "--ignore-not-found", "--wait=false")


def release_flags(tag: str, **more: str) -> list[str]:
    """Values of the release for images of this tag, which the cluster has already."""
    settings = {"gateway.service.type": "NodePort", "networkPolicy.enabled": "true"}
    for part, target in (("gateway", "gateway"), ("operator", "operator"), ("engine", "engine-cpu")):
        settings |= {
            f"{part}.image.repository": repository(target),
            f"{part}.image.tag": tag,
            f"{part}.image.pullPolicy": "Never",
        }
    return [f"--set={name}={value}" for name, value in {**settings, **more}.items()]


def nothing_left(cluster: Cluster, kinds: str, selector: str, *where: str) -> None:
    """Wait until no object of these kinds has these labels; fails with those that stay. `where`: -A or -n NAME."""

    def is_deleted() -> bool:
        left.clear()
        left.extend(f"{item['kind']} {item['metadata']['name']}" for item in cluster.get(kinds, *where, "-l", selector))
        return not left

    left: list[str] = []
    try:
        wait_until(f"{selector} to be gone", is_deleted, timeout_s=180)
    except TimeoutError:
        pytest.fail(f"left behind: {', '.join(left)}")
