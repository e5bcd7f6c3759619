"""Converts a body of OpenAI's /v1/responses to the equivalent body of chat.completions.

Engine and gateway make the same chat of it, so both get the same token ids. A field that is no part of the conversation
and means the same in a chat is taken over as it is, for the chat's own checks. Knows no stored responses: `input` has
to be the whole conversation here.
"""

from typing import Any, NoReturn

from mini_infer_apis.dialects.response_items import chat_messages, input_items, is_to_be_continued
from mini_infer_apis.dialects.response_tools import chat_tool_choice, chat_tools
from mini_infer_web.api_errors import ApiError, FieldPath, refuse_field
from mini_infer_web.body_fields import UnknownFields, unknown_field

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
    "priority",
)
"""Fields that mean the same in a chat."""
_METADATA_PAIRS, _METADATA_NAME, _METADATA_VALUE = 16, 64, 512
_SUMMARIES = ("auto", "detailed")
_CONTEXTS = ("auto", "all_turns")


def chat_body(body: dict[str, Any], unknown: UnknownFields | None = None) -> dict[str, Any]:
    """Returns the body of /v1/chat/completions for the same conversation. Raises an ApiError 400 that names the field
    of `body` at fault.

    `unknown` decides about fields that nobody knows in `reasoning` and `text`; if None, they are refused.
    """
    unknown = unknown or UnknownFields()
    chat = {name: body[name] for name in SAME_IN_CHAT if body.get(name) is not None}
    chat |= _conversation(body) | _reasoning(body.get("reasoning"), unknown) | _text(body.get("text"), unknown)
    if body.get("tools") not in (None, []):
        chat["tools"] = chat_tools(body["tools"])
    if body.get("tool_choice") is not None:
        chat["tool_choice"] = chat_tool_choice(body["tool_choice"])
    if body.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    _check_metadata(body.get("metadata"))
    return chat | _logprobs(body)


def _conversation(body: dict[str, Any]) -> dict[str, Any]:
    instructions = body.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        _refuse("instructions", "must be a string")
    if body.get("input") is None:
        _refuse("input", "is missing: send a string or a list of items", "missing_field")
    items = input_items(body["input"])
    chat: dict[str, Any] = {"messages": chat_messages(items, instructions)}
    if is_to_be_continued(items):
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    return chat


def _reasoning(reasoning: object, unknown: UnknownFields) -> dict[str, Any]:
    given = _object(reasoning, ("reasoning",), ("effort", "summary", "generate_summary", "context", "mode"), unknown)
    for name in ("summary", "generate_summary"):
        if given.get(name) not in (None, *_SUMMARIES):
            _refuse(
                ("reasoning", name),
                f"is {str(given[name])[:100]!r}: reasoning is told as it is, not shortened; send auto or detailed",
                "unsupported_value",
            )
    if given.get("context") not in (None, *_CONTEXTS):
        _refuse(
            ("reasoning", "context"), "is not supported: the chat template chooses what it shows", "unsupported_value"
        )
    if given.get("mode") not in (None, "standard"):
        _refuse(("reasoning", "mode"), "must be standard", "unsupported_value")
    return {} if given.get("effort") is None else {"reasoning_effort": given["effort"]}


def _text(text: object, unknown: UnknownFields) -> dict[str, Any]:
    given = _object(text, ("text",), ("format", "verbosity"), unknown)
    chat: dict[str, Any] = {}
    if given.get("verbosity") is not None:
        chat["verbosity"] = given["verbosity"]
    if given.get("format") is not None:
        chat["response_format"] = _format(given["format"], unknown)
    return chat


def _format(form: object, unknown: UnknownFields) -> dict[str, Any]:
    if not isinstance(form, dict):
        _refuse(("text", "format"), "must be an object with a type")
    if form.get("type") != "json_schema":
        return form
    given = _object(form, ("text", "format"), ("type", "name", "description", "schema", "strict"), unknown)
    if given.get("schema") is None:
        _refuse(("text", "format", "schema"), "is missing: send one, or type json_object", "missing_field")
    schema = {name: given[name] for name in ("name", "description", "schema", "strict") if given.get(name) is not None}
    return {"type": "json_schema", "json_schema": schema}


def _logprobs(body: dict[str, Any]) -> dict[str, Any]:
    include = body.get("include")
    if isinstance(include, list) and LOGPROBS in include:
        return {"logprobs": True}
    if body.get("top_logprobs"):
        _refuse("top_logprobs", f'needs "{LOGPROBS}" in include')
    return {}


def _check_metadata(metadata: object) -> None:
    """Raises ApiError if the metadata is above OpenAI's limits."""
    if not isinstance(metadata, dict):
        return  # Its type is checked as a chat's.
    if len(metadata) > _METADATA_PAIRS:
        _refuse("metadata", f"has {len(metadata)} pairs: send at most {_METADATA_PAIRS}")
    for name, value in metadata.items():
        if len(name) > _METADATA_NAME:
            _refuse("metadata", f"has a key of {len(name)} characters: send at most {_METADATA_NAME}")
        if isinstance(value, str) and len(value) > _METADATA_VALUE:
            _refuse(("metadata", name), f"has a value of {len(value)} characters: send at most {_METADATA_VALUE}")


def _object(value: object, where: FieldPath, known: tuple[str, ...], unknown: UnknownFields) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        _refuse(where, "must be an object")
    extra = [name for name in value if name not in known]
    if not extra:
        return value
    if not unknown.are_ignored:
        raise ApiError.of_faults([unknown_field((*where, name)) for name in extra])
    unknown.ignored += [(*where, name) for name in extra]
    return {name: value[name] for name in known if name in value}


def _refuse(where: str | FieldPath, message: str, code: str = "invalid_value") -> NoReturn:
    refuse_field(where, message, code=code)
