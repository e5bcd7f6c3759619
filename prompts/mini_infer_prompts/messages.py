"""Converts OpenAI's `messages` and `tools` to what chat templates read; the rules are vLLM's. Knows no template and no
tokens.

Bad input gets an ApiError 400 that names the field, such as `messages[2].content`.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from mini_infer_prompts.call_form import CallForm
from mini_infer_prompts.image_sources import IMAGE_PARTS, image_source
from mini_infer_web.api_errors import FieldPath, refuse_field, shortened

Message = dict[str, Any]
_DEFAULT_CALLS = CallForm()


@dataclass(frozen=True, slots=True)
class ImageForm:
    """The form in which a template expects the images of a message."""

    as_parts: bool
    """True if it shows parts of the type image; otherwise a message's text begins with a line for each image."""
    text: str
    """An image in such a text."""


def template_messages(
    messages: object,
    *,
    content_parts: bool = False,
    developer_role: bool = False,
    calls: CallForm = _DEFAULT_CALLS,
    images: ImageForm | None = None,
) -> list[Message]:
    """Returns messages ready for a template: text content in one form, tool arguments in its form, no empty fields.

    `content_parts`: the template expects lists of parts, not strings. `developer_role`: the template knows that role;
    otherwise such messages become system messages, and all system messages one at the front, where templates expect it.
    `calls`: the form that it expects of earlier tool calls. `images`: the form that it expects of images; None if the
    model reads none.
    """
    if not isinstance(messages, list) or not messages:
        refuse_field("messages", "must be a list with at least one message")
    normal = [
        message
        if not content_parts and _is_plain(message)
        else _message(message, ("messages", index), content_parts, calls, images)
        for index, message in enumerate(messages)
    ]
    if calls.null_content:
        normal = [turn for message in normal for turn in _with_null_content(message)]
    if developer_role or all(message["role"] != "developer" for message in normal):
        return normal
    for index, message in enumerate(messages):
        if images is not None and message["role"] == "system" and _has_image(message):
            refuse_field(
                ("messages", index, "content"),
                "has an image, and goes into one system message with those of the role developer, which have text "
                "alone: use one of the two roles",
            )
    return _with_one_system_message(normal, content_parts)


def template_tools(tools: object) -> list[dict[str, Any]] | None:
    """Returns the tools, checked, without fields that are none of a tool's; None if there are none."""
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list):
        refuse_field("tools", "must be a list of tools")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            refuse_field(("tools", index), 'must be {"type": "function", "function": {"name": ..., ...}}')
    return [_tool(tool) for tool in tools]


