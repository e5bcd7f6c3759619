"""One line a request: what was asked, how it was answered, how long it took. Knows no dialect.

Whoever answers puts what it knows of a request into `facts_of(scope)`.
"""

import json
import logging
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mini_infer_contract import launch
from mini_infer_contract.logs import with_fields

logger = logging.getLogger(__name__)

_PROBES = {launch.HEALTH_PATH, launch.READY_PATH, launch.METRICS_PATH, "/health", "/ping", "/load", "/version"}
"""Asked every few seconds: at level debug as long as all is well."""
_CLIENT_LEFT = 499
"""As nginx logs it: the client left before its answer began."""
_LONGEST_ERROR = 200
_KEY = "mini_infer_facts"


def facts_of(scope: Scope) -> dict[str, Any]:
    """What is known of a request beside its head, for its line."""
    facts: dict[str, Any] = scope.setdefault(_KEY, {})
    return facts


class AccessLog:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status, error = time.perf_counter(), _CLIENT_LEFT, ""

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
            _log(scope, status, error, time.perf_counter() - started)


def _log(scope: Scope, status: int, error: str, duration_s: float) -> None:
    method, path = scope["method"], scope["path"]
    facts = facts_of(scope)
    level = logging.WARNING if status >= 400 else logging.DEBUG if path in _PROBES else logging.INFO
    if not logger.isEnabledFor(level):
        return
    parts = [f"{method} {path} {status} in {duration_s:.3f} s"]
    if "model" in facts:
        parts.append(f"model {facts['model']}")
    if "prompt_tokens" in facts:
        parts.append(f"{facts['prompt_tokens']} + {facts.get('completion_tokens', 0)} tokens")
    if "first_token_s" in facts:
        parts.append(f"first after {facts['first_token_s']:.3f} s")
    parts.append(f"id {scope.get('request_id', '-')}")
    if error:
        parts.append(error)
    fields = with_fields(
        method=method,
        path=path,
        status=status,
        duration_s=round(duration_s, 6),
        request_id=scope.get("request_id"),
        error=error or None,
        **facts,
    )
    logger.log(level, "%s", ", ".join(parts), extra=fields)


def _error_in(body: bytes) -> str:
    """The message of an error in OpenAI's shape."""
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
    return message if len(message) <= _LONGEST_ERROR else f"{message[: _LONGEST_ERROR - 3]}..."
