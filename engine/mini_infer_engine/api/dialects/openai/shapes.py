"""Renders the parts that OpenAI's answers share, as bytes: heads, chunks of a stream, usage. Knows no chats, no
completions.

Chunks are put together from parts that are encoded once a request: a stream costs one small encoding a chunk.
"""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec

from mini_infer_engine import __version__
from mini_infer_engine.api.dialects.base import GenerationSpec
from mini_infer_engine.api.dialects.openai.logprobs import TokenNames
from mini_infer_engine.core.request import CachedTokens
from mini_infer_engine.text.detokenizer import Decoder
from mini_infer_engine.text.output_text import Delta, EndReason, OutputText
from mini_infer_web.api_errors import ApiError

DONE = b"data: [DONE]\n\n"
SYSTEM_FINGERPRINT = f"mini-infer-{__version__}"

encode_json = msgspec.json.Encoder().encode


class OpenAIRenderer(ABC):
    """A `Renderer`; a dialect defines the content of a choice and of a chunk."""

    id_prefix: str
    object_name: str
    chunk_object_name: str

    def __init__(self, spec: GenerationSpec, request_id: str, model: str, decoder: Decoder | None) -> None:
        self._spec = spec
        self._decoder = decoder
        self._names = TokenNames(decoder, as_ids=spec.tokens_as_ids)
        self._returns_logprobs = spec.sampling.get("logprobs") is not None and not spec.hides_logprobs
        self._head: dict[str, Any] = {
            "id": self.id_prefix + request_id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
        }
        if spec.service_tier is not None:
            self._head["service_tier"] = spec.service_tier
        self._chunk_head = b"data: " + encode_json(self._head | {"object": self.chunk_object_name})[:-1]
        self._chunk_tail = b',"usage":null}\n\n' if spec.include_usage else b"}\n\n"

        self.extra: dict[str, Any] = {}
        """Fields of a whole answer beside its choices."""
        self.once = b""
        """Fields of the next event beside its choice, which no other event has."""
        self.once_in_choice: dict[int, bytes] = {}
        """Fields in the next event's choice, by the choice's index, which no other event has."""
        self._usage: dict[str, Any] = {}
        """Usage so far, for events that have it."""

    def usage(self, replies: Sequence[OutputText]) -> dict[str, Any]:
        """Returns the tokens of the request."""
        return usage(replies)

    def end_reason(self, reason: EndReason | None) -> str | None:
        """Returns the finish reason of a choice as clients see it."""
        return reason

    @abstractmethod
    def message(self, reply: OutputText) -> dict[str, Any]:
        """Returns the fields of a whole answer's choice beside the reasons of its end."""

    @abstractmethod
    def whole_logprobs(self, reply: OutputText) -> dict[str, Any]:
        """Returns the log probabilities of all tokens of a choice."""

    @abstractmethod
    def delta_logprobs(self, delta: Delta) -> dict[str, Any]:
        """Returns the log probabilities of a delta's tokens."""

    @abstractmethod
    def text_delta(self, text: str) -> bytes:
        """Returns the fields of a chunk's choice that carry its text, as the inside of a JSON object."""

    def whole(self, replies: Sequence[OutputText]) -> bytes:
        """Renders the answer: choices, usage, timings if requested, and `extra`."""
        choices = [self._choice(index, reply) for index, reply in enumerate(replies)]
        head = self._head | {"object": self.object_name}
        more = {"metrics": timings_of(replies[0])} if self._returns_timings else {}
        if (params := replies[0].kv_transfer_params) is not None:
            more["kv_transfer_params"] = params
        return encode_json(head | {"choices": choices, "usage": self.usage(replies)} | more | self.extra)

    @property
    def _returns_timings(self) -> bool:
        """True if the answer has timings: those of several choices at once would mean nothing."""
        return self._spec.returns_timings and self._spec.num_prompts * self._spec.copies == 1

    def _choice(self, index: int, reply: OutputText) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": self.end_reason(reply.finish_reason)}
        choice["logprobs"] = self.whole_logprobs(reply) if self._returns_logprobs else None
        choice |= {"stop_reason": reply.stop_reason, "token_ids": None} | self.message(reply)
        if self._spec.return_token_ids:
            choice["token_ids"] = reply.token_ids
        return choice

    def begin(self, replies: Sequence[OutputText]) -> bytes:
        """Resets the usage; there are no events before the first delta."""
        self._usage = self.usage(replies)
        # Counted as events go out: replies may be ahead of them.
        self._usage["completion_tokens"] = len(self._spec.resume_token_ids)
        self._usage.pop("completion_tokens_details", None)  # told at the end, when it is certain
        return b""

    def render(self, deltas: Sequence[Delta]) -> bytes:
        """Renders an event for each delta."""
        return b"".join([self.event(delta) for delta in deltas])

    def event(self, delta: Delta) -> bytes:
        """Renders one delta; the last one of a choice has its finish reason."""
        return self.chunk(delta, self.text_delta(delta.text))

    def chunk(self, delta: Delta, body: bytes, logprobs: bytes = b"null") -> bytes:
        """Renders one event with one choice."""
        end = b"null"
        if self._returns_logprobs and delta.logprobs:
            logprobs = encode_json(self.delta_logprobs(delta))
        if delta.finish_reason is not None:
            end = (
                encode_json(self.end_reason(delta.finish_reason)) + b',"stop_reason":' + encode_json(delta.stop_reason)
            )
        if self._spec.return_token_ids:
            end += b',"token_ids":' + encode_json(delta.token_ids)
        if self.once_in_choice:
            end += self.once_in_choice.pop(delta.index, b"")
        beside, self.once = self.once, b""
        event = b'%b,"choices":[{"index":%d,%b,"logprobs":%b,"finish_reason":%b}]%b%b' % (
            self._chunk_head,
            delta.index,
            body,
            logprobs,
            end,
            beside,
            self._usage_so_far(delta) if self._spec.continuous_usage else self._chunk_tail,
        )
        return obfuscated(event) if self._spec.obfuscates else event

    def _usage_so_far(self, delta: Delta) -> bytes:
        self._usage["completion_tokens"] += len(delta.token_ids)
        self._usage["total_tokens"] = self._usage["prompt_tokens"] + self._usage["completion_tokens"]
        return b',"usage":' + encode_json(self._usage) + b"}\n\n"

    def end(self, replies: Sequence[OutputText]) -> bytes:
        """Renders the usage, if requested, and [DONE]."""
        if not self._spec.include_usage:
            return DONE
        timings = b',"metrics":' + encode_json(timings_of(replies[0])) if self._returns_timings else b""
        usage = encode_json(self.usage(replies))
        return b'%b,"choices":[],"usage":%b%b}\n\n' % (self._chunk_head, usage, timings) + DONE

    def broken(self, error: ApiError) -> bytes:
        """Renders an error as an event; no [DONE] follows."""
        return b"data: " + encode_json(error.body()) + b"\n\n"


