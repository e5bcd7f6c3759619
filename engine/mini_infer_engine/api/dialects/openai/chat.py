"""OpenAI's /v1/chat/completions: its fields, their meaning, and the form of its answer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from mini_infer_apis.dialects.service_tiers import SERVICE_TIER_PRIORITIES
from mini_infer_engine.api.dialects.base import GenerationSpec, OutputLimit
from mini_infer_engine.api.dialects.fields import GenerationFields, common_spec, parse_fields
from mini_infer_engine.api.dialects.messages import check_messages
from mini_infer_engine.api.dialects.neutral import BOTH, CHAT, Neutral
from mini_infer_engine.api.dialects.openai.chat_parts import chat_delta, chat_message
from mini_infer_engine.api.dialects.openai.logprobs import chat_logprobs, prompt_logprobs
from mini_infer_engine.api.dialects.openai.shapes import OpenAIRenderer, encode_json
from mini_infer_engine.api.dialects.openai.tools import Tools, tool_parsing
from mini_infer_engine.parsing.base import OutputParsing
from mini_infer_engine.text.detokenizer import Decoder
from mini_infer_engine.text.output_text import Delta, EndReason, OutputText
from mini_infer_engine.text.tokenizing import ImageFiles, PromptLimits, Sliced, chat_ids
from mini_infer_engine.text.validation import MAX_LOGPROBS
from mini_infer_prompts.image_sources import image_sources
from mini_infer_prompts.prompt import PromptEncoder
from mini_infer_web.api_errors import ApiError
from mini_infer_web.body_fields import UnknownFields

MAX_THINKING_TOKENS = 1_000_000
"""Most tokens of reasoning: more than any context has."""


class ChatRequest(GenerationFields, kw_only=True):
    """POST /v1/chat/completions."""

    neutral: ClassVar[Neutral] = BOTH | CHAT

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=-1, le=MAX_LOGPROBS)] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    echo: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    # Given to the template, which shows the model what it knows of them.
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    # Tokens; -1: no limit, as vLLM has it.
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=MAX_THINKING_TOKENS)] | None = None
    documents: list[dict[str, Any]] | None = None

    @property
    def output_limit(self) -> OutputLimit:
        """The limit of each choice's tokens."""
        if self.max_completion_tokens is not None:
            return OutputLimit("max_completion_tokens", self.max_completion_tokens, True)
        return OutputLimit("max_tokens", self.max_tokens, self.max_tokens is not None)


class ChatDialect:
    """The `Dialect` of /v1/chat/completions."""

    def parse(self, body: dict[str, Any], unknown: UnknownFields | None = None) -> GenerationSpec:
        """Parses the body, whose messages become one prompt."""
        request = parse_fields(body, ChatRequest, unknown)

        def prompt_ids(
            encoder: PromptEncoder | None, limits: PromptLimits | None, images: ImageFiles | None
        ) -> Sliced[list[list[int]]]:
            if encoder is None:
                message = "chat needs a tokenizer, and this server runs without: send token ids to /v1/completions"
                raise ApiError(400, message)
            return [(yield from chat_ids(encoder, body, limits, images))]

        spec = common_spec(
            request,
            prompt_ids=prompt_ids,
            prompt_param="messages",
            num_prompts=1,
            needs_text=True,
            output_limit=request.output_limit,
            num_logprobs=_num_logprobs(request),
        )
        check_messages(request.messages)
        return replace(
            spec,
            parsing=_parsing(request),
            include_reasoning=request.include_reasoning is not False,
            priority=_priority(request),
            service_tier="default" if request.service_tier == "auto" else request.service_tier,
            prompt_texts=_continued(request),
            images=[image_sources(request.messages)],
        )

    def renderer(self, spec: GenerationSpec, request_id: str, model: str, decoder: Decoder | None) -> "ChatRenderer":
        """Returns the renderer of a chat's answer."""
        return ChatRenderer(spec, request_id, model, decoder)


def _priority(request: ChatRequest) -> int:
    """Returns the priority of a request; a number that the client sends wins over a service tier."""
    return SERVICE_TIER_PRIORITIES.get(request.service_tier or "", 0) if request.priority is None else request.priority


def _continued(request: ChatRequest) -> Sequence[str]:
    """Returns the text to echo: the last message's, if the answer goes on in its role."""
    last = request.messages[-1]
    if not request.echo or last.get("role") != "assistant" or not isinstance(last.get("content"), str):
        return ()
    return (last["content"],)


