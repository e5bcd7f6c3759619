"""Checks a chat's messages by OpenAI's rules, whatever the template would do with them. mini_infer_prompts checks the
rest.
"""

from collections.abc import Sequence
from typing import Any

from mini_infer_web.api_errors import refuse_field

_ROLES = ("developer", "system", "user", "assistant", "tool")


def check_messages(messages: Sequence[dict[str, Any]]) -> None:
    """Raises ApiError if a role is unknown, or a message has a field that belongs to another role."""
    for index, message in enumerate(messages):
        where, role = ("messages", index), message.get("role")
        if role == "function" or message.get("function_call") is not None:
            refuse_field((*where, "role" if role == "function" else "function_call"), "is not supported: use tools")
        if role not in _ROLES:
            refuse_field((*where, "role"), f"is {_shown(role)}; roles are {', '.join(_ROLES)}")
        if role == "tool" and not isinstance(message.get("tool_call_id"), str):
            refuse_field((*where, "tool_call_id"), "must be the id of the call that this message answers")
        if not isinstance(message.get("tool_call_id"), str | None):
            refuse_field((*where, "tool_call_id"), "must be a string")
        if role != "assistant" and message.get("tool_calls") is not None:
            refuse_field((*where, "tool_calls"), "belongs to messages of the assistant's")


def _shown(role: object) -> str:
    return repr(role)[:40] if isinstance(role, str) else "no string"
