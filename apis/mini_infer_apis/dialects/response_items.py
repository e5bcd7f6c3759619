"""Converts items of OpenAI's Responses API to messages of a chat. Knows no other field of a request, and no template.

An assistant's turn is several items (its reasoning, its text, its calls), and one message in a chat. Bad input gets an
ApiError 400 that names the field, such as `input[2].call_id`.
"""

import base64
import json
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from mini_infer_apis.dialects.responses_request import (
    Content,
    CustomToolCallItem,
    FunctionCallItem,
    InputImage,
    InputItem,
    Item,
    MessageItem,
    ReasoningItem,
    RefusalText,
)
from mini_infer_web.api_errors import FieldPath, refuse_field

Message = dict[str, Any]

CUSTOM_INPUT = "input"
"""The one argument of the function as which a custom tool is shown to the model."""
_REASONING_MARK = "mini-infer:"
"""Prefix of an `encrypted_content` of ours: the text in base64. It is no secret, the client may have it in clear."""


def input_items(sent: object) -> list[Item]:
    """Returns a request's `input` as items in JSON: a string is one message of the user. Raises ApiError if it is
    neither.
    """
    if isinstance(sent, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": sent}]}]
    if not isinstance(sent, list):
        _refuse("input", "must be a string or a list of items")
    for index, item in enumerate(sent):
        if not isinstance(item, dict):
            _refuse(("input", index), "must be an object with a type, or with role and content")
    return sent


def chat_messages(input_: str | Sequence[InputItem], instructions: str | None = None) -> list[Message]:
    """Returns the conversation in the form of chat.completions; `instructions` are its first message. Raises ApiError
    if an item does not fit those before it.
    """
    conversation = _Conversation()
    if instructions:
        conversation.add({"role": "system", "content": instructions})
    if isinstance(input_, str):
        conversation.add({"role": "user", "content": [{"type": "text", "text": input_}]})
    else:
        for index, item in enumerate(input_):
            _read(conversation, item, ("input", index))
    if not conversation.messages:
        _refuse("input", "has no message: send at least one")
    return conversation.messages


def image_fields(input_: str | Sequence[InputItem]) -> Iterator[dict[FieldPath, FieldPath]]:
    """Yields the fields of each image as `with_images` takes them, in the order in which `chat_messages` takes them."""
    for index, item in enumerate(() if isinstance(input_, str) else input_):
        field = "content" if isinstance(item, MessageItem) else "output"
        for place, part in enumerate(getattr(item, field, ())):
            if isinstance(part, InputImage):
                yield {(): ("input", index, field, place)}


def is_to_be_continued(input_: str | Sequence[InputItem]) -> bool:
    """True if the last item is an answer that broke off: the model continues it, as vLLM does."""
    last = input_[-1] if input_ else None
    return isinstance(last, MessageItem) and last.role == "assistant" and last.status in ("in_progress", "incomplete")


def sealed_reasoning(text: str) -> str:
    """Returns the `encrypted_content` of a reasoning item, for clients that send back that alone."""
    return _REASONING_MARK + base64.b64encode(text.encode("utf-8", "replace")).decode()


def namespaced(namespace: str, name: str) -> str:
    """Returns the name by which the model sees a function of a namespace."""
    return f"{namespace}__{name}"


class _Conversation:
    """The messages so far, of which the last may be an assistant's that is not complete."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.call_ids: set[str] = set()

    def add(self, message: Message) -> None:
        self.messages.append(message)

    def turn(self, *used: str) -> Message:
        """Returns the assistant's message to continue: the last one if it has none of the `used` fields, else a new
        one.
        """
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(last.get(name) for name in used):
            last = {"role": "assistant", "content": None}
            self.add(last)
        return last


def _read(conversation: _Conversation, item: InputItem, where: FieldPath) -> None:
    """Adds an item to the conversation."""
    if isinstance(item, MessageItem):
        content = _content(item.content, (*where, "content"))
        if item.role == "assistant":
            conversation.turn("content", "tool_calls")["content"] = content
        else:
            conversation.add({"role": item.role, "content": content})
    elif isinstance(item, ReasoningItem):
        if texts := _reasoning_texts(item, where):
            turn = conversation.turn("content", "tool_calls")
            turn["reasoning"] = "\n".join([*filter(None, [turn.get("reasoning")]), *texts])
    elif isinstance(item, FunctionCallItem):
        _add_call(conversation, item, item.arguments)
    elif isinstance(item, CustomToolCallItem):
        _add_call(conversation, item, json.dumps({CUSTOM_INPUT: item.input}))
    else:
        if item.call_id not in conversation.call_ids:
            says = f"is {item.call_id[:100]!r}, and no call before it has that call_id: send the call, too"
            _refuse((*where, "call_id"), says)
        content = _content(item.output, (*where, "output"))
        conversation.add({"role": "tool", "tool_call_id": item.call_id, "content": content})


def _add_call(conversation: _Conversation, item: FunctionCallItem | CustomToolCallItem, arguments: str) -> None:
    name = item.name if item.namespace is None else namespaced(item.namespace, item.name)
    conversation.call_ids.add(item.call_id)
    call = {"id": item.call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    conversation.turn().setdefault("tool_calls", []).append(call)


def _reasoning_texts(item: ReasoningItem, where: FieldPath) -> list[str]:
    """Returns the texts of the reasoning: its text if the item has it, else the sealed text, else the summary."""
    if texts := [part.text for part in item.content or () if part.text]:
        return texts
    sealed = item.encrypted_content
    if sealed is None:
        return [part.text for part in item.summary or () if part.text]
    if not sealed.startswith(_REASONING_MARK):
        _refuse((*where, "encrypted_content"), "is of another server: leave the reasoning item out")
    try:
        return [base64.b64decode(sealed.removeprefix(_REASONING_MARK), validate=True).decode()]
    except ValueError:
        _refuse((*where, "encrypted_content"), "is not what this server has sent: send it back unchanged")


def _content(content: Content, where: FieldPath) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    parts = []
    for index, part in enumerate(content):
        if isinstance(part, InputImage):
            parts.append({"type": "input_image", "image_url": _image_url(part, (*where, index))})
        else:
            parts.append({"type": "text", "text": part.refusal if isinstance(part, RefusalText) else part.text})
    return parts


def _image_url(image: InputImage, where: FieldPath) -> str:
    if image.file_id is not None:
        _refuse((*where, "file_id"), "is not supported, for this server keeps no files: send the image_url")
    if not image.image_url:
        _refuse((*where, "image_url"), "is missing: an input_image needs it, such as data:image/png;base64,...")
    return image.image_url


def _refuse(where: str | FieldPath, message: str) -> NoReturn:
    refuse_field(where, message, code="invalid_value")