_TOOL_FIELDS = frozenset(("type", "function"))
_FUNCTION_FIELDS = frozenset(("name", "description", "parameters", "strict", "return"))
"""`return` is transformers' own: `get_json_schema` writes it."""


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Returns the tool as it came, or without what the model is not to see, such as a `cache_control`."""
    function: dict[str, Any] = tool["function"]
    if not function.keys() <= _FUNCTION_FIELDS:
        function = {name: value for name, value in function.items() if name in _FUNCTION_FIELDS}
    elif tool.keys() <= _TOOL_FIELDS:
        return tool
    return {name: value for name, value in tool.items() if name in _TOOL_FIELDS} | {"function": function}


def _with_null_content(message: Message) -> list[Message]:
    """Returns a message with calls for a template that shows them only if the content is null; text goes into a message
    before.
    """
    if not message.get("tool_calls"):
        return [message]
    content = message["content"]
    is_blank = (
        not "".join(part["text"] for part in content).strip() if isinstance(content, list) else not content.strip()
    )
    if is_blank:
        return [message | {"content": None}]
    text = {name: value for name, value in message.items() if name != "tool_calls"}
    return [text, {"role": message["role"], "content": None, "tool_calls": message["tool_calls"]}]


def _is_plain(message: object) -> bool:
    """True if the message is a role and a text alone, as most are: nothing of it needs another form."""
    return (
        type(message) is dict
        and len(message) == 2
        and type(message.get("content")) is str
        and type(role := message.get("role")) is str
        and role != ""
    )


def _message(
    message: object, where: FieldPath, content_parts: bool, form: CallForm, images: ImageForm | None
) -> Message:
    if not isinstance(message, dict):
        refuse_field(where, f"must be an object with role and content, not {_kind(message)}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        refuse_field((*where, "role"), f"must be a string such as user, not {_kind(role)}")
    normal = {name: value for name, value in message.items() if value is not None}
    normal["content"] = _content(message.get("content"), (*where, "content"), role, content_parts, images)
    if role == "assistant":
        calls = _tool_calls(normal.pop("tool_calls", []), (*where, "tool_calls"), form)
        if calls:
            normal["tool_calls"] = calls
        reasoning = normal.get("reasoning", normal.get("reasoning_content"))
        if reasoning is not None:
            if not isinstance(reasoning, str):
                refuse_field((*where, "reasoning"), f"must be a string, not {_kind(reasoning)}")
            normal["reasoning"] = normal["reasoning_content"] = reasoning  # templates read either
    return normal


_TEXT_OF_PART = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


_IMAGE = {"type": "image"}


def _content(
    content: object, where: FieldPath, role: str, content_parts: bool, images: ImageForm | None
) -> str | list[dict[str, Any]]:
    if content is None and role == "assistant":
        content = ""  # it only called tools
    parts: list[str | None]
    if isinstance(content, str):
        parts = [content]
    elif isinstance(content, list):
        parts = [_part(part, (*where, index), role, images) for index, part in enumerate(content)]
    else:
        refuse_field(where, f"must be a string or a list of parts, not {_kind(content)}")
    texts = [part for part in parts if part is not None]
    if images is not None and len(texts) < len(parts):
        if images.as_parts:
            return [dict(_IMAGE) if part is None else {"type": "text", "text": part} for part in parts]
        texts = [images.text] * (len(parts) - len(texts)) + texts
    # Tool results are strings in every template, also in those that want parts.
    if content_parts and role != "tool":
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


def _part(part: object, where: FieldPath, role: str, images: ImageForm | None) -> str | None:
    """Returns the text of a part, or None if it is an image."""
    kind = part.get("type") if isinstance(part, dict) else None
    if images is None or not isinstance(part, dict) or not isinstance(kind, str) or kind not in IMAGE_PARTS:
        return _text(part, where)
    if role not in _IMAGE_ROLES:
        refuse_field((*where, "type"), f"is {kind}, and messages of the role {shortened(role)} have text alone")
    image_source(part, where)
    return None


def _has_image(message: Message) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(
        isinstance(part, dict) and part.get("type") in IMAGE_PARTS for part in content
    )


_IMAGE_ROLES = frozenset(("user", "tool", "system", "assistant"))


def _text(part: object, where: FieldPath) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        refuse_field(where, f"must be an object with a type, not {_kind(part)}")
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in _TEXT_OF_PART:
        refuse_field((*where, "type"), f"{shortened(repr(kind))} is not supported: this server reads text parts only")
    text = part.get(_TEXT_OF_PART[kind])
    if not isinstance(text, str):
        refuse_field((*where, _TEXT_OF_PART[kind]), f"must be a string, not {_kind(text)}")
    return text


def _tool_calls(calls: object, where: FieldPath, form: CallForm) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        refuse_field(where, f"must be a list, not {_kind(calls)}")
    normal = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(call, dict) or not isinstance(function, dict) or call.get("type", "function") != "function":
            refuse_field((*where, index), 'must be {"type": "function", "function": {"name": ..., "arguments": ...}}')
        if not isinstance(function.get("name"), str):
            refuse_field((*where, index, "function", "name"), f"must be a string, not {_kind(function.get('name'))}")
        arguments = _arguments(function.get("arguments"), (*where, index, "function", "arguments"), form)
        normal.append({**call, "function": {**function, "arguments": arguments}})
    return normal


def _arguments(arguments: object, where: FieldPath, form: CallForm) -> Any:
    """Returns the arguments in the template's form. Any string is taken: models write invalid JSON, and clients send
    it.
    """
    if arguments is None:
        arguments = ""
    value: object
    if isinstance(arguments, dict | list):
        text, value = None, arguments
    elif isinstance(arguments, str):
        text, value = arguments, _object_in(arguments)
    else:
        refuse_field(where, f"must be a string of JSON, not {_kind(arguments)}")
    if form.text_arguments:
        return (text if text is not None else json.dumps(value, ensure_ascii=False)) or "{}"
    if isinstance(value, dict):
        return value
    shown = text if text is not None else json.dumps(value, ensure_ascii=False)
    return shown if form.shows_text else {"arguments": shown}


_DEEPEST = 100
"""Most levels of nested arguments that are read: templates write them again, on a stack that is used already."""


def _object_in(text: str) -> dict[str, Any] | None:
    """Returns the object that the text encodes; None if it encodes none that a template could write again."""
    if not text.strip():
        return {}
    if _depth(text) > _DEEPEST:
        return None
    try:
        value = json.loads(text, strict=False)  # raw line breaks in strings are what models write
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except (ValueError, RecursionError):
        return None
    if value is None:
        return {}
    return value if isinstance(value, dict) else None


def _depth(text: str) -> int:
    """Returns the levels of nested objects and lists in a JSON text, or 0 if it has too few brackets to be too deep."""
    depth = deepest = 0
    for token in _BRACKETS.findall(text) if text.count("{") + text.count("[") > _DEEPEST else ():
        if token[0] != '"':
            depth += 1 if token in "{[" else -1
            deepest = max(deepest, depth)
    return deepest


_BRACKETS = re.compile(r"""[][{}]|"(?:[^"\\]|\\.)*+"?""", re.DOTALL)
"""Matches brackets, and strings as a whole: a bracket within a string nests nothing."""


def _with_one_system_message(messages: list[Message], content_parts: bool) -> list[Message]:
    texts: list[str] = []
    others: list[Message] = []
    for message in messages:
        if message["role"] not in ("system", "developer"):
            others.append(message)
            continue
        content = message["content"]
        text = "\n".join(part["text"] for part in content) if isinstance(content, list) else content
        if text:
            texts.append(text)
    whole = "\n\n".join(texts)
    return [{"role": "system", "content": [{"type": "text", "text": whole}] if content_parts else whole}, *others]


_JSON_KINDS = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string"}


def _kind(value: object) -> str:
    if value == "":
        return "an empty string"
    return _JSON_KINDS.get(type(value), "a list" if isinstance(value, list) else "an object")
