"""Types a container's environment variables, as in core/v1."""

from typing import Annotated

from pydantic import Field

from mini_infer_operator.resource.quantity import ObjectName, Quantity
from mini_infer_operator.resource.rules import KubernetesType, Rule

KeyName = Annotated[str, Field(min_length=1, max_length=253)]


class KeyReference(KubernetesType):
    """One key of a ConfigMap or a Secret."""

    name: ObjectName
    """Name of the ConfigMap or Secret."""
    key: KeyName
    """A key inside it."""
    optional: bool | None = None
    """True if the pod starts although it is missing."""


class FieldReference(KubernetesType):
    """One field of the pod."""

    field_path: str = Field(min_length=1, max_length=512)
    """The field's path, such as status.podIP."""
    api_version: str | None = Field(default=None, max_length=64)
    """The API version of the path; v1 if left out."""


class ResourceReference(KubernetesType):
    """One request or limit of a container."""

    resource: str = Field(min_length=1, max_length=253)
    """The resource, such as limits.memory."""
    container_name: str | None = Field(default=None, max_length=63)
    """The container; the engine's if left out."""
    divisor: Quantity | None = None
    """The unit of the value; 1 if left out."""


class EnvironmentSource(KubernetesType):
    """The source of a variable's value."""

    rules = (
        Rule(
            "[has(self.secretKeyRef), has(self.configMapKeyRef), has(self.fieldRef), has(self.resourceFieldRef)]"
            ".filter(x, x).size() == 1",
            "valueFrom needs exactly one of secretKeyRef, configMapKeyRef, fieldRef and resourceFieldRef",
            lambda s: (
                [s.secret_key_ref, s.config_map_key_ref, s.field_ref, s.resource_field_ref].count(None) == 3  # of 4
            ),
        ),
    )
    secret_key_ref: KeyReference | None = None
    """A key of a Secret."""
    config_map_key_ref: KeyReference | None = None
    """A key of a ConfigMap."""
    field_ref: FieldReference | None = None
    """A field of the pod."""
    resource_field_ref: ResourceReference | None = None
    """A request or limit of a container."""


class EnvironmentVariable(KubernetesType):
    """One variable of the engine's environment."""

    rules = (
        Rule(
            "!(has(self.value) && self.value != '' && has(self.valueFrom))",
            "value and valueFrom both say what the variable holds: leave one out",
            lambda e: not (e.value and e.value_from is not None),
        ),
    )
    name: str = Field(min_length=1, max_length=253, pattern=r"^[ -<>-~]+$")
    """The variable's name: printable ASCII without =."""
    value: str | None = Field(default=None, max_length=32768)
    """The variable's value, a text: numbers and true or false need quotes."""
    value_from: EnvironmentSource | None = None
    """The source of the value, in place of `value`."""


class ObjectReference(KubernetesType):
    """An object of the service's namespace, by name."""

    name: ObjectName
    """The object's metadata.name."""


class OptionalObject(ObjectReference):
    """An object of the service's namespace that may be missing."""

    optional: bool | None = None
    """True if the pod starts although it is missing."""


class EnvironmentFrom(KubernetesType):
    """A ConfigMap or Secret of which every key becomes a variable."""

    rules = (
        Rule(
            "has(self.configMapRef) != has(self.secretRef)",
            "envFrom needs exactly one of configMapRef and secretRef in each item",
            lambda e: (e.config_map_ref is None) != (e.secret_ref is None),
        ),
    )
    prefix: str | None = Field(default=None, max_length=253)
    """A text to put before each key."""
    config_map_ref: OptionalObject | None = None
    """The ConfigMap."""
    secret_ref: OptionalObject | None = None
    """The Secret."""
