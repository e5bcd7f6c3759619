"""Defines how a rule of the resource is stated once for the API server and for Python, and the base of all models."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    GetJsonSchemaHandler,
    WithJsonSchema,
    model_serializer,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema


@dataclass(frozen=True, slots=True)
class Rule:
    """One static rule: `cel`, for the API server, and `is_valid`, for Python, mean the same."""

    cel: str
    message: str
    """The error message, which says what to write instead."""
    is_valid: Callable[[Any], bool]


class ApiModel(BaseModel):
    """The base of all models here: camelCase names, no coercion, unknown fields are errors, rules checked last."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
        validate_by_name=True,
        validate_by_alias=True,
    )
    rules: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        broken = [rule.message for rule in self.rules if not rule.is_valid(self)]
        if broken:
            raise ValueError("; ".join(broken))
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler.resolve_ref_schema(handler(core_schema))
        if cls.rules:
            schema["x-kubernetes-validations"] = [{"rule": rule.cel, "message": rule.message} for rule in cls.rules]
        return schema


class KubernetesType(ApiModel):
    """A type of Kubernetes' own API, copied into pods as the user wrote it: dumped with Kubernetes' field names.

    A revision's hash is computed over what the user wrote, so it stays the same whichever fields a later version types.
    """

    @model_serializer(mode="plain")
    def _as_written(self) -> dict[str, Any]:
        fields = type(self).model_fields
        written = {name: getattr(self, name) for name in fields if name in self.model_fields_set}
        return {fields[name].alias or name: value for name, value in written.items() if value is not None}


def keyed_by(field: str) -> tuple[Any, dict[str, Any]]:
    """Returns the Python check and the JSON schema keywords of a list whose items have a unique `field`.

    A merge by server-side apply then works item by item, as for Kubernetes' own lists of this kind.
    """

    def check(items: Sequence[Any]) -> Sequence[Any]:
        values = [getattr(item, field) for item in items]
        twice = sorted({value for value in values if values.count(value) > 1})
        if twice:
            raise ValueError(f"{to_camel(field)} {', '.join(twice)} stands twice: remove one of the items")
        return items

    keywords = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [to_camel(field)]}
    return AfterValidator(check), keywords


OpenObject = Annotated[dict[str, Any], WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True})]
"""A Kubernetes object that is not typed here: the API server checks it when the pod template is applied."""
