"""`helm uninstall`, once all that ran is gone: the cluster is as it was. Comes after the tests of the release."""

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.commands import log_line
from tests.e2e.release import RELEASE, RELEASE_KINDS, Release, nothing_left


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_uninstalling_leaves_nothing_of_the_release(cluster: Cluster, release: Release) -> None:
    release.wait()
    release.uninstall()
    nothing_left(cluster, RELEASE_KINDS, f"app.kubernetes.io/instance={RELEASE}", "-A")
    log_line("the release is uninstalled, nothing of it is left")
