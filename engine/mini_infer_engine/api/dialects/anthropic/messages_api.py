"""Anthropic's /v1/messages: a chat in other words (mini_infer_apis.dialects.anthropic), and the form of its answer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mini_infer_apis.dialects.anthropic import chat_of, client_paths
from mini_infer_apis.dialects.anthropic_errors import ANTHROPIC_ERRORS
from mini_infer_apis.dialects.anthropic_request import MessagesRequest, parse_request
from mini_infer_contract.blocks import BLOCK_SIZE_TOKENS
from mini_infer_engine.api.dialects.anthropic.blocks import text_blocks, thinking_blocks, tool_use_block
from mini_infer_engine.api.dialects.anthropic.events import PING, BlockEvents, event, ids_event
from mini_infer_engine.api.dialects.base import GenerationSpec, OutputLimit
from mini_infer_engine.api.dialects.openai.chat import ChatDialect
from mini_infer_engine.api.dialects.openai.shapes import cached_tokens_details, encode_json
from mini_infer_engine.text.detokenizer import Decoder
from mini_infer_engine.text.output_text import Delta, OutputText
from mini_infer_web.api_errors import ApiError
from mini_infer_web.body_fields import UnknownFields


class MessagesDialect:
    """The `Dialect` of one request to /v1/messages."""

    _request: MessagesRequest

    def parse(self, body: dict[str, Any], unknown: UnknownFields | None = None) -> GenerationSpec:
        """Parses the body as the chat that it is equivalent to; errors name the client's fields."""
        self._request = parse_request(body, MessagesRequest, unknown)
        chat = chat_of(self._request)
        rename = client_paths(self._request, chat)
        try:
            spec = ChatDialect().parse(chat)
        except ApiError as error:
            raise error.renamed(rename) from None
        # Where prompt and max_tokens are more than the context, the answer ends with the context, and says so.
        limit = OutputLimit("max_tokens", self._request.max_tokens or 1, False)
        return replace(spec, output_limit=limit, in_clients_words=lambda error: error.renamed(rename))

    def renderer(
        self, spec: GenerationSpec, request_id: str, model: str, decoder: Decoder | None
    ) -> "MessagesRenderer":
        """Returns the renderer of a message."""
        return MessagesRenderer(self._request, request_id, model)


class MessagesRenderer:
    """A `Renderer` of a message, whole or in events."""

    def __init__(self, request: MessagesRequest, request_id: str, model: str) -> None:
        self._request_id = request_id
        self._max_tokens = request.max_tokens
        self._head = {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": model}
        self._omits_thinking = request.thinking is not None and request.thinking.display == "omitted"
        self._blocks = BlockEvents(omits_thinking=self._omits_thinking)
        self._is_parsed = False
        self._returns_ids = bool(request.return_token_ids)

    def whole(self, replies: Sequence[OutputText]) -> bytes:
        """Renders the message with its content and usage."""
        reply = replies[0]
        message = self._head | {"content": self._content(reply)} | self._end(reply) | _NOT_HERE
        ids: dict[str, Any] = {}
        if self._returns_ids:
            ids = {"prompt_token_ids": reply.request.prompt_token_ids, "token_ids": reply.token_ids}
        return encode_json(message | {"usage": _settled(self._usage(reply))} | ids)

    def _content(self, reply: OutputText) -> list[dict[str, Any]]:
        if not self._max_tokens:
            return []
        parsed = reply.parsed
        if parsed is None:
            return text_blocks(reply.text)
        thinking = thinking_blocks(parsed.reasoning, omitted=self._omits_thinking)
        return [*thinking, *text_blocks(parsed.content), *map(tool_use_block, parsed.tool_calls)]

    def begin(self, replies: Sequence[OutputText]) -> bytes:
        """Renders `message_start`; nothing for a resumed stream, whose client has it."""
        self._is_parsed = replies[0].parsed is not None
        if replies[0].resumed is not None:
            self._event(replies[0].resumed)  # Told by another engine: here, only which block is open.
            return b""
        nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "stop_details": None}
        usage = _settled(_prompt_usage(replies[0]) | {"output_tokens": 0})
        return event({"type": "message_start", "message": self._head | nothing | _NOT_HERE | {"usage": usage}}) + PING

    def render(self, deltas: Sequence[Delta]) -> bytes:
        """Renders deltas as events of content blocks."""
        if not self._max_tokens:
            return b""
        events = b"".join([self._event(delta) for delta in deltas])
        if not self._returns_ids:
            return events
        return events + ids_event([token_id for delta in deltas for token_id in delta.token_ids])

    def _event(self, delta: Delta) -> bytes:
        if not self._is_parsed:
            return self._blocks.text(delta.text)
        return b"".join([self._blocks.part(part) for part in delta.parts])

    def end(self, replies: Sequence[OutputText]) -> bytes:
        """Renders the end of the open block, then `message_delta` and `message_stop`."""
        reply = replies[0]
        last = {"type": "message_delta", "delta": self._end(reply), "usage": self._usage(reply)}
        return self._blocks.close() + event(last) + event({"type": "message_stop"})

    def broken(self, error: ApiError) -> bytes:
        """Renders an error as Anthropic's event."""
        return ANTHROPIC_ERRORS.event(error, self._request_id)

    def _end(self, reply: OutputText) -> dict[str, Any]:
        sequence = reply.stop_reason if isinstance(reply.stop_reason, str) else None
        reason = self._stop_reason(reply, sequence)
        return {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None}

    def _stop_reason(self, reply: OutputText, stop_sequence: str | None) -> str:
        if not self._max_tokens:
            return "max_tokens"
        if reply.finish_reason == "length":
            is_limit = len(reply.token_ids) >= self._max_tokens
            return "max_tokens" if is_limit else "model_context_window_exceeded"
        if stop_sequence is not None:
            return "stop_sequence"
        return "tool_use" if reply.finish_reason == "tool_calls" else "end_turn"

    def _usage(self, reply: OutputText) -> dict[str, Any]:
        usage = _prompt_usage(reply) | {"output_tokens": len(reply.token_ids) if self._max_tokens else 0}
        usage |= cached_tokens_details([reply])
        if reply.parsed is not None:
            usage["output_tokens_details"] = {"thinking_tokens": reply.parsed.reasoning_tokens}
        return usage


_NOT_HERE: dict[str, Any] = {"container": None}
"""Fields of a message that clients expect, and that are never set here."""


def _prompt_usage(reply: OutputText) -> dict[str, Any]:
    return message_usage(len(reply.request.prompt_token_ids), reply.num_cached_tokens)


def _settled(usage: dict[str, Any]) -> dict[str, Any]:
    """Adds the fields of a message's usage that are known before its end, and are not repeated there."""
    lifetimes = {"ephemeral_5m_input_tokens": usage["cache_creation_input_tokens"], "ephemeral_1h_input_tokens": 0}
    return usage | {"cache_creation": lifetimes, "server_tool_use": None, "service_tier": "standard"}


def message_usage(prompt_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """Returns a prompt's tokens as Anthropic counts them: read from the cache, put into it, and neither; together all
    of them.

    All whole blocks of a prompt go into the cache, whatever `cache_control` says.
    """
    read = min(cached_tokens, prompt_tokens)
    created = max(0, prompt_tokens // BLOCK_SIZE_TOKENS * BLOCK_SIZE_TOKENS - read)
    return {
        "input_tokens": prompt_tokens - read - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": read,
    }
