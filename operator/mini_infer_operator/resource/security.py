"""Kubernetes' types of what a pod's and a container's processes may do. As in core/v1."""

from typing import Literal

from pydantic import Field

from mini_infer_operator.resource.quantity import ShortText
from mini_infer_operator.resource.rules import KubernetesType


class SeccompProfile(KubernetesType):
    """Which system calls are allowed."""

    type: Literal["RuntimeDefault", "Localhost", "Unconfined"]
    """RuntimeDefault: the container runtime's own list."""
    localhost_profile: str | None = Field(default=None, max_length=1024)
    """The file on the node, for Localhost."""


class SELinuxOptions(KubernetesType):
    """The SELinux context of processes and volumes."""

    level: str | None = Field(default=None, max_length=256)
    """SELinux level."""
    role: str | None = Field(default=None, max_length=256)
    """SELinux role."""
    type: str | None = Field(default=None, max_length=256)
    """SELinux type."""
    user: str | None = Field(default=None, max_length=256)
    """SELinux user."""


class Sysctl(KubernetesType):
    """One kernel parameter of the pod's namespaces."""

    name: str = Field(min_length=1, max_length=253)
    """Such as net.core.somaxconn."""
    value: ShortText
    """A text: numbers need quotes."""


class _Rights(KubernetesType):
    """What a pod's and a container's security context have in common."""

    run_as_user: int | None = Field(default=None, ge=0)
    """User id of the processes."""
    run_as_group: int | None = Field(default=None, ge=0)
    """Group id of the processes."""
    run_as_non_root: bool | None = None
    """Whether a process of user 0 is refused."""
    seccomp_profile: SeccompProfile | None = None
    """Which system calls are allowed."""
    app_armor_profile: SeccompProfile | None = None
    """Which AppArmor profile confines the processes."""
    se_linux_options: SELinuxOptions | None = None
    """The SELinux context."""


class PodSecurityContext(_Rights):
    """Rights of all containers of a pod."""

    fs_group: int | None = Field(default=None, ge=0)
    """Group that owns the pod's volumes."""
    fs_group_change_policy: Literal["OnRootMismatch", "Always"] | None = None
    """When the owner of a volume's files is changed."""
    supplemental_groups: list[int] | None = Field(default=None, max_length=64)
    """Further groups of the processes."""
    supplemental_groups_policy: Literal["Merge", "Strict"] | None = None
    """Whether the image's own groups are added."""
    sysctls: list[Sysctl] | None = Field(default=None, max_length=32)
    """Kernel parameters."""


class Capabilities(KubernetesType):
    """Linux capabilities of a container's processes."""

    add: list[ShortText] | None = Field(default=None, max_length=64)
    """Added to the container runtime's default."""
    drop: list[ShortText] | None = Field(default=None, max_length=64)
    """Taken from it; ALL for every one."""


class SecurityContext(_Rights):
    """Rights of one container; wins over the pod's."""

    allow_privilege_escalation: bool | None = None
    """Whether a process may gain more rights than its parent."""
    capabilities: Capabilities | None = None
    """Linux capabilities."""
    privileged: bool | None = None
    """Whether the container has all rights of the node."""
    proc_mount: Literal["Default", "Unmasked"] | None = None
    """How /proc is mounted."""
    read_only_root_filesystem: bool | None = None
    """Whether the image's files cannot be written."""