def _parsing(request: ChatRequest) -> OutputParsing:
    """Returns the parts to parse from the output."""
    parsing = tool_parsing(request.tools, request.tool_choice, request.parallel_tool_calls)
    budget, content = request.thinking_token_budget, request.messages[-1].get("content")
    if budget is not None and budget >= 0:
        parsing = msgspec.structs.replace(parsing, thinking_token_budget=budget)
    if request.continue_final_message and isinstance(content, str):
        parsing = msgspec.structs.replace(parsing, continued_text=content)
    return parsing


def _num_logprobs(request: ChatRequest) -> int | None:
    """Returns the number of most likely tokens to report at each position; None for no log probabilities."""
    if request.top_logprobs and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs = true", param="top_logprobs", code="invalid_value")
    return (request.top_logprobs or 0) if request.logprobs else None


class ChatRenderer(OpenAIRenderer):
    """Renders chat.completion and chat.completion.chunk."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def message(self, reply: OutputText) -> dict[str, Any]:
        """Returns the assistant's message."""
        message = chat_message(reply, include_reasoning=self._spec.include_reasoning)
        if self._spec.prompt_texts:
            message["content"] = f"{self._spec.prompt_texts[0]}{message['content'] or ''}"
        return {"message": message}

    def whole(self, replies: Sequence[OutputText]) -> bytes:
        """Renders the answer. As in vLLM, a prompt's log probabilities stand beside the choices, null if none are
        requested.
        """
        self.extra = {"prompt_logprobs": None, "prompt_token_ids": None}
        if self._spec.sampling.get("prompt_logprobs") is not None:
            self.extra["prompt_logprobs"] = prompt_logprobs(replies[0].prompt_logprobs, self._decoder)
        if self._spec.return_prompt_token_ids:
            self.extra["prompt_token_ids"] = replies[0].request.prompt_token_ids
        return super().whole(replies)

    def whole_logprobs(self, reply: OutputText) -> dict[str, Any]:
        """Returns the log probabilities of all tokens in a chat's shape."""
        return chat_logprobs(reply.logprobs, self._names)

    def delta_logprobs(self, delta: Delta) -> dict[str, Any]:
        """Returns the log probabilities of a delta's tokens in a chat's shape."""
        return chat_logprobs(delta.logprobs, self._names)

    def text_delta(self, text: str) -> bytes:
        """Returns a piece of the content."""
        return b'"delta":{"content":' + encode_json(text) + b"}"

    def end_reason(self, reason: EndReason | None) -> str | None:
        """Returns the finish reason. After a call that the request has forced it is "stop", as in OpenAI's and vLLM's
        answers.
        """
        parsing = self._spec.parsing
        is_forced = parsing is not None and parsing.tool_choice == "named"
        return "stop" if reason == "tool_calls" and is_forced else reason

    def begin(self, replies: Sequence[OutputText]) -> bytes:
        """Renders the first event of each choice, which has its role."""
        super().begin(replies)
        if self._spec.resume_token_ids:
            return b""
        role = b'"delta":{"role":"assistant","content":"","refusal":null}'
        if self._spec.return_prompt_token_ids:
            self.once = b',"prompt_token_ids":' + encode_json(replies[0].request.prompt_token_ids)
        roles = [self.chunk(Delta("", [], index), role) for index in range(len(replies))]
        echoes = [
            self.chunk(Delta("", [], index), self.text_delta(text or ""))
            for index in range(len(replies))
            for text in self._spec.prompt_texts
        ]
        return b"".join(roles + echoes)

    def event(self, delta: Delta) -> bytes:
        """Renders a delta; the end of a choice is apart from its text."""
        body = chat_delta(delta.parts, include_reasoning=self._spec.include_reasoning)
        if delta.finish_reason is None:
            if not body and not self._spec.streams_every_step:
                return b""
            return self.chunk(delta, body or self.text_delta(""))
        text, token_ids = b"", delta.token_ids
        if body or delta.logprobs:
            piece = Delta("", token_ids, delta.index, logprobs=delta.logprobs)
            text, token_ids = self.chunk(piece, body or self.text_delta("")), []
        last = Delta("", token_ids, delta.index, delta.finish_reason, delta.stop_reason)
        return text + self.chunk(last, b'"delta":{}')
