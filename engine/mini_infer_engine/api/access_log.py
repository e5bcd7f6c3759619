"""Logs one line a request: the request, its outcome and its duration. Knows no dialect.

The code that answers puts its facts about a request into `access_log_fields(scope)`.
"""

import json
import logging
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mini_infer_web.access_log import CLIENT_LEFT, log_request

logger = logging.getLogger(__name__)

_KEY = "mini_infer_facts"


def access_log_fields(scope: Scope) -> dict[str, Any]:
    """Returns the facts about a request beside its head, for its line; callers add to them."""
    fields: dict[str, Any] = scope.setdefault(_KEY, {})
    return fields


class AccessLog:
    """ASGI middleware that logs a line for each request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers an ASGI request with the application, and logs it at its end."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status, error = time.perf_counter(), CLIENT_LEFT, ""

        async def send_and_note(message: Message) -> None:
            nonlocal status, error
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status >= 400 and not error:
                error = _error_in(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            took_s, request_id = time.perf_counter() - started, scope.get("request_id", "-")
            fields = access_log_fields(scope)
            error = fields.pop("error", "") or error
            log_request(logger, scope["method"], scope["path"], status, took_s, request_id, fields, error)


def _error_in(body: bytes) -> str:
    """Returns the message of an error in OpenAI's shape."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
