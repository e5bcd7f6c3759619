"""Containers beside the engine's, and the limits of its probes. As in core/v1, as far as a user may set them."""

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
    """How patient a probe is; what it asks is the operator's."""

    initial_delay_seconds: int | None = Field(default=None, ge=0, le=86400)
    """Before the first question."""
    period_seconds: int | None = Field(default=None, ge=1, le=3600)
    """Between two questions."""
    timeout_seconds: int | None = Field(default=None, ge=1, le=3600)
    """For an answer."""
    failure_threshold: int | None = Field(default=None, ge=1, le=100000)
    """Questions in a row without a good answer that count as a failure."""


class ContainerResources(KubernetesType):
    """Requests and limits of a container beside the engine's."""

    requests: dict[str, Quantity] | None = Field(default=None, max_length=16)
    """What a node must have free."""
    limits: dict[str, Quantity] | None = Field(default=None, max_length=16)
    """What the container may use at most."""


class InitContainer(KubernetesType):
    """A container that runs to its end before the engine starts; with restartPolicy Always, a sidecar beside it."""

    name: str = Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
    """Unique in the pod; the engine's own is `engine`."""
    image: str = Field(min_length=1, max_length=1024)
    """Its image."""
    command: list[Argument] | None = Field(default=None, max_length=64)
    """In place of the image's entry point."""
    args: list[Argument] | None = Field(default=None, max_length=64)
    """In place of the image's arguments."""
    env: Annotated[list[EnvironmentVariable], _BY_NAME[0]] | None = Field(
        default=None, max_length=64, json_schema_extra=_BY_NAME[1]
    )
    """Its environment."""
    env_from: list[EnvironmentFrom] | None = Field(default=None, max_length=16)
    """ConfigMaps and Secrets of which every key becomes a variable."""
    volume_mounts: Annotated[list[VolumeMount], _BY_MOUNT_PATH[0]] | None = Field(
        default=None, max_length=32, json_schema_extra=_BY_MOUNT_PATH[1]
    )
    """Where the template's volumes are mounted."""
    resources: ContainerResources | None = None
    """Its requests and limits."""
    restart_policy: Literal["Always"] | None = None
    """Always: a sidecar, which starts before the engine and ends after it."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When the image is pulled."""
    security_context: SecurityContext | None = None
    """Merged over the operator's: no capabilities, no privilege escalation."""
