"""The response object of OpenAI's Responses API before there is output: the fields that follow from its request. Pure.

An engine fills it while it generates; a server that keeps responses answers with it before any engine has begun.
"""

from hashlib import sha256
from secrets import token_hex
from typing import Any

Response = dict[str, Any]

RESPONSE_PREFIX, MESSAGE_PREFIX, REASONING_PREFIX = "resp_", "msg_", "rs_"
CALL_PREFIX, CUSTOM_CALL_PREFIX = "fc_", "ctc_"
_ID_BYTES = 24
TAG_CHARACTERS = 8
"""Hexadecimal characters of an id that identify the server that keeps the named object."""


def new_id(prefix: str, tag: str = "") -> str:
    """Returns an id that nobody can guess; it begins with the tag of the server that keeps the named object."""
    return prefix + tag + token_hex(_ID_BYTES - len(tag) // 2)


def id_in(response_id: str, prefix: str, index: int, characters: int = 2 * _ID_BYTES) -> str:
    """Returns the id of a response's part; it follows from the response's, so that another engine that continues
    derives it too.

    It begins with the response's tag, so that it too identifies the server that keeps it.
    """
    tag = response_id.removeprefix(RESPONSE_PREFIX)[:TAG_CHARACTERS]
    return prefix + (tag + sha256(f"{response_id}/{prefix}{index}".encode()).hexdigest())[:characters]


def new_response(body: dict[str, Any], response_id: str, model: str, created_s: int, status: str) -> Response:
    """Returns the response object of a request that has been checked; `output` and `usage` are still to come."""
    reasoning, text = body.get("reasoning") or {}, body.get("text") or {}
    summary = reasoning.get("summary") or reasoning.get("generate_summary")
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_s,
        "status": status,
        "background": bool(body.get("background")),
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "max_tool_calls": body.get("max_tool_calls"),
        "model": model,
        "output": [],
        "frequency_penalty": _else(body.get("frequency_penalty"), 0.0),
        "presence_penalty": _else(body.get("presence_penalty"), 0.0),
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": body.get("previous_response_id"),
        "prompt_cache_key": body.get("prompt_cache_key"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": summary},
        "safety_identifier": body.get("safety_identifier"),
        "service_tier": "default",
        "store": body.get("store") is not False,
        "temperature": _else(body.get("temperature"), 1.0),
        "text": {"format": _format(text.get("format")), "verbosity": text.get("verbosity") or "medium"},
        "tool_choice": _else(body.get("tool_choice"), "auto"),
        "tools": [_tool(tool) for tool in body.get("tools") or ()],
        "top_logprobs": body.get("top_logprobs") or 0,
        "top_p": _else(body.get("top_p"), 1.0),
        "truncation": body.get("truncation") or "disabled",
        "usage": None,
        "user": body.get("user"),
        "metadata": body.get("metadata") or {},
    }


CONTEXT_CODE = "context_length_exceeded"


def with_error(response: Response, status: int, code: str | None, message: str) -> Response:
    """Returns the response as failed. `status` (HTTP's) and `code` (ours) are those of the error in an answer of its
    own.

    OpenAI's codes of failed responses are few, and others than its errors have. A context that is too short keeps its
    code, as at OpenAI, whose Codex looks for it.
    """
    if code != CONTEXT_CODE:
        code = {429: "rate_limit_exceeded", 408: "server_error"}.get(status)
        code = code or ("invalid_prompt" if 400 <= status < 500 else "server_error")
    return response | {"status": "failed", "error": {"code": code, "message": message}}


def _format(form: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the request's format with every field that OpenAI's schema of the answer requires."""
    if form is None:
        return {"type": "text"}
    return {"description": None, "strict": None} | form if form.get("type") == "json_schema" else form


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Returns the request's tool with every field that OpenAI's schema of the answer requires."""
    required = {"description": None, "parameters": None, "strict": None}
    return required | tool if tool.get("type") == "function" else tool


def _else(value: Any, default: Any) -> Any:
    return default if value is None else value
