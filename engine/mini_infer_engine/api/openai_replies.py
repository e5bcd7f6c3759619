"""The shapes of OpenAI's answers, as bytes. Knows what a choice is, not where its text comes from.

Chunks are put together from parts that are encoded once a request: a stream costs one small encoding a chunk.
"""

import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from mini_infer_engine import __version__
from mini_infer_engine.text.output_text import OutputText, TextDelta

Kind = Literal["chat", "completion"]

DONE = b"data: [DONE]\n\n"
SYSTEM_FINGERPRINT = f"mini-infer-{__version__}"

encode_json = msgspec.json.Encoder().encode


class ReplyShape:
    """How one request is answered: its id, model name and kind do not change."""

    def __init__(
        self, kind: Kind, reply_id: str, model: str, *, include_usage: bool = False, return_token_ids: bool = False
    ) -> None:
        self.kind = kind
        self._head: dict[str, Any] = {"id": reply_id, "created": int(time.time()), "model": model}
        self._head["system_fingerprint"] = SYSTEM_FINGERPRINT
        self._return_token_ids = return_token_ids
        chunk = self._head | {"object": "chat.completion.chunk" if kind == "chat" else "text_completion"}
        self._chunk_head = b"data: " + encode_json(chunk)[:-1]
        self._chunk_tail = b',"usage":null}\n\n' if include_usage else b"}\n\n"

    def whole(self, replies: Sequence[OutputText]) -> bytes:
        """The answer to a request that does not stream."""
        name = "chat.completion" if self.kind == "chat" else "text_completion"
        choices = [self._choice(index, reply) for index, reply in enumerate(replies)]
        return encode_json(self._head | {"object": name, "choices": choices, "usage": usage(replies)})

    def _choice(self, index: int, reply: OutputText) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": reply.finish_reason}
        if self.kind == "chat":
            choice["message"] = {"role": "assistant", "content": reply.text, "refusal": None}
        else:
            choice["text"] = reply.text
        if self._return_token_ids:
            choice["prompt_token_ids"] = reply.request.prompt_token_ids
            choice["token_ids"] = reply.token_ids
        return choice

    def first_chunk(self, index: int) -> bytes:
        """A chat's choice begins with its role; a completion's begins with text."""
        if self.kind == "completion":
            return b""
        delta = b'"delta":{"role":"assistant","content":"","refusal":null}'
        return self._chunk(index, delta, b"null", ())

    def chunk(self, index: int, piece: TextDelta) -> bytes:
        """A piece of a choice's text."""
        text = encode_json(piece.text)
        body = b'"delta":{"content":' + text + b"}" if self.kind == "chat" else b'"text":' + text
        return self._chunk(index, body, b"null", piece.token_ids)

    def last_chunk(self, index: int, reply: OutputText, piece: TextDelta) -> bytes:
        """The end of a choice; a completion's carries the last text, a chat's is apart from it."""
        reason = encode_json(reply.finish_reason)
        if self.kind == "completion":
            return self._chunk(index, b'"text":' + encode_json(piece.text), reason, piece.token_ids)
        text = self.chunk(index, piece) if piece.text else b""
        return text + self._chunk(index, b'"delta":{}', reason, () if piece.text else piece.token_ids)

    def _chunk(self, index: int, body: bytes, finish_reason: bytes, token_ids: Sequence[int]) -> bytes:
        tokens = b',"token_ids":' + encode_json(token_ids) if self._return_token_ids else b""
        return b'%b,"choices":[{"index":%d,%b,"logprobs":null,"finish_reason":%b%b}]%b' % (
            self._chunk_head,
            index,
            body,
            finish_reason,
            tokens,
            self._chunk_tail,
        )

    def usage_chunk(self, replies: Sequence[OutputText]) -> bytes:
        """The last chunk of a stream with `include_usage`."""
        return b'%b,"choices":[],"usage":%b}\n\n' % (self._chunk_head, encode_json(usage(replies)))


def usage(replies: Sequence[OutputText]) -> dict[str, Any]:
    """Tokens of a request; the choices of one prompt share its list of token ids, which counts once."""
    prompts = {id(reply.request.prompt_token_ids): reply for reply in reversed(replies)}.values()
    prompt_tokens = sum(len(reply.request.prompt_token_ids) for reply in prompts)
    completion_tokens = sum(len(reply.token_ids) for reply in replies)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(reply.num_cached_tokens for reply in prompts)},
    }


def error_event(body: dict[str, Any]) -> bytes:
    """The end of a stream that cannot go on; no [DONE] follows."""
    return b"data: " + encode_json(body) + b"\n\n"
