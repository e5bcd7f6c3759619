from typing import Any

import pytest

from mini_infer_operator.launch import service_revision
from mini_infer_operator.parse import parse_service
from mini_infer_operator.plan.default_image import Change, ImageChange, image_change
from tests.support.services import changed


def revision(image: str, **spec: Any) -> str:
    return service_revision(parse_service(changed({"spec": spec})), image)


OLD, NEW = revision("old"), revision("new")


@pytest.mark.parametrize(
    ("running", "expected"),
    [
        ({}, ImageChange(Change.NONE)),
        ({NEW: "new"}, ImageChange(Change.NONE)),
        ({OLD: "old"}, ImageChange(Change.DUE, "old")),
        ({OLD: "old", NEW: "new"}, ImageChange(Change.ROLLING)),
        ({revision("old", unified={"engine": {"maxNumSeqs": 8}}): "old"}, ImageChange(Change.NONE)),
    ],
    ids=["does not run", "runs from it", "due", "begun", "the user edited too"],
)
def test_image_change_by_running_images(running: dict[str, str], expected: ImageChange) -> None:
    assert image_change(parse_service(changed({})), "new", running) == expected


def test_the_default_image_changes_nothing_when_a_service_names_its_own() -> None:
    service = parse_service(changed({"spec": {"image": "mine"}}))
    running = {service_revision(service, "old"): "mine"}
    assert image_change(service, "new", running) == ImageChange(Change.NONE)
