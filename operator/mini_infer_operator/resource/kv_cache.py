"""Defines the tiers of the KV cache beside the GPU: main memory, and a disk. Knows neither pods nor flags."""

import re
from typing import Literal

from pydantic import Field

from mini_infer_operator.resource.quantity import ObjectName, Quantity, parse_quantity
from mini_infer_operator.resource.rules import ApiModel, Rule
from mini_infer_operator.resource.volumes import EmptyDir

LEAST_TIER = "1Mi"
_FOLDER_PATTERN = "^(/[^/]+)+$"


def _at_least(field: str) -> str:
    return f"quantity(string(self.{field})).compareTo(quantity('{LEAST_TIER}')) >= 0"


class KvCacheDisk(ApiModel):
    """The place of blocks that main memory has no room for. Exactly one of its sources is set."""

    rules = (
        Rule(
            "[has(self.emptyDir), has(self.hostPath), has(self.volumeClaim)].filter(x, x).size() == 1",
            "kvCache.disk needs exactly one source: write emptyDir: {}, hostPath: /path or volumeClaim: NAME",
            lambda d: sum(source is not None for source in (d.empty_dir, d.host_path, d.volume_claim)) == 1,
        ),
        Rule(
            _at_least("size"),
            f"kvCache.disk.size must be at least {LEAST_TIER}, such as 200Gi",
            lambda d: parse_quantity(d.size) >= parse_quantity(LEAST_TIER),
        ),
        Rule(
            f"!has(self.hostPath) || (self.hostPath.matches('{_FOLDER_PATTERN}') && !self.hostPath.contains('/..'))",
            "kvCache.disk.hostPath must be the absolute path of a folder of the node, without '..', such as "
            "/mnt/nvme/kv-cache",
            lambda d: (
                d.host_path is None or (re.match(_FOLDER_PATTERN, d.host_path) is not None and "/.." not in d.host_path)
            ),
        ),
        Rule(
            "!has(self.emptyDir) || !has(self.emptyDir.medium) || self.emptyDir.medium == ''",
            "kvCache.disk.emptyDir in memory is no disk: leave medium out, and write more kvCache.host",
            lambda d: d.empty_dir is None or not d.empty_dir.medium,
        ),
        Rule(
            "!has(self.emptyDir) || !has(self.emptyDir.sizeLimit) || "
            "quantity(string(self.emptyDir.sizeLimit)).compareTo(quantity(string(self.size))) >= 0",
            "kvCache.disk.emptyDir.sizeLimit is below kvCache.disk.size: a pod whose tier is full would be evicted; "
            "leave sizeLimit out, or raise it",
            lambda d: (
                d.empty_dir is None
                or d.empty_dir.size_limit is None
                or parse_quantity(d.empty_dir.size_limit) >= parse_quantity(d.size)
            ),
        ),
    )
    size: Quantity
    """The most that blocks take there, for each engine; the oldest go first."""
    empty_dir: EmptyDir | None = None
    """A folder of the pod: blocks survive a restart of the engine's container."""
    host_path: str | None = Field(default=None, min_length=1, max_length=1024)
    """A folder of the node, which must exist and be writable for the engine's user; blocks survive the pod. The
    operator must allow it (`--pod-security=privileged`).
    """
    volume_claim: ObjectName | None = None
    """A PersistentVolumeClaim of the service's namespace; ReadWriteMany if engines run on several nodes."""


class KvCache(ApiModel):
    """The tiers for blocks of the prefix cache that the GPU has no room for."""

    rules = (
        Rule(
            _at_least("host"),
            f"kvCache.host must be at least {LEAST_TIER}, such as 64Gi",
            lambda c: parse_quantity(c.host) >= parse_quantity(LEAST_TIER),
        ),
    )
    host: Quantity
    """Main memory for blocks, of each engine. It is added to what the container requests, and to its limit."""
    disk: KvCacheDisk | None = None
    """A disk for blocks that leave main memory; none if left out."""
    dtype: Literal["auto", "int4"] | None = None
    """The format of blocks in both: `--kv-tier-dtype`."""
