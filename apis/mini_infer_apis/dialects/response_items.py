"""Converts items of OpenAI's Responses API to messages of a chat. Knows no other field of a request, and no template.

Items are those of openai-python's `ResponseInputItem`. An assistant's turn is several of them (its reasoning, its text,
its calls), and one message in a chat. Bad input gets an ApiError 400 that names the field, such as `input[2].content`.
"""

import base64
import json
from typing import Any, NoReturn

from mini_infer_web.api_errors import FieldPath, refuse_field

Item = dict[str, Any]
Message = dict[str, Any]

_ROLES = ("user", "system", "developer", "assistant")
_TEXT_OF_PART = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_REASONING_MARK = "mini-infer:"
"""Prefix of an `encrypted_content` of ours: the text in base64. It is no secret, the client may have it in clear."""


def input_items(given: object) -> list[Item]:
    """Returns a request's `input` as items: a string is one message of the user. Raises ApiError if it is neither."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    if not isinstance(given, list):
        _refuse("input", "must be a string or a list of items")
    for index, item in enumerate(given):
        if not isinstance(item, dict):
            _refuse(("input", index), "must be an object with a type, or with role and content")
    return given


def chat_messages(items: list[Item], instructions: str | None = None) -> list[Message]:
    """Returns the conversation in the form of chat.completions; `instructions` are its first message. Raises ApiError
    if an item is wrong.
    """
    conversation = _Conversation()
    if instructions:
        conversation.add({"role": "system", "content": instructions})
    for index, item in enumerate(items):
        where = ("input", index)
        kind = item.get("type", "message" if "role" in item else None)
        reader = _READERS.get(kind) if isinstance(kind, str) else None
        if reader is None:
            _refuse((*where, "type"), f"{str(kind)[:100]!r} is not supported: send one of {', '.join(_READERS)}")
        reader(conversation, item, where)
    if not conversation.messages:
        _refuse("input", "has no message: send at least one")
    return conversation.messages


def is_to_be_continued(items: list[Item]) -> bool:
    """True if the last item is an answer that broke off: the model continues it, as vLLM does."""
    last = items[-1] if items else {}
    return last.get("role") == "assistant" and last.get("status") in ("in_progress", "incomplete")


def sealed_reasoning(text: str) -> str:
    """Returns the `encrypted_content` of a reasoning item, for clients that send back that alone."""
    return _REASONING_MARK + base64.b64encode(text.encode("utf-8", "replace")).decode()


class _Conversation:
    """The messages so far, of which the last may be an assistant's that is not complete."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.call_ids: set[str] = set()

    def add(self, message: Message) -> None:
        self.messages.append(message)

    def turn(self, *taken: str) -> Message:
        """Returns the assistant's message to continue: the last one if it has none of the `taken` fields, else a new
        one.
        """
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(last.get(name) for name in taken):
            last = {"role": "assistant", "content": None}
            self.add(last)
        return last


def _read_message(conversation: _Conversation, item: Item, where: FieldPath) -> None:
    role = item.get("role")
    if role not in _ROLES:
        _refuse((*where, "role"), f"must be one of {', '.join(_ROLES)}, not {str(role)[:100]!r}")
    content = _content(item.get("content"), (*where, "content"))
    if role == "assistant":
        conversation.turn("content", "tool_calls")["content"] = content
    else:
        conversation.add({"role": role, "content": content})


def _read_reasoning(conversation: _Conversation, item: Item, where: FieldPath) -> None:
    texts = _reasoning_texts(item, where)
    if texts:
        turn = conversation.turn("content", "tool_calls")
        turn["reasoning"] = "\n".join([*filter(None, [turn.get("reasoning")]), *texts])


def _read_call(conversation: _Conversation, item: Item, where: FieldPath) -> None:
    _add_call(conversation, item, where, _string(item, "arguments", where))


def _read_custom_call(conversation: _Conversation, item: Item, where: FieldPath) -> None:
    _add_call(conversation, item, where, json.dumps({CUSTOM_INPUT: _string(item, "input", where)}))


def _add_call(conversation: _Conversation, item: Item, where: FieldPath, arguments: str) -> None:
    call_id, name = _string(item, "call_id", where), _string(item, "name", where)
    if item.get("namespace") is not None:
        name = namespaced(_string(item, "namespace", where), name)
    conversation.call_ids.add(call_id)
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    conversation.turn().setdefault("tool_calls", []).append(call)


def _read_output(conversation: _Conversation, item: Item, where: FieldPath) -> None:
    call_id = _string(item, "call_id", where)
    if call_id not in conversation.call_ids:
        _refuse(
            (*where, "call_id"), f"is {call_id[:100]!r}, and no call before it has that call_id: send the call, too"
        )
    content = _content(item.get("output"), (*where, "output"))
    conversation.add({"role": "tool", "tool_call_id": call_id, "content": content})


def namespaced(namespace: str, name: str) -> str:
    """Returns the name by which the model sees a function of a namespace."""
    return f"{namespace}__{name}"


CUSTOM_INPUT = "input"
"""The one argument of the function as which a custom tool is shown to the model."""

_READERS = {
    "message": _read_message,
    "function_call": _read_call,
    "function_call_output": _read_output,
    "custom_tool_call": _read_custom_call,
    "custom_tool_call_output": _read_output,
    "reasoning": _read_reasoning,
}


def _reasoning_texts(item: Item, where: FieldPath) -> list[str]:
    """Returns the texts of the reasoning: its text if the item has it, else the sealed text, else the summary."""
    if texts := _texts(item.get("content") or [], "reasoning_text", (*where, "content")):
        return texts
    sealed = item.get("encrypted_content")
    if isinstance(sealed, str) and sealed.startswith(_REASONING_MARK):
        try:
            return [base64.b64decode(sealed.removeprefix(_REASONING_MARK), validate=True).decode()]
        except ValueError:
            _refuse((*where, "encrypted_content"), "is not what this server has sent: send it back unchanged")
    if sealed is not None:
        _refuse((*where, "encrypted_content"), "is of another server: leave the reasoning item out")
    return _texts(item.get("summary") or [], "summary_text", (*where, "summary"))


def _texts(parts: object, kind: str, where: FieldPath) -> list[str]:
    if not isinstance(parts, list):
        _refuse(where, "must be a list of parts")
    for index, part in enumerate(parts):
        if not isinstance(part, dict) or part.get("type") != kind or not isinstance(part.get("text"), str):
            _refuse((*where, index), f'must be {{"type": "{kind}", "text": ...}}')
    return [part["text"] for part in parts if part["text"]]


def _content(content: object, where: FieldPath) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        _refuse(where, "must be a string or a list of parts")
    return [{"type": "text", "text": _text(part, (*where, index))} for index, part in enumerate(content)]


def _text(part: object, where: FieldPath) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        _refuse(where, "must be an object with a type")
    if kind not in _TEXT_OF_PART:
        _refuse((*where, "type"), f"{kind[:100]!r} is not supported: this server reads text parts only")
    text = part.get(_TEXT_OF_PART[kind])
    if not isinstance(text, str):
        _refuse((*where, _TEXT_OF_PART[kind]), "must be a string")
    return text


def _string(item: Item, name: str, where: FieldPath) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        _refuse((*where, name), "must be a string")
    return value


def _refuse(where: str | FieldPath, message: str) -> NoReturn:
    refuse_field(where, message, code="invalid_value")
