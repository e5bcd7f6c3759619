"""Types the security contexts of pods and containers, as in core/v1."""

from typing import Literal

from pydantic import Field

from mini_infer_operator.resource.quantity import ShortText
from mini_infer_operator.resource.rules import KubernetesType


class SeccompProfile(KubernetesType):
    """The allowed system calls, or the confining AppArmor profile."""

    type: Literal["RuntimeDefault", "Localhost", "Unconfined"]
    """The kind of profile; RuntimeDefault is the container runtime's own."""
    localhost_profile: str | None = Field(default=None, max_length=1024)
    """The profile on the node, for Localhost."""


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
    """The parameter's name, such as net.core.somaxconn."""
    value: ShortText
    """The parameter's value, a text: numbers need quotes."""


class _Rights(KubernetesType):
    """The fields that a pod's and a container's security context have in common."""

    run_as_user: int | None = Field(default=None, ge=0)
    """User id of the processes."""
    run_as_group: int | None = Field(default=None, ge=0)
    """Group id of the processes."""
    run_as_non_root: bool | None = None
    """True if a process of user 0 is refused."""
    seccomp_profile: SeccompProfile | None = None
    """The allowed system calls."""
    app_armor_profile: SeccompProfile | None = None
    """The AppArmor profile that confines the processes."""
    se_linux_options: SELinuxOptions | None = None
    """The SELinux context."""


class PodSecurityContext(_Rights):
    """Rights of all containers of a pod."""

    fs_group: int | None = Field(default=None, ge=0)
    """Group that owns the pod's volumes."""
    fs_group_change_policy: Literal["OnRootMismatch", "Always"] | None = None
    """The time at which the owner of a volume's files is changed."""
    supplemental_groups: list[int] | None = Field(default=None, max_length=64)
    """Further groups of the processes."""
    supplemental_groups_policy: Literal["Merge", "Strict"] | None = None
    """Merge to add the image's own groups, Strict to leave them out."""
    sysctls: list[Sysctl] | None = Field(default=None, max_length=32)
    """Kernel parameters."""


class Capabilities(KubernetesType):
    """Linux capabilities of a container's processes."""

    add: list[ShortText] | None = Field(default=None, max_length=64)
    """Capabilities added to the container runtime's default."""
    drop: list[ShortText] | None = Field(default=None, max_length=64)
    """Capabilities taken from it; ALL for every one."""


class SecurityContext(_Rights):
    """Rights of one container; they override the pod's."""

    allow_privilege_escalation: bool | None = None
    """True if a process may gain more rights than its parent."""
    capabilities: Capabilities | None = None
    """Linux capabilities."""
    privileged: bool | None = None
    """True if the container has all rights of the node."""
    proc_mount: Literal["Default", "Unmasked"] | None = None
    """The way in which /proc is mounted."""
    read_only_root_filesystem: bool | None = None
    """True if the image's files cannot be written."""
