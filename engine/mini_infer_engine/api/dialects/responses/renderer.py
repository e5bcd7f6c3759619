"""Renders one response, whole or as events. Knows no fields that are not in the answer, and no chat."""

import time
from collections.abc import Sequence
from typing import Any

from mini_infer_apis.dialects.response_object import new_response, with_error
from mini_infer_apis.dialects.response_tools import custom_names, namespaced_names
from mini_infer_apis.dialects.responses_request import Reasoning as ReasoningOptions
from mini_infer_apis.dialects.responses_request import ResponsesConversation
from mini_infer_apis.stored_responses.request import KeptRequest
from mini_infer_engine.api.dialects.base import GenerationSpec
from mini_infer_engine.api.dialects.openai.logprobs import TokenNames, chat_logprobs
from mini_infer_engine.api.dialects.openai.shapes import cached_tokens_details, encode_json
from mini_infer_engine.api.dialects.responses.items import EventWriter, Logprobs, ids_event
from mini_infer_engine.api.dialects.responses.output import ResponseOutput, parts_of
from mini_infer_engine.core.request import TokenLogprobs
from mini_infer_engine.parsing.base import Content, Part, Reasoning
from mini_infer_engine.text.detokenizer import Decoder
from mini_infer_engine.text.output_text import Delta, OutputText
from mini_infer_web.api_errors import ApiError


class ResponsesRenderer:
    """A `Renderer` of one response, whole or as events."""

    def __init__(
        self,
        spec: GenerationSpec,
        body: dict[str, Any],
        conversation: ResponsesConversation,
        kept: KeptRequest,
        model: str,
        decoder: Decoder | None,
    ) -> None:
        self._spec, self._body, self._decoder = spec, body, decoder
        self._names = TokenNames(decoder, as_ids=False)
        self._response = new_response(body, kept.id, model, kept.created_at or int(time.time()), "in_progress")
        if spec.service_tier is not None:
            self._response["service_tier"] = spec.service_tier
        options = body.get("stream_options") or {}
        self._events = EventWriter(kept.id, obfuscates=bool(options.get("include_obfuscation")))
        self._has_begun = False
        reasoning = conversation.reasoning or ReasoningOptions()
        self._output = ResponseOutput(
            self._events,
            custom_tools=custom_names(conversation.tools or ()),
            namespaces=namespaced_names(conversation.tools or ()),
            summary=bool(reasoning.summary or reasoning.generate_summary),
            sealed="reasoning.encrypted_content" in (conversation.include or ()),
        )

    def whole(self, replies: Sequence[OutputText]) -> bytes:
        """Renders the complete response object."""
        reply = replies[0]
        if reply.parsed is None:
            self._output.push([Content(reply.text)], self._logprobs(reply.logprobs))
        else:
            # Log probabilities are of the text: what the model thought comes before it.
            logprobs = reply.logprobs[reply.parsed.reasoning_tokens :]
            self._output.push(self._visible(parts_of(reply.parsed)), self._logprobs(logprobs))
        self._finish(reply)
        if self._body.get("enable_response_messages"):
            self._response |= self._raw_messages(reply)
        if self._spec.return_token_ids:
            self._response |= {"prompt_token_ids": reply.request.prompt_token_ids, "token_ids": reply.token_ids}
        return encode_json(self._response)

    def begin(self, replies: Sequence[OutputText]) -> bytes:
        """Renders `response.created` and `response.in_progress`; nothing for a resumed stream, whose
        client has them.
        """
        self._take_sampling(replies[0])
        if replies[0].resumed is not None:  # Told by another engine: here, only which item is open.
            self._output.push(self._visible(replies[0].resumed.parts), [])
            self._events.restart()
            self._has_begun = True
            return b""
        return self._begin()

    def _begin(self) -> bytes:
        self._has_begun = True
        created = self._events.write("response.created", response=self._response)
        return created + self._events.write("response.in_progress", response=self._response)

    def render(self, deltas: Sequence[Delta]) -> bytes:
        """Renders deltas as events of items."""
        events = b"".join([self._render(delta) for delta in deltas])
        if not self._spec.return_token_ids:
            return events
        return events + ids_event([token_id for delta in deltas for token_id in delta.token_ids])

    def _render(self, delta: Delta) -> bytes:
        # Without a decoder there is no parser, and no text either.
        return self._output.push(self._visible(delta.parts), self._logprobs(delta.logprobs))

    def _visible(self, parts: list[Part]) -> list[Part]:
        if self._spec.include_reasoning:
            return parts
        return [part for part in parts if not isinstance(part, Reasoning)]

    def end(self, replies: Sequence[OutputText]) -> bytes:
        """Renders the end of the open item and of the response. Such a stream has no [DONE]."""
        events = self._finish(replies[0])
        return events + self._events.write(f"response.{self._response['status']}", response=self._response)

    def broken(self, error: ApiError) -> bytes:
        """Renders the end of the open item, an error and `response.failed`."""
        events = self._output.end("incomplete") if self._has_begun else self._begin()
        failed = with_error(self._response | {"output": self._output.items}, error.status, error.code, error.message)
        fields = {"code": error.code, "message": error.message, "param": error.param}
        return events + self._events.write("error", **fields) + self._events.write("response.failed", response=failed)

    def _finish(self, reply: OutputText) -> bytes:
        """Returns the events that end the output; the response is complete then."""
        self._take_sampling(reply)
        status = "incomplete" if reply.finish_reason == "length" else "completed"
        events = self._output.end(status)
        self._response |= {"status": status, "output": self._output.items, "usage": _usage(reply)}
        if status == "incomplete":
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self._response["completed_at"] = int(time.time())
        return events

    def _take_sampling(self, reply: OutputText) -> None:
        """Sets the sampling parameters in force, which may be the model's own, in the response."""
        sampling = reply.request.sampling
        self._response |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
        self._response |= {
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
        }

    def _logprobs(self, positions: Sequence[TokenLogprobs]) -> Logprobs:
        content: Logprobs = chat_logprobs(positions, self._names)["content"] if positions else []
        return content

    def _raw_messages(self, reply: OutputText) -> dict[str, Any]:
        """Returns vLLM's `input_messages` and `output_messages`."""
        return {
            "input_messages": [self._raw(reply.request.prompt_token_ids)],
            "output_messages": [self._raw(reply.token_ids)],
        }

    def _raw(self, token_ids: Sequence[int]) -> dict[str, Any]:
        text = "" if self._decoder is None else self._decoder.decode(list(token_ids), skip_special_tokens=False)
        return {"type": "raw_message_tokens", "message": text, "tokens": list(token_ids)}


def _usage(reply: OutputText) -> dict[str, Any]:
    """Returns the tokens of a response."""
    input_tokens, output_tokens = len(reply.request.prompt_token_ids), len(reply.token_ids)
    reasoning_tokens = reply.parsed.reasoning_tokens if reply.parsed is not None else 0
    cached = {"cached_tokens": min(reply.num_cached_tokens, input_tokens), "cache_write_tokens": 0}
    return {
        "input_tokens": input_tokens,
        "input_tokens_details": cached | cached_tokens_details([reply]),
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": input_tokens + output_tokens,
    }
