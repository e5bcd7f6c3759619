"""Emits the content blocks of a message in Anthropic's stream: the events that open, fill and end each.

Pure: pieces of text in, bytes out. Knows no request and no tokens.
"""

from typing import Any

import msgspec

from mini_infer_engine.api.dialects.anthropic.blocks import signature, tool_use_id
from mini_infer_engine.parsing.base import Content, Part, Reasoning, ToolCallBegin

_encode = msgspec.json.Encoder().encode

PING = b'event: ping\ndata: {"type":"ping"}\n\n'


def ids_event(token_ids: list[int]) -> bytes:
    """Returns an event with the token ids of the events before it since the last of its kind. Clients ignore pings."""
    return event({"type": "ping", "token_ids": token_ids})


def event(content: dict[str, Any]) -> bytes:
    """Returns one server-sent event, named by its type."""
    return b"event: %b\ndata: %b\n\n" % (content["type"].encode(), _encode(content))


class BlockEvents:
    """The block events of one message. Calls come one after the other: the open one is the one whose arguments come."""

    def __init__(self, *, omits_thinking: bool) -> None:
        """If `omits_thinking`, a block of thinking is sent without its text."""
        self._omits_thinking = omits_thinking
        self._open: str | None = None
        """Type of the block that is open."""
        self._index = -1
        self._thinking: list[str] = []

    def part(self, part: Part) -> bytes:
        """Returns the events of a part of any kind."""
        if isinstance(part, Content):
            return self.text(part.text)
        if isinstance(part, Reasoning):
            return self.thinking(part.text)
        return self.tool_use(part.id, part.name) if isinstance(part, ToolCallBegin) else self.tool_input(part.text)

    def text(self, piece: str) -> bytes:
        """Returns the events of a piece of the answer."""
        if not piece:
            return b""
        return self._in_block("text", {"text": ""}) + self._delta({"type": "text_delta", "text": piece})

    def thinking(self, piece: str) -> bytes:
        """Returns the events of a piece of thinking."""
        begun = self._in_block("thinking", {"thinking": "", "signature": ""})
        self._thinking.append(piece)
        return begun if self._omits_thinking else begun + self._delta({"type": "thinking_delta", "thinking": piece})

    def tool_use(self, call_id: str, name: str) -> bytes:
        """Returns the events that begin a call."""
        return self.close() + self._in_block("tool_use", {"id": tool_use_id(call_id), "name": name, "input": {}})

    def tool_input(self, piece: str) -> bytes:
        """Returns the event of a piece of the open call's input."""
        return self._delta({"type": "input_json_delta", "partial_json": piece})

    def close(self) -> bytes:
        """Returns the events that end the open block; none if no block is open."""
        if self._open is None:
            return b""
        signed = b""
        if self._open == "thinking":
            signed = self._delta({"type": "signature_delta", "signature": signature("".join(self._thinking))})
            self._thinking.clear()
        self._open = None
        return signed + event({"type": "content_block_stop", "index": self._index})

    def _in_block(self, kind: str, beginning: dict[str, Any]) -> bytes:
        """Returns the events that are needed for a block of this type to be open."""
        if self._open == kind:
            return b""
        closed = self.close()
        self._open = kind
        self._index += 1
        block = {"type": kind} | beginning
        return closed + event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return event({"type": "content_block_delta", "index": self._index, "delta": delta})
