"""Builds the content blocks of a whole message: text, thinking and calls of tools. Knows no request and no stream."""

import hashlib
from typing import Any

import msgspec

from mini_infer_apis.dialects.anthropic_request import INVALID_JSON
from mini_infer_engine.parsing.base import ToolCall


def text_blocks(text: str) -> list[dict[str, Any]]:
    """Returns one block, or none if there is no text."""
    return [{"type": "text", "text": text}] if text else []


def thinking_blocks(thinking: str, *, omitted: bool) -> list[dict[str, Any]]:
    """Returns one block, or none if there was no thinking. If `omitted`, the block is there without its text."""
    if not thinking:
        return []
    return [{"type": "thinking", "thinking": "" if omitted else thinking, "signature": signature(thinking)}]


def signature(thinking: str) -> str:
    """Returns a value for the field where Anthropic signs thinking: clients expect it, and nobody checks it."""
    return hashlib.sha256(thinking.encode("utf-8", "replace")).hexdigest()


def tool_use_block(call: ToolCall) -> dict[str, Any]:
    """Returns the block of a call of a tool."""
    return {"type": "tool_use", "id": tool_use_id(call.id), "name": call.name, "input": _input(call.arguments)}


def tool_use_id(call_id: str) -> str:
    """Returns the id of a call as Anthropic's clients know it: "toolu_" where OpenAI's have "call_"."""
    return f"toolu_{call_id.removeprefix('call_')}"


def _input(arguments: str) -> dict[str, Any]:
    """Returns the arguments as an object; arguments that an answer's limit has cut are no JSON, and are wrapped."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return {INVALID_JSON: arguments}
    return value if isinstance(value, dict) else {INVALID_JSON: arguments}
