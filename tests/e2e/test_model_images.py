"""A model in an image: mounted from the node's own images, with a folder inside, by digest."""

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.model_archives import FOLDER
from tests.e2e.model_images import REPOSITORY, is_read_only, load_model_image, serve
from tests.e2e.release import RELEASE, SYSTEM, Release


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_a_model_is_served_from_an_image_when_nodes_mount_it(
    cluster: Cluster, release: Release, namespace: str
) -> None:
    digest = load_model_image(cluster)
    release.wait()
    with cluster.reach(SYSTEM, f"{RELEASE}-gateway") as url:
        serve(cluster, url, namespace, "in-an-image", f"oci://{REPOSITORY}@{digest}#{FOLDER}")
    is_read_only(cluster, namespace, "in-an-image")
