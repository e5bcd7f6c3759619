"""Tiers of the KV cache beside the GPU, as a pod, as flags and as local processes get them."""

from pathlib import Path
from typing import Any

import pytest

from mini_infer_operator.launch import launch_of, template_hash
from mini_infer_operator.local.commands import engine_command
from mini_infer_operator.objects.pod import frozen_pods
from mini_infer_operator.parse import parse_service
from mini_infer_operator.pod_security import PodSecurity
from tests.support.services import changed

HOST = {"kvCache": {"host": "1Gi"}}


def disk(**source: Any) -> dict[str, Any]:
    return {"kvCache": {"host": "1Gi", "disk": {"size": "2Gi", **source}}}


def pod(spec: dict[str, Any], **unified: Any) -> dict[str, Any]:
    service = parse_service(changed({"spec": {"unified": unified, **spec}}))
    launch = launch_of(service, "unified", "image")
    template: dict[str, Any] = frozen_pods(service, "unified", "r", launch, None)["template"]["spec"]
    return template


def flags(template: dict[str, Any]) -> list[str]:
    return [flag for flag in template["containers"][0]["args"] if flag.startswith("--kv-")]


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ({}, {"requests": {"cpu": "250m", "memory": "1536Mi"}}),
        ({"requests": {"memory": "2Gi"}}, {"requests": {"cpu": "250m", "memory": "3072Mi"}}),
        ({"limits": {"memory": "1G"}}, {"requests": {"cpu": "250m"}, "limits": {"memory": "2073741824"}}),
        (
            {"requests": {"memory": 1, "ephemeral-storage": "1Gi"}, "limits": {"ephemeral-storage": "1Gi"}},
            {
                "requests": {"cpu": "250m", "memory": "1073741825", "ephemeral-storage": "3072Mi"},
                "limits": {"ephemeral-storage": "3072Mi"},
            },
        ),
    ],
)
def test_main_memory_of_blocks_is_added_when_a_container_requests_or_limits_memory(
    resources: dict[str, Any], expected: dict[str, Any]
) -> None:
    container = pod(disk(emptyDir={}), resources=resources)["containers"][0]
    assert {kind: container["resources"][kind] for kind in expected} == expected
    assert {kind for kind in ("requests", "limits") if kind in container["resources"]} == set(expected)


@pytest.mark.parametrize(
    ("source", "volume"),
    [
        ({"emptyDir": {}}, {"emptyDir": {}}),
        ({"emptyDir": {"sizeLimit": "3Gi"}}, {"emptyDir": {"sizeLimit": "3Gi"}}),
        ({"hostPath": "/mnt/kv"}, {"hostPath": {"path": "/mnt/kv", "type": "Directory"}}),
        ({"volumeClaim": "kv"}, {"persistentVolumeClaim": {"claimName": "kv"}}),
    ],
)
def test_the_disk_is_mounted_when_it_has_a_source(source: dict[str, Any], volume: dict[str, Any]) -> None:
    template = pod(disk(**source))
    assert {"name": "mini-infer-kv-cache", **volume} in template["volumes"]
    mounts = template["containers"][0]["volumeMounts"]
    assert {"name": "mini-infer-kv-cache", "mountPath": "/var/cache/mini-infer"} in mounts
    assert {"name": "mini-infer-shm", "mountPath": "/dev/shm"} in mounts
    assert flags(template) == [
        "--kv-host-memory=1073741824",
        "--kv-host-path=/dev/shm/kv-cache",
        "--kv-disk-path=/var/cache/mini-infer/default-demo-unified",
        "--kv-disk-size=2147483648",
    ]
    assert template["securityContext"].get("fsGroup") == (65532 if "volumeClaim" in source else None)


def test_a_role_has_its_own_tiers_when_it_names_some() -> None:
    assert flags(pod(HOST)) == ["--kv-host-memory=1073741824", "--kv-host-path=/dev/shm/kv-cache"]
    assert flags(pod(disk(emptyDir={}), kvCache={"host": "2Gi"})) == [
        "--kv-host-memory=2147483648",
        "--kv-host-path=/dev/shm/kv-cache",
    ]
    assert flags(pod({})) == []


@pytest.mark.parametrize("parallelism", [{"tensor": 2}, {"pipeline": 2}, {"data": 2, "tensor": 2}], ids=str)
def test_main_memory_outlives_the_container_when_an_engine_has_ranks(parallelism: dict[str, int]) -> None:
    expected = ["--kv-host-memory=1073741824", "--kv-host-path=/dev/shm/kv-cache"]
    template = pod(HOST, parallelism=parallelism)
    assert flags(template) == expected
    assert {"name": "mini-infer-shm", "mountPath": "/dev/shm"} in template["containers"][0]["volumeMounts"]


def test_blocks_in_the_tiers_have_a_format_of_their_own_when_the_cache_names_it() -> None:
    spec = {"kvCache": {"host": "1Gi", "dtype": "int4"}}
    assert flags(pod(spec))[-1] == "--kv-tier-dtype=int4"


def test_the_revision_changes_with_the_tiers_and_with_nothing_else() -> None:
    def revision(spec: dict[str, Any]) -> str:
        return template_hash(parse_service(changed({"spec": spec})), "unified", "image")

    assert revision({**HOST}) == revision({"unified": {**HOST}}) != revision({})


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (disk(hostPath="/mnt/kv"), "spec.kvCache.disk.hostPath"),
        ({"unified": disk(hostPath="/mnt/kv")}, "spec.unified.kvCache.disk.hostPath"),
    ],
)
def test_a_folder_of_the_node_is_refused_when_the_operator_does_not_allow_it(spec: dict[str, Any], field: str) -> None:
    service = parse_service(changed({"spec": spec}))
    failure = PodSecurity(profile="baseline").failure(service, service.roles)
    assert failure is not None
    assert f"{field} (it needs --pod-security=privileged)" in failure.message
    assert PodSecurity(profile="privileged").failure(service, service.roles) is None
    assert PodSecurity().failure(parse_service(changed({"spec": disk(volumeClaim="kv")})), ["unified"]) is None


def test_a_local_engine_keeps_blocks_in_its_own_folder_when_the_cache_has_a_disk() -> None:
    launch = launch_of(parse_service(changed({"spec": disk(hostPath="/mnt/kv")})), "unified", "local")
    command = engine_command(launch, (1, 2, 3, 4), Path("key"), threads=1, gpus=(), kv_disk=Path("here/unified-0"))
    assert "--kv-disk-path=here/unified-0" in command.arguments
