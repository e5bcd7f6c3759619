"""Parts of an output as OpenAI's chat shapes: the assistant's message, and the deltas of a stream.

Reasoning stands in `reasoning`, vLLM's name, and in `reasoning_content`, which DeepSeek's API and older clients read.
"""

from typing import Any

from mini_infer_engine.api.dialects.openai.shapes import encode_json
from mini_infer_engine.parsing.base import Content, Part, Reasoning, ToolCall, ToolCallBegin
from mini_infer_engine.text.output_text import OutputText


def chat_message(reply: OutputText, *, include_reasoning: bool) -> dict[str, Any]:
    """Returns the whole message. `content` is null if there are only calls or reasoning."""
    parsed = reply.parsed
    if parsed is None:
        return {"role": "assistant", "content": reply.text, "refusal": None}
    reasoning, content = parsed.reasoning, parsed.content
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if not content and (parsed.tool_calls or reasoning):
        message["content"] = None
    if reasoning and include_reasoning:
        message["reasoning"] = message["reasoning_content"] = reasoning
    if parsed.tool_calls:
        message["tool_calls"] = [_call(call) for call in parsed.tool_calls]
    return message


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def chat_delta(parts: list[Part], *, include_reasoning: bool) -> bytes:
    """Returns `"delta":{...}` of a chunk; empty if there is nothing to send."""
    if len(parts) == 1 and isinstance(parts[0], Content):  # most of them
        return b'"delta":{"content":' + encode_json(parts[0].text) + b"}"
    delta = _joined(parts, include_reasoning)
    return b'"delta":' + encode_json(delta) if delta else b""


def _joined(parts: list[Part], include_reasoning: bool) -> dict[str, Any]:
    """Joins the parts of one step into one delta; in it, each call has one entry."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if isinstance(part, Content):
            delta["content"] = delta.get("content", "") + part.text
        elif isinstance(part, Reasoning):
            if include_reasoning:
                delta["reasoning"] = delta["reasoning_content"] = delta.get("reasoning", "") + part.text
        elif isinstance(part, ToolCallBegin):
            function = {"name": part.name, "arguments": ""}
            calls[part.index] = {"index": part.index, "id": part.id, "type": "function", "function": function}
        else:
            call = calls.setdefault(part.index, {"index": part.index, "function": {"arguments": ""}})
            call["function"]["arguments"] += part.text
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta
