"""Renders the tiers of the KV cache beside the GPU: the memory and the volume that a pod needs for them. Pure."""

from typing import Any

from mini_infer_operator.resource import KV_DISK_MOUNT, KvCache, parse_quantity

KV_DISK_VOLUME = "mini-infer-kv-cache"
ENGINE_GROUP = 65532
"""The group of the engine image's user, to which Kubernetes gives the files of a claim."""


def kv_disk_volumes(kv_cache: KvCache | None) -> list[dict[str, Any]]:
    """Returns the volume of the disk tier, if there is one. A folder of the node must exist: the kubelet would make it
    for root alone.
    """
    if kv_cache is None or kv_cache.disk is None:
        return []
    disk = kv_cache.disk
    if disk.volume_claim is not None:
        source: dict[str, Any] = {"persistentVolumeClaim": {"claimName": disk.volume_claim}}
    elif disk.host_path is not None:
        source = {"hostPath": {"path": disk.host_path, "type": "Directory"}}
    else:
        source = {"emptyDir": disk.empty_dir.model_dump() if disk.empty_dir is not None else {}}
    return [{"name": KV_DISK_VOLUME, **source}]


def kv_disk_mounts(kv_cache: KvCache | None) -> list[dict[str, Any]]:
    """Returns the mount of the disk tier in the engine's container, if there is one."""
    return [{"name": volume["name"], "mountPath": KV_DISK_MOUNT} for volume in kv_disk_volumes(kv_cache)]


def pod_security_of_disk(kv_cache: KvCache | None) -> dict[str, Any]:
    """Returns the fields of a pod's security context by which the engine's user may write to a claim."""
    if kv_cache is None or kv_cache.disk is None or kv_cache.disk.volume_claim is None:
        return {}
    return {"fsGroup": ENGINE_GROUP, "fsGroupChangePolicy": "OnRootMismatch"}


def with_kv_cache(resources: dict[str, Any], kv_cache: KvCache | None) -> dict[str, Any]:
    """Returns a container's resources with main memory for the host tier, and, where the user limits the node's
    ephemeral storage, with the disk tier of an emptyDir.
    """
    if kv_cache is None:
        return resources
    more = {"memory": parse_quantity(kv_cache.host)}
    if kv_cache.disk is not None and kv_cache.disk.empty_dir is not None:
        more["ephemeral-storage"] = parse_quantity(kv_cache.disk.size)
    raised: dict[str, Any] = {
        kind: {
            name: _quantity(parse_quantity(value) + more[name]) if name in more else value
            for name, value in resources[kind].items()
        }
        for kind in ("requests", "limits")
        if kind in resources
    }
    return {**resources, **raised}


def _quantity(size_bytes: float) -> str:
    whole = int(size_bytes)
    return f"{whole >> 20}Mi" if whole % (1 << 20) == 0 else str(whole)
