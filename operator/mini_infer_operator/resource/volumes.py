"""Types a pod's volumes and a container's mounts of them, as in core/v1."""

from typing import Literal

from pydantic import Field

from mini_infer_operator.resource.quantity import ObjectName, Quantity
from mini_infer_operator.resource.reserved import RESERVED_MOUNT_PATHS
from mini_infer_operator.resource.rules import KubernetesType, OpenObject, Rule


class EmptyDir(KubernetesType):
    """A folder that lives as long as the pod."""

    medium: Literal["", "Memory", "HugePages"] | None = None
    """The storage medium. Memory is a tmpfs, which counts against the container's memory limit."""
    size_limit: Quantity | None = None
    """The size above which the pod is evicted."""


class ClaimReference(KubernetesType):
    """A PersistentVolumeClaim of the service's namespace."""

    claim_name: ObjectName
    """The claim's metadata.name."""
    read_only: bool | None = None
    """True if nothing can be written."""


class HostPath(KubernetesType):
    """A folder of the node."""

    path: str = Field(min_length=1, max_length=1024)
    """The folder's absolute path."""
    type: str | None = Field(default=None, max_length=32)
    """The object that must exist, such as Directory or DirectoryOrCreate."""


class NetworkFileSystem(KubernetesType):
    """A folder of an NFS server."""

    server: str = Field(min_length=1, max_length=253)
    """The server's host name or address."""
    path: str = Field(min_length=1, max_length=1024)
    """The exported folder."""
    read_only: bool | None = None
    """True if nothing can be written."""


_SOURCES = (
    "empty_dir",
    "persistent_volume_claim",
    "config_map",
    "secret",
    "host_path",
    "nfs",
    "csi",
    "ephemeral",
    "projected",
    "downward_api",
    "image",
    "iscsi",
    "fc",
)


class Volume(KubernetesType):
    """A volume of the engine's pods."""

    rules = (
        Rule(
            "[has(self.emptyDir), has(self.persistentVolumeClaim), has(self.configMap), has(self.secret), "
            "has(self.hostPath), has(self.nfs), has(self.csi), has(self.ephemeral), has(self.projected), "
            "has(self.downwardAPI), has(self.image), has(self.iscsi), has(self.fc)].filter(x, x).size() == 1",
            "a volume needs exactly one source, such as emptyDir: {}",
            lambda v: sum(getattr(v, source) is not None for source in _SOURCES) == 1,
        ),
    )
    name: str = Field(min_length=1, max_length=63, pattern="^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
    """The name by which volumeMounts refer to it."""
    empty_dir: EmptyDir | None = None
    """A folder that lives as long as the pod."""
    persistent_volume_claim: ClaimReference | None = None
    """A PersistentVolumeClaim of this namespace."""
    config_map: OpenObject | None = None
    """A ConfigMap's keys as files, as in core/v1."""
    secret: OpenObject | None = None
    """A Secret's keys as files, as in core/v1."""
    host_path: HostPath | None = None
    """A folder of the node."""
    nfs: NetworkFileSystem | None = None
    """A folder of an NFS server."""
    csi: OpenObject | None = None
    """An inline volume of a CSI driver, as in core/v1."""
    ephemeral: OpenObject | None = None
    """A PersistentVolumeClaim for each pod, as in core/v1."""
    projected: OpenObject | None = None
    """Several sources in one folder, as in core/v1."""
    downward_api: OpenObject | None = Field(default=None, alias="downwardAPI")
    """Fields of the pod as files, as in core/v1."""
    image: OpenObject | None = None
    """The files of a container image, as in core/v1."""
    iscsi: OpenObject | None = None
    """An iSCSI disk, as in core/v1."""
    fc: OpenObject | None = None
    """A Fibre Channel disk, as in core/v1."""


class VolumeMount(KubernetesType):
    """A mount of one of the template's volumes in the engine's container."""

    rules = (
        Rule(
            f"!(self.mountPath in {list(RESERVED_MOUNT_PATHS)})",
            "mountPath /tmp and /model are the operator's (scratch space and weights), and so is /var/cache/mini-infer "
            "(KV cache): choose another folder",
            lambda m: m.mount_path not in RESERVED_MOUNT_PATHS,
        ),
        Rule(
            "!(has(self.subPath) && self.subPath != '' && has(self.subPathExpr))",
            "subPath and subPathExpr both choose a folder of the volume: leave one out",
            lambda m: not (m.sub_path and m.sub_path_expr is not None),
        ),
    )
    name: str = Field(min_length=1, max_length=63)
    """The name of a volume in template.spec.volumes."""
    mount_path: str = Field(min_length=1, max_length=1024, pattern="^[^:]+$")
    """The folder in the container, without a colon."""
    read_only: bool | None = None
    """True if nothing can be written."""
    sub_path: str | None = Field(default=None, max_length=1024)
    """A folder inside the volume instead of its root."""
    sub_path_expr: str | None = Field(default=None, max_length=1024)
    """A folder inside the volume, with $(NAME) for variables of the environment."""
    mount_propagation: Literal["None", "HostToContainer", "Bidirectional"] | None = None
    """The direction in which later mounts are seen on the other side."""
    recursive_read_only: Literal["Disabled", "IfPossible", "Enabled"] | None = None
    """Read-only for mounts inside the volume too."""
