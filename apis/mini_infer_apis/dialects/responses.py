"""Converts a body of OpenAI's /v1/responses to the equivalent body of chat.completions.

Engine and gateway make the same chat of it, so both get the same token ids. A field that is no part of the conversation
and means the same in a chat is taken over as it is, for the chat's own checks. Knows no stored responses: `input` has
to be the whole conversation here.
"""

from typing import Any

from mini_infer_apis.dialects.response_items import chat_messages, is_to_be_continued
from mini_infer_apis.dialects.response_tools import chat_tool_choice, chat_tools
from mini_infer_apis.dialects.responses_request import (
    Format,
    JsonSchemaFormat,
    ResponsesConversation,
    TextOptions,
    parse_conversation,
)
from mini_infer_contract.launch import TARGET_HEADERS
from mini_infer_web.api_errors import refuse_field
from mini_infer_web.body_fields import UnknownFields

RESPONSES_PATH = "/v1/responses"
LOGPROBS = "message.output_text.logprobs"
"""Value of `include` that requests log probabilities of the text."""

SAME_IN_CHAT = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "top_logprobs",
    "metadata",
    "user",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "service_tier",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "cache_salt",
    "kv_hints",
    "priority",
    *TARGET_HEADERS,
)
"""Fields that mean the same in a chat."""


def chat_body(body: dict[str, Any], unknown: UnknownFields | None = None) -> dict[str, Any]:
    """Returns the body of /v1/chat/completions for the same conversation. Raises an ApiError 400 that names the fields
    of `body` at fault.

    `unknown` decides about fields that nobody knows in `reasoning` and `text`; if None, they are refused.
    """
    return chat_of(parse_conversation(body, unknown), body)


def chat_of(request: ResponsesConversation, body: dict[str, Any]) -> dict[str, Any]:
    """Returns the equivalent body of a chat for a `body` whose conversation is read already."""
    chat = {name: body[name] for name in SAME_IN_CHAT if body.get(name) is not None}
    chat["messages"] = chat_messages(request.input, request.instructions)
    if is_to_be_continued(request.input):
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    if request.reasoning is not None and request.reasoning.effort is not None:
        chat["reasoning_effort"] = request.reasoning.effort
    if request.text is not None:
        chat |= _text(request.text)
    if request.tools:
        chat["tools"] = chat_tools(request.tools)
    if request.tool_choice is not None:
        chat["tool_choice"] = chat_tool_choice(request.tool_choice)
    if request.max_output_tokens is not None:
        chat["max_completion_tokens"] = request.max_output_tokens
    return chat | _logprobs(request)


def _text(text: TextOptions) -> dict[str, Any]:
    chat: dict[str, Any] = {}
    if text.verbosity is not None:
        chat["verbosity"] = text.verbosity
    if text.format is not None:
        chat["response_format"] = _response_format(text.format)
    return chat


def _response_format(format_: Format) -> dict[str, Any]:
    fields = {name: value for name in format_.__struct_fields__ if (value := getattr(format_, name)) is not None}
    if isinstance(format_, JsonSchemaFormat):
        return {"type": "json_schema", "json_schema": fields}
    return {"type": format_.__struct_config__.tag, **fields}


def _logprobs(request: ResponsesConversation) -> dict[str, Any]:
    if LOGPROBS in (request.include or ()):
        return {"logprobs": True}
    if request.top_logprobs:
        refuse_field("top_logprobs", f'needs "{LOGPROBS}" in include', code="invalid_value")
    return {}
