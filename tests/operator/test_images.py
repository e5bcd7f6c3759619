"""Which image an engine runs from, and who is told that none fits."""

import re
from typing import Any

import pytest

from mini_infer_operator.gpus import gpu_resources
from mini_infer_operator.images import EngineImages
from mini_infer_operator.parse import parse_service
from tests.support.services import changed

BOTH, CPU_ONLY = EngineImages("cpu:1", "cuda:1"), EngineImages("cpu:1")
GPU = {"limits": {"nvidia.com/gpu": 1}}
MIG = {"limits": {"nvidia.com/mig-1g.10gb": "2"}}
CLAIM = {"claims": [{"name": "gpu"}]}
NONE: dict[str, Any] = {"limits": {"cpu": 4, "nvidia.com/gpu": 0}}


def service(resources: dict[str, Any], image: str | None = None) -> Any:
    spec: dict[str, Any] = {"unified": {"resources": resources}}
    return parse_service(changed({"spec": spec | ({"image": image} if image else {})}))


@pytest.mark.parametrize(
    ("resources", "requested"),
    [(GPU, {"nvidia.com/gpu": 1}), (MIG, {"nvidia.com/mig-1g.10gb": 2}), (CLAIM, {"gpu": 1})],
)
def test_the_gpu_image_is_chosen_when_a_gpu_is_requested(
    resources: dict[str, Any], requested: dict[str, float]
) -> None:
    expected = service(resources)
    assert gpu_resources(expected.roles["unified"].resources) == requested
    assert BOTH.default_for(expected) == "cuda:1"
    assert BOTH.failure(expected) is None


def test_the_cpu_image_is_chosen_when_no_gpu_is_requested() -> None:
    assert BOTH.default_for(service(NONE)) == "cpu:1"
    assert CPU_ONLY.failure(service(NONE)) is None


@pytest.mark.parametrize(
    ("images", "image", "reported"),
    [
        (CPU_ONLY, None, r"unified asks for a GPU, and cpu:1 computes on CPUs: name one .* --engine-cuda-image"),
        (CPU_ONLY, "cpu:1", r"unified asks for a GPU, and cpu:1 computes on CPUs: name one"),
        (
            BOTH,
            "cpu:1",
            r"unified asks for a GPU, and cpu:1 computes on CPUs: leave spec.image out, and cuda:1 is used",
        ),
    ],
)
def test_no_gpu_image_is_reported_when_a_gpu_is_requested_for_a_cpu_image(
    images: EngineImages, image: str | None, reported: str
) -> None:
    failure = images.failure(service(GPU, image))
    assert failure is not None
    assert failure.reason == "NoGpuImage"
    assert re.match(reported, failure.message), failure.message


def test_no_failure_is_reported_when_the_service_names_its_image() -> None:
    assert CPU_ONLY.failure(service(GPU, "mine:1")) is None
