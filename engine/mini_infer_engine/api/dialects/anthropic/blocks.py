"""The content blocks of a whole message, and what stands in them beside text. Knows no request and no stream."""

import hashlib
from typing import Any

import msgspec

from mini_infer_apis.dialects.anthropic_request import INVALID_JSON
from mini_infer_engine.parsing.base import ToolCall


def text_blocks(text: str) -> list[dict[str, Any]]:
    """One block, or none where there is no text."""
    return [{"type": "text", "text": text}] if text else []


def thinking_blocks(thinking: str, *, omitted: bool) -> list[dict[str, Any]]:
    """One block, or none where there was no thinking. `omitted`: that there was some is told, and not what it was."""
    if not thinking:
        return []
    return [{"type": "thinking", "thinking": "" if omitted else thinking, "signature": signature(thinking)}]


def signature(thinking: str) -> str:
    """What stands where Anthropic signs thinking: clients want it to be there, and nobody checks it."""
    return hashlib.sha256(thinking.encode("utf-8", "replace")).hexdigest()


def tool_use_block(call: ToolCall) -> dict[str, Any]:
    """A call of a tool."""
    return {"type": "tool_use", "id": tool_use_id(call.id), "name": call.name, "input": _input(call.arguments)}


def tool_use_id(call_id: str) -> str:
    """The id of a call as Anthropic's clients know it: "toolu_" where OpenAI's have "call_"."""
    return f"toolu_{call_id.removeprefix('call_')}"


def _input(arguments: str) -> dict[str, Any]:
    """Arguments that an answer's limit has cut are no JSON."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return {INVALID_JSON: arguments}
    return value if isinstance(value, dict) else {INVALID_JSON: arguments}
