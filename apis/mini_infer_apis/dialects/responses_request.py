"""Bodies of OpenAI's Responses API as clients send them: the fields of which a chat is made, and their types.

Items are those of openai-python's `ResponseInputItem`. In items, parts and tools other fields are ignored, as in every
dialect; elsewhere they are refused by name. Fields that mean the same in a chat are checked there.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from mini_infer_web.api_errors import ApiError, Fault
from mini_infer_web.body_fields import UnknownFields, read_body

Item = dict[str, Any]
"""An item of `input` as JSON."""


class InputText(Struct, tag_field="type", tag="input_text"):
    """Text of a user, of the system, or of a tool's output."""

    text: str


class InputImage(Struct, tag_field="type", tag="input_image"):
    """An image of a user, or of a tool's output."""

    image_url: str | None = None
    file_id: str | None = None
    """No files are kept here, so it is refused."""
    detail: str | None = None
    """No effect: the model's image processor decides."""


class OutputText(Struct, tag_field="type", tag="output_text"):
    """Text of the assistant."""

    text: str


class PlainText(Struct, tag_field="type", tag="text"):
    """Text as chat completions have it."""

    text: str


class RefusalText(Struct, tag_field="type", tag="refusal"):
    """The assistant's refusal."""

    refusal: str


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    """A part of the reasoning as it was."""

    text: str


class SummaryText(Struct, tag_field="type", tag="summary_text"):
    """A part of a summary of the reasoning."""

    text: str


Content = str | list[InputText | InputImage | OutputText | PlainText | RefusalText]


class MessageItem(Struct, tag_field="type", tag="message"):
    """A message of either side."""

    role: Literal["user", "system", "developer", "assistant"]
    content: Content
    status: str | None = None


class ReasoningItem(Struct, tag_field="type", tag="reasoning"):
    """The assistant's reasoning of an earlier turn."""

    content: list[ReasoningText] | None = None
    summary: list[SummaryText] | None = None
    encrypted_content: str | None = None


class FunctionCallItem(Struct, tag_field="type", tag="function_call"):
    """A call of a function that the assistant has made."""

    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class CustomToolCallItem(Struct, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool that the assistant has made."""

    call_id: str
    name: str
    input: str
    namespace: str | None = None


class FunctionCallOutputItem(Struct, tag_field="type", tag="function_call_output"):
    """The result of a function."""

    call_id: str
    output: Content


class CustomToolCallOutputItem(Struct, tag_field="type", tag="custom_tool_call_output"):
    """The result of a custom tool."""

    call_id: str
    output: Content


InputItem = (
    MessageItem
    | ReasoningItem
    | FunctionCallItem
    | CustomToolCallItem
    | FunctionCallOutputItem
    | CustomToolCallOutputItem
)


class FunctionTool(Struct, tag_field="type", tag="function"):
    """A function of the client's. Its schema is checked as a chat's."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomFormat(Struct):
    """The form of a custom tool's input: any text."""

    type: Literal["text"]


class CustomTool(Struct, tag_field="type", tag="custom"):
    """A tool whose input is any text."""

    name: str
    description: str | None = None
    format: CustomFormat | None = None


class NamespaceTool(Struct, tag_field="type", tag="namespace"):
    """Functions under a common name."""

    name: Annotated[str, Meta(min_length=1)]
    tools: Annotated[list[FunctionTool], Meta(min_length=1)]


Tool = FunctionTool | CustomTool | NamespaceTool


class FunctionChoice(Struct, tag_field="type", tag="function"):
    """The name of a function."""

    name: str


class CustomChoice(Struct, tag_field="type", tag="custom"):
    """The name of a custom tool."""

    name: str


class AllowedTools(Struct, tag_field="type", tag="allowed_tools"):
    """The tools that may be called."""

    tools: list[FunctionChoice | CustomChoice]
    mode: str | None = None


class Reasoning(Struct, forbid_unknown_fields=True):
    """The effort of the reasoning. It is shown as it is, never shortened."""

    effort: str | None = None
    summary: Literal["auto", "detailed"] | None = None
    generate_summary: Literal["auto", "detailed"] | None = None
    context: Literal["auto", "all_turns"] | None = None
    """The chat template chooses which reasoning it shows."""
    mode: Literal["standard"] | None = None


class TextFormat(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """The answer is any text."""


class JsonObjectFormat(Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    """The answer is a JSON object."""


class JsonSchemaFormat(Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """The answer is JSON of a schema."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class StructuralTagFormat(Struct, tag_field="type", tag="structural_tag", forbid_unknown_fields=True):
    """The answer has parts of given forms; vLLM's structural tags in both their shapes."""

    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


Format = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat


class TextOptions(Struct, forbid_unknown_fields=True):
    """The form of the answer's text."""

    format: Format | None = None
    verbosity: str | None = None


class ResponsesConversation(Struct, kw_only=True):
    """The fields of which a chat is made."""

    input: str | list[InputItem]
    instructions: str | None = None
    tools: list[Tool] | None = None
    tool_choice: str | FunctionChoice | CustomChoice | AllowedTools | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None


def parse_conversation(body: dict[str, Any], unknown: UnknownFields | None = None) -> ResponsesConversation:
    """Returns the conversation of a body. Raises an ApiError 400 that names all fields of it that are at fault.

    `unknown` decides about fields within `reasoning` and `text` that nobody knows; if None, they are refused.
    """
    fields = {name: body[name] for name in ResponsesConversation.__struct_fields__ if body.get(name) is not None}
    if isinstance(fields.get("input"), list):
        fields["input"] = [_with_type(item) for item in fields["input"]]
    parsed, faults = read_body(fields, ResponsesConversation, unknown)
    if parsed is None:
        raise ApiError.of_faults([_with_choices(fault) for fault in faults])
    return parsed


def _with_type(item: object) -> object:
    """Returns an item with its type: one that has a role needs none."""
    return {"type": "message"} | item if isinstance(item, dict) and "role" in item else item


def _with_choices(fault: Fault) -> Fault:
    """Returns the fault of a type with the types that there are."""
    match fault.path:
        case ("input", _, "type"):
            choices = ", ".join(str(kind.__struct_config__.tag) for kind in InputItem.__args__)
            return Fault(fault.path, (*fault.rest, f"; send one of {choices}"), fault.code)
        case ("input", _, "content" | "output", _, "type"):
            return Fault(fault.path, (*fault.rest, "; this server reads text and input_image parts only"), fault.code)
        case ("tools", _, "type"):
            return _unsupported(fault, "this server has function and custom tools, and namespaces")
        case ("tools", _, "tools", _, "type"):
            return _unsupported(fault, "a namespace has functions alone")
        case ("tools", _, "format", *_):
            return _unsupported(Fault(fault.path[:3], fault.rest, fault.code), "a custom tool takes any text here")
        case ("tool_choice", "type"):
            choices = "none, auto, required, or an object of type function, custom or allowed_tools"
            return _unsupported(Fault(fault.path[:1], fault.rest, fault.code), f"send {choices}")
        case ("reasoning", "summary" | "generate_summary"):
            return _unsupported(fault, "reasoning is sent as it is, not shortened; send auto or detailed")
        case ("reasoning", "context" | "mode"):
            return _unsupported(fault, "the chat template chooses what it shows")
    return fault


def _unsupported(fault: Fault, reason: str) -> Fault:
    """Returns the fault of a value that OpenAI has and this server has not. Other faults stay as they are."""
    if fault.code != "invalid_value":
        return fault
    return Fault(fault.path, (*fault.rest, f"; {reason}"), "unsupported_value")
