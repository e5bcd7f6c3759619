"""When an engine is given GPUs that its resources do not name, and how many."""

from typing import Any

import pytest

from mini_infer_operator.gpus import gpus_of_engine, requests_gpu, resources_of
from mini_infer_operator.launch import launch_of, parallel_arguments
from mini_infer_operator.objects.pod import frozen_pods
from mini_infer_operator.parse import parse_service
from mini_infer_operator.resource import Parallelism
from tests.support.services import changed

pytestmark = pytest.mark.usefixtures("everything_works")


def role(**unified: Any) -> Any:
    return parse_service(changed({"spec": {"unified": unified}})).roles["unified"]


@pytest.mark.parametrize(
    ("unified", "limits", "of_engine"),
    [
        ({}, {}, 0),
        ({"parallelism": {"tensor": 1}}, {}, 0),
        ({"parallelism": {"tensor": 2}}, {"nvidia.com/gpu": 2}, 2),
        ({"parallelism": {"tensor": 4, "pipeline": 2, "data": 2}}, {"nvidia.com/gpu": 16}, 16),
        ({"parallelism": {"tensor": 8, "nodes": 2}}, {"nvidia.com/gpu": 4}, 8),
        ({"parallelism": {"tensor": 2}, "engine": {"device": "cpu"}}, {}, 0),
        ({"parallelism": {"tensor": 2}, "engine": {"extraArgs": ["--device=cpu"]}}, {}, 0),
        ({"parallelism": {"tensor": 2}, "engine": {"extraArgs": ["--dry-run"]}}, {}, 0),
        ({"parallelism": {"tensor": 2}, "resources": {"limits": {"amd.com/gpu": 2}}}, {"amd.com/gpu": 2}, 2),
        (
            {"parallelism": {"tensor": 2}, "resources": {"limits": {"nvidia.com/mig-1g.10gb": 2}}},
            {"nvidia.com/mig-1g.10gb": 2},
            2,
        ),
        (
            {"parallelism": {"tensor": 2}, "resources": {"limits": {"memory": "64Gi"}}},
            {"memory": "64Gi", "nvidia.com/gpu": 2},
            2,
        ),
        ({"resources": {"limits": {"nvidia.com/gpu": 1}}}, {"nvidia.com/gpu": 1}, 1),
        ({"resources": {"limits": {"nvidia.com/mig-1g.10gb": 2}}}, {"nvidia.com/mig-1g.10gb": 2}, 2),
        (
            {"parallelism": {"tensor": 2}, "resources": {"limits": {"nvidia.com/gpu": 0}}, "engine": {"device": "cpu"}},
            {"nvidia.com/gpu": 0},
            0,
        ),
    ],
)
def test_gpu_requests_follow_parallelism(unified: dict[str, Any], limits: dict[str, Any], of_engine: int) -> None:
    assert dict(resources_of(role(**unified)).allowed) == limits
    assert gpus_of_engine(role(**unified)) == of_engine
    assert requests_gpu(role(**unified)) == bool(of_engine)


@pytest.mark.parametrize(
    ("limits", "gpus"),
    [
        ({"nvidia.com/gpu": 2, "nvidia.com/gpumem": 8000}, 2),
        ({"nvidia.com/gpu": 2, "nvidia.com/gpucores": 50, "nvidia.com/gpumem-percentage": 50}, 2),
        ({"nvidia.com/gpu": 2, "nvidia.com/hostdev": 8, "rdma/hca": 1, "rdma/rdma_shared_device_a": 1}, 2),
        ({"nvidia.com/gpu.shared": 2}, 2),
        ({"nvidia.com/mig-1g.10gb": 2}, 2),
        ({"nvidia.com/mig-1g.10gb.me": 2}, 2),
        ({"nvidia.com/mig-1c.3g.20gb.shared": 2}, 2),
        ({"amd.com/gpu": 2, "amd.com/gpumem": 4000}, 2),
        ({"amd.com/cpx_nps4": 2}, 2),
        ({"gpu.intel.com/i915": 2, "gpu.intel.com/millicores": 500, "gpu.intel.com/memory.max": 1024}, 2),
        ({"gpu.intel.com/xe": 2, "gpu.intel.com/xe_monitoring": 1}, 2),
        ({"nvidia.com/gpumem": 8000, "nvidia.com/hostdev": 1, "nvidia.com/gpu-fake": 3, "cpu": 4, "memory": "1Gi"}, 0),
        ({"example.com/nvidia.com.gpu": 2, "hugepages-2Mi": "4Mi", "ephemeral-storage": "1Gi"}, 0),
    ],
)
def test_only_gpus_are_counted_when_limits_name_other_devices_too(limits: dict[str, Any], gpus: int) -> None:
    requested = role(resources={"limits": limits}, parallelism={"tensor": 2})
    assert requested.resources.gpus == gpus
    assert gpus_of_engine(requested) == 2  # as written, or one for each rank


def test_parallelism_becomes_engine_flags() -> None:
    sizes = Parallelism(tensor=2, pipeline=1, data=4, expert=True)
    flags = ("--tensor-parallel-size=2", "--data-parallel-size=4", "--enable-expert-parallel")
    assert parallel_arguments(sizes) == flags
    assert parallel_arguments(Parallelism()) == ()


def test_no_gpu_is_requested_when_a_resource_claim_is_named() -> None:
    claim = {"claims": [{"name": "gpus"}]}
    assert resources_of(role(parallelism={"tensor": 2}, resources=claim)).allowed == {}


@pytest.mark.parametrize(
    ("spec", "mounted"),
    [
        ({"unified": {}}, False),
        ({"unified": {"parallelism": {"tensor": 2}, "engine": {"device": "cpu"}}}, True),
        ({"unified": {"resources": {"limits": {"nvidia.com/gpu": 1}}}}, True),
        ({"unified": None, "prefill": {}, "decode": {}}, True),
        ({"unified": {"engine": {"kvTransport": "auto"}}}, True),
    ],
)
def test_shared_memory_is_mounted_when_ranks_need_it(spec: dict[str, Any], mounted: bool) -> None:
    service = parse_service(changed({"spec": spec}))
    (name, *_) = service.roles
    pod = frozen_pods(service, name, "r", launch_of(service, name, "i"), None)["template"]["spec"]
    shared = [v for v in pod["volumes"] if v.get("emptyDir", {}).get("medium") == "Memory"]
    assert bool(shared) is mounted
    assert any(m["mountPath"] == "/dev/shm" for m in pod["containers"][0]["volumeMounts"]) is mounted
