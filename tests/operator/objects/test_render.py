"""Services in, manifests out: files in ../data, which `python -m tests.operator.objects.test_render` writes."""

from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from mini_infer_operator.objects.observed_workloads import pods_of
from mini_infer_operator.objects.render import render
from mini_infer_operator.observe import Observed, ObservedWorkload
from mini_infer_operator.parse import parse_service
from mini_infer_operator.plan.plan import make_plan
from mini_infer_operator.resource import InferenceService
from mini_infer_operator.resource.not_yet import NOT_YET
from tests.support.services import changed

NOW = datetime(2026, 1, 1, tzinfo=UTC)
DATA = Path(__file__).parents[1] / "data"
INPUTS = sorted(DATA.glob("*.in.yaml"))
STORED = {"metadata": {"uid": "uid-1", "creationTimestamp": "2026-01-01T00:00:00Z"}}


def rendered(source: Path) -> list[dict[str, Any]]:
    service = parse_service(changed(STORED, yaml.safe_load(source.read_text())))
    manifests = render(service, make_plan(service, Observed(default_image="engine:1"), NOW), {}, "IfNotPresent")
    for revision, workload in pairwise(manifests):
        if revision["kind"] == "ControllerRevision":
            assert revision["data"] == pods_of(workload)
            revision["data"] = {}  # shown once is enough
    return manifests


@pytest.mark.usefixtures("everything_works")
@pytest.mark.parametrize("source", INPUTS, ids=lambda path: path.name)
def test_rendered_manifests_equal_their_golden_files(source: Path) -> None:
    expected = source.with_name(source.name.replace(".in.", ".out."))
    assert rendered(source) == list(yaml.safe_load_all(expected.read_text()))


def test_a_stored_template_is_rendered_unchanged() -> None:
    service = parse_service(changed(STORED))
    seen = Observed(
        [ObservedWorkload("unified", "old", 2, 2, 2), ObservedWorkload("unified", "lost", 1, 1, 1)],
        default_image="engine:1",
    )
    plan = make_plan(service, seen, NOW)
    current = plan.workloads[-1].revision
    frozen = {
        ("unified", "old"): {"template": {"by": "an old operator"}},
        ("unified", current): {"template": {"by": "the last operator"}},
    }
    deployments = [m for m in render(service, plan, frozen, None) if m["kind"] == "Deployment"]
    assert {d["metadata"]["name"]: (d["spec"]["replicas"], d["spec"]["template"]["by"]) for d in deployments} == {
        f"demo-unified-{current}": (1, "the last operator"),
        "demo-unified-old": (2, "an old operator"),
    }


if __name__ == "__main__":
    InferenceService.rules = tuple(rule for rule in InferenceService.rules if rule not in NOT_YET)
    for path in INPUTS:
        text = yaml.safe_dump_all(rendered(path), sort_keys=False, width=120)
        path.with_name(path.name.replace(".in.", ".out.")).write_text(text)
