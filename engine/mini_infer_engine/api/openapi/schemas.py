"""JSON schemas of request and answer types, under `#/components/schemas`. Knows no paths."""

from collections.abc import Iterable
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from mini_infer_engine.api.dialects.fields import Body, GenerationFields

REF_TEMPLATE = "#/components/schemas/{name}"

Schema = dict[str, Any]

_TOKEN_IDS: Schema = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_PROMPT: Schema = {
    "anyOf": [
        {"type": "string"},
        _TOKEN_IDS,
        {"type": "array", "minItems": 1, "items": {"anyOf": [{"type": "string"}, _TOKEN_IDS]}},
    ]
}


class TextPart(Struct):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class CalledFunctionParam(Struct):
    """A function as the model has called it; `arguments` is JSON."""

    name: str
    arguments: str


class ToolCallParam(Struct):
    """A call of an earlier turn."""

    id: str
    type: Literal["function"]
    function: CalledFunctionParam


class ChatMessage(Struct):
    """One message of a conversation; a template may know more fields."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | UnsetType | None = UNSET
    """Content of the message; null only if the assistant calls tools."""
    tool_calls: list[ToolCallParam] | UnsetType = UNSET
    tool_call_id: str | UnsetType = UNSET
    reasoning: str | UnsetType | None = UNSET


def schemas_of(types: Iterable[type]) -> dict[str, Schema]:
    """Returns the schemas of these types, and of all that they are made of, by name."""
    kinds = list(types)
    found = msgspec.json.schema_components([*kinds, ChatMessage], ref_template=REF_TEMPLATE)[1]
    for kind in kinds:
        if issubclass(kind, Body):
            _complete(kind, found[kind.__name__])
    return found


def reference(kind: type) -> Schema:
    """Returns a reference to the schema of a type."""
    return {"$ref": REF_TEMPLATE.format(name=kind.__name__)}


def _complete(kind: type[Body], schema: Schema) -> None:
    """Adds facts that the types of a request's fields do not express."""
    properties: dict[str, Schema] = schema["properties"]
    if issubclass(kind, GenerationFields):
        properties |= {name: _of_neutral(values) for name, values in kind.neutral.items()}
    # Read from what the bodies hold rather than by msgspec, and so untyped in the struct.
    if "messages" in properties:
        chat: Schema = {"type": "array", "minItems": 1, "items": reference(ChatMessage)}
        is_batch = properties["messages"].get("items", {}).get("type") == "array"
        properties["messages"] = {"type": "array", "minItems": 1, "items": chat} if is_batch else chat
    if "prompt" in kind.__struct_fields__ and issubclass(kind, GenerationFields):
        properties["prompt"] = _PROMPT
        schema["required"] = sorted({*schema.get("required", []), "prompt"})


def _of_neutral(values: tuple[Any, ...]) -> Schema:
    """Returns the schema of a field that is not supported: it takes these values, and null."""
    builtins = [value for index, value in enumerate(values) if value not in values[:index]]
    return {"enum": [*builtins, None], "description": "Accepted at these values only."}
