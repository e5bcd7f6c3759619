"""`helm upgrade` from an earlier version under load: CRDs, gateway, operator and engines change, and no request fails.

    E2E_PREVIOUS=REVISION make e2e PYTEST_ARGS='-k upgrade'

REVISION is what git calls the earlier version. While it runs, gateways and engines of both versions meet.
"""

import os
import time
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, wait_until
from tests.e2e.commands import ROOT, log_line, run
from tests.e2e.images import NAMES, TAG, build_image_of, repository
from tests.e2e.load import OpenLoad
from tests.e2e.release import RELEASE, SYSTEM, Release, release_flags
from tests.e2e.soak import NAME, Service, engine_image

PREVIOUS = os.environ.get("E2E_PREVIOUS", "")
BEFORE = "previous"
"""The tag of its images."""


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not PREVIOUS, reason="no version to upgrade from: E2E_PREVIOUS=REVISION names one")
def test_no_request_fails_when_everything_is_upgraded(
    cluster: Cluster, no_release: Release, namespace: str, tmp_path: Path
) -> None:
    previous = source_of(PREVIOUS, tmp_path)
    for target in NAMES:
        archive = build_image_of(previous, BEFORE, target, tmp_path)
        cluster.load(archive)
        archive.unlink()
    no_release.install(previous / "charts/mini-infer", BEFORE)
    service = Service(cluster, SYSTEM, namespace, start_s=2)
    service.apply()
    service.ready(240)
    no_release.wait()
    assert engine_images(service) == {f"{repository('engine-cpu')}:{BEFORE}"}
    with cluster.reach(SYSTEM, f"{RELEASE}-gateway") as url, OpenLoad(url, NAME, per_second=10) as load:
        time.sleep(5)
        upgrade(cluster)
        wait_until("engines of the new version", lambda: engine_images(service) == {engine_image()}, 240)
        service.ready()
        log_line(f"all engines are of the new version; {load.result.failures.total()} requests failed so far")
        service.edit()  # by the new operator, of a service that the old one has made
        time.sleep(5)
    log_line(load.result.line())
    assert load.result.done > 300
    assert dict(load.result.failures) == {}
    accepted = cluster.kubectl("apply", "--dry-run=server", "-n", namespace, "-f", str(ROOT / "examples"))
    assert "inferenceservice" in accepted  # the CRD is of the new version: it takes all examples


def source_of(revision: str, folder: Path) -> Path:
    """The files of a version."""
    archive, source = folder / "source.tar", folder / "source"
    source.mkdir()
    run("git", "archive", "--output", archive, revision)
    run("tar", "-xf", archive, "-C", source)
    return source


def upgrade(cluster: Cluster) -> None:
    """To the version that is tested, as its users do."""
    begun_s = time.monotonic()
    chart = str(ROOT / "charts/mini-infer")
    cluster.helm("upgrade", RELEASE, chart, "-n", SYSTEM, *release_flags(TAG), "--wait", "--timeout=220s")
    for part in ("gateway", "operator"):
        (deployment,) = cluster.get("deployment", f"{RELEASE}-{part}", "-n", SYSTEM)
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        assert container["image"] == f"{repository(part)}:{TAG}"
    log_line(f"helm upgrade took {time.monotonic() - begun_s:.0f} s")


def engine_images(service: Service) -> set[str]:
    """Of the engines that there are."""
    return {pod["spec"]["containers"][0]["image"] for pod in service.pods()}
