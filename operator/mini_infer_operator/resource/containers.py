"""Types containers beside the engine's, and the limits of its probes: core/v1, as far as a user may set it."""

from typing import Annotated, Literal

from pydantic import Field

from mini_infer_operator.resource.environment import EnvironmentFrom, EnvironmentVariable
from mini_infer_operator.resource.quantity import Quantity
from mini_infer_operator.resource.rules import KubernetesType, keyed_by
from mini_infer_operator.resource.security import SecurityContext
from mini_infer_operator.resource.volumes import VolumeMount

_BY_NAME = keyed_by("name")
_BY_MOUNT_PATH = keyed_by("mount_path")
Argument = Annotated[str, Field(max_length=4096)]


class ProbeLimits(KubernetesType):
    """The timing of a probe; the operator chooses its request."""

    initial_delay_seconds: int | None = Field(default=None, ge=0, le=86400)
    """Seconds before the first probe."""
    period_seconds: int | None = Field(default=None, ge=1, le=3600)
    """Seconds between two probes."""
    timeout_seconds: int | None = Field(default=None, ge=1, le=3600)
    """Seconds to wait for an answer."""
    failure_threshold: int | None = Field(default=None, ge=1, le=100000)
    """Probes in a row without a good answer that count as a failure."""


class ContainerResources(KubernetesType):
    """Requests and limits of a container beside the engine's."""

    requests: dict[str, Quantity] | None = Field(default=None, max_length=16)
    """Resources that a node must have free."""
    limits: dict[str, Quantity] | None = Field(default=None, max_length=16)
    """The most that the container may use."""


class InitContainer(KubernetesType):
    """A container that runs to its end before the engine starts; with restartPolicy Always, a sidecar beside it."""

    name: str = Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
    """A name that is unique in the pod; the engine's own container is `engine`."""
    image: str = Field(min_length=1, max_length=1024)
    """The container's image."""
    command: list[Argument] | None = Field(default=None, max_length=64)
    """Replaces the image's entry point."""
    args: list[Argument] | None = Field(default=None, max_length=64)
    """Replaces the image's arguments."""
    env: Annotated[list[EnvironmentVariable], _BY_NAME[0]] | None = Field(
        default=None, max_length=64, json_schema_extra=_BY_NAME[1]
    )
    """The container's environment."""
    env_from: list[EnvironmentFrom] | None = Field(default=None, max_length=16)
    """ConfigMaps and Secrets of which every key becomes a variable."""
    volume_mounts: Annotated[list[VolumeMount], _BY_MOUNT_PATH[0]] | None = Field(
        default=None, max_length=32, json_schema_extra=_BY_MOUNT_PATH[1]
    )
    """Mounts of the template's volumes."""
    resources: ContainerResources | None = None
    """The container's requests and limits."""
    restart_policy: Literal["Always"] | None = None
    """Always: a sidecar, which starts before the engine and ends after it."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """The time at which the image is pulled."""
    security_context: SecurityContext | None = None
    """Merged over the operator's: no capabilities, no privilege escalation."""
