"""A new default image reaches services in turn, and not those that keep theirs."""

from pathlib import Path

import pytest

from tests.support.operator_process import Cluster, OperatorProcess, wait

pytestmark = [pytest.mark.cluster]
NAMES = [f"turn-{number}" for number in range(5)]


def images(cluster: Cluster) -> dict[str, set[str]]:
    found = cluster.get("deployments", "serving.mini-infer.io/service")
    by_service: dict[str, set[str]] = {}
    for deployment in found:
        service = deployment["metadata"]["labels"]["serving.mini-infer.io/service"]
        image = deployment["spec"]["template"]["spec"]["containers"][0]["image"]
        by_service.setdefault(service, set()).add(image)
    return by_service


def test_services_roll_in_turn_when_the_default_image_changes(cluster: Cluster, tmp_path: Path) -> None:
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
    with OperatorProcess(cluster.plane, tmp_path / "a"):
        for name in NAMES:
            cluster.apply(name, **({"rollout": {"onDefaultImage": "Keep"}} if name == "turn-4" else {}))
        wait(lambda: all(cluster.ready(name).get("status") == "True" for name in NAMES))
    with OperatorProcess(cluster.plane, tmp_path / "b", "--engine-image=engine:broken", "--max-rolling-services=2"):
        wait(lambda: sum(len(found) == 2 for found in images(cluster).values()) == 2)
        cluster.apply("turn-new")
        wait(lambda: cluster.ready("turn-new").get("reason") == "ImagePullFailed")
        stuck = [name for name, found in images(cluster).items() if "engine:broken" in found and name != "turn-new"]
        assert len(stuck) == 2
        assert all(cluster.status(name)["readyReplicas"] == 2 for name in NAMES)
    with OperatorProcess(cluster.plane, tmp_path / "c", "--engine-image=engine:2", "--max-rolling-services=2"):
        most = 0

        def rolled() -> bool:
            nonlocal most
            now = images(cluster)
            most = max(most, sum(len(now[name]) > 1 for name in NAMES))
            return all(now[name] == {"engine:2"} for name in NAMES[:4])

        wait(rolled)
        assert most <= 4  # two in turn, and two that the broken image had left half-way
        assert images(cluster)["turn-4"] == {"engine:1"}
        assert all(cluster.status(name)["readyReplicas"] >= 2 for name in NAMES)