_PADDED_TO = 64
"""Divisor of the lengths of padded events, in bytes."""


def obfuscated(event: bytes) -> bytes:
    """Adds random characters to an event, as OpenAI does, so that its length reveals little of its text."""
    begin, end = event[: -len(b"}\n\n")], b"}\n\n"
    return begin + obfuscation(len(begin) + len(end)) + end


def obfuscation(size_bytes: int) -> bytes:
    """Returns the field that makes the length of an event of so many bytes a multiple of `_PADDED_TO`."""
    name, end = b',"obfuscation":"', b'"'
    missing = -(size_bytes + len(name) + len(end)) % _PADDED_TO
    return name + secrets.token_urlsafe(_PADDED_TO)[:missing].encode() + end


def timings_of(reply: OutputText) -> dict[str, float | None]:
    """Returns the timings of one choice under vLLM's names; those that are not known yet, or not measured, are null."""
    first_s, last_s, tokens = reply.first_token_s, reply.last_token_s, len(reply.token_ids)
    queue_s = reply.queue_time_s
    if first_s is None or last_s is None or queue_s is None:
        return dict.fromkeys(_TIMINGS)
    computing_s, decoding_s = last_s - queue_s, last_s - first_s
    values = (
        max(0.0, first_s - queue_s) * 1000,
        decoding_s * 1000,
        queue_s * 1000,
        decoding_s / (tokens - 1) * 1000 if tokens > 1 else None,
        tokens / computing_s if computing_s > 0 else None,
    )
    return dict(zip(_TIMINGS, values, strict=True))


_TIMINGS = ("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second")


def usage(replies: Sequence[OutputText]) -> dict[str, Any]:
    """Returns the tokens of a request; the choices of one prompt share its list of token ids, which counts once."""
    prompts = {id(reply.request.prompt_token_ids): reply for reply in reversed(replies)}.values()
    prompt_tokens = sum(len(reply.request.prompt_token_ids) for reply in prompts)
    completion_tokens = sum(len(reply.token_ids) for reply in replies)
    found: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(
                # Resumed output may be found in the cache as well; it is no part of the prompt.
                min(reply.num_cached_tokens, len(reply.request.prompt_token_ids))
                for reply in prompts
            )
        },
    }
    found["prompt_tokens_details"] |= cached_tokens_details(list(prompts))
    if parsed := [reply.parsed for reply in replies if reply.parsed is not None]:
        found["completion_tokens_details"] = {"reasoning_tokens": sum(output.reasoning_tokens for output in parsed)}
    return found


def cached_tokens_details(replies: Sequence[OutputText]) -> dict[str, dict[str, int]]:
    """Returns the field `cached_tokens_details` of different prompts: their cached tokens by medium. It is empty if the
    prefix cache has no lower tiers.
    """
    if not (cached := [reply.cached_tokens for reply in replies if reply.cached_tokens is not None]):
        return {}
    media = CachedTokens.__struct_fields__
    return {"cached_tokens_details": {medium: sum(getattr(one, medium) for one in cached) for medium in media}}
