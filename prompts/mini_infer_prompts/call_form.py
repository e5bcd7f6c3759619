"""Finds the form in which a chat template expects earlier tool calls, by rendering a conversation with one.

Templates differ: most expect arguments as an object and print it as JSON, DeepSeek's print a string, and some of these
show a call only where the message's content is null. Knows no conversation of a client's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Render = Callable[[list[dict[str, Any]]], str | None]
"""Returns the text of a conversation, or None if the template refuses it."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form in which a template expects tool calls in a conversation."""

    text_arguments: bool = False
    """True if arguments have to be a string, as OpenAI's API has them; otherwise they are the object that the string
    encodes.
    """
    null_content: bool = False
    """True if a message of calls alone has to have null as its content; otherwise it has an empty string."""
    shows_text: bool = True
    """True if a string in place of an object is shown; otherwise arguments that are no object are wrapped into one."""


def call_form(source: str, render: Render) -> CallForm:
    """Returns the form that the template of this source shows a call in; the default where it shows none."""
    if "tool_calls" not in source:
        return CallForm()
    for null_content in (False, True):
        for text_arguments in (False, True):
            arguments = _TEXT if text_arguments else _OBJECT
            if _shows(render(_conversation(arguments, None if null_content else ""))):
                shown = render(_conversation(_BROKEN, None if null_content else ""))
                return CallForm(text_arguments, null_content, shown is not None and _BROKEN in shown)
    return CallForm()


_OBJECT = {"probe_key": "probe_value"}
_TEXT = '{"probe_key": "probe_value"}'
_BROKEN = "probe of text"


def _shows(text: str | None) -> bool:
    """True if the text has the name and the arguments, and these are neither escaped nor printed as a Python object."""
    if text is None or "probe_name" not in text:
        return False
    return "probe_key" in text and "probe_value" in text and "'probe_key'" not in text and '\\"probe_key' not in text


def _conversation(arguments: object, content: str | None) -> list[dict[str, Any]]:
    call_id = "probe0000"  # nine characters, which Mistral's templates insist on
    function = {"name": "probe_name", "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    return [
        {"role": "user", "content": "probe"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "name": "probe_name", "tool_call_id": call_id, "content": "probe"},
    ]
