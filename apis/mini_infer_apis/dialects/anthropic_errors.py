"""Errors in Anthropic's shape, the same from an engine and from the gateway, and the paths that have them.

Errors have the names of the client's own fields already: see `anthropic.own_path`.
"""

from typing import Any

from mini_infer_apis.dialects.anthropic import MESSAGES_PATH
from mini_infer_apis.dialects.anthropic_request import THREAD_REFUSED
from mini_infer_web.api_errors import OPENAI_ERRORS, ApiError, ErrorShape

ID_HEADER = "request-id"
"""Anthropic's name of x-request-id."""


def error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """Returns the JSON body of an error."""
    kind = _ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    body: dict[str, Any] = {"type": kind, "message": error.message}
    if error.status >= 500 and error.code is not None:
        body["code"] = error.code  # A gateway reads from it whether another engine may go on.
    if error.code == THREAD_REFUSED:
        body["details"] = {"error_code": THREAD_REFUSED, "unsupported": []}
    return {"type": "error", "error": body, "request_id": request_id}


ANTHROPIC_ERRORS = ErrorShape(error_body, event_name="error", id_header=ID_HEADER)


def errors_of(path: str) -> ErrorShape:
    """Returns the shape of a path's errors: Anthropic's or OpenAI's."""
    is_anthropics = path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/")
    return ANTHROPIC_ERRORS if is_anthropics else OPENAI_ERRORS


_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Anthropic's error types by status, https://docs.anthropic.com/en/api/errors. 503 stays as it is, though Anthropic has
529: every proxy knows it.
"""
