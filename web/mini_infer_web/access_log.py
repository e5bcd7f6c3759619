"""Logs one line a request, the same at gateway and engine: the request, its outcome and its duration."""

import logging
from collections.abc import Mapping
from typing import Any, Final

from mini_infer_contract import launch
from mini_infer_process.logs import with_fields

PROBES: Final = frozenset(
    (launch.HEALTH_PATH, launch.READY_PATH, launch.METRICS_PATH, "/health", "/ping", "/load", "/version")
)
"""Paths that are requested every few seconds: they are logged at debug as long as all is well, and without a warning
while a server has yet to start.
"""
CLIENT_LEFT: Final = 499
"""Status of a request whose client left before its answer began, as nginx logs it."""
LONGEST_ERROR: Final = 200
_IMPLIED_BY_STATUS = ("ok", "client_error", "server_error")
_ENDED_BADLY = ("broke", "in_band_error")


def log_request(
    logger: logging.Logger,
    method: str,
    path: str,
    status: int,
    duration_s: float,
    request_id: str,
    log_fields: Mapping[str, Any],
    error: str = "",
) -> None:
    """Logs one request. `log_fields` are known beside the head, such as model, tokens and times; their names are those
    of JSON lines.
    """
    ended_badly = bool(error) or log_fields.get("outcome") in _ENDED_BADLY  # in a stream that had begun
    level = _level(path, failed=status >= 400 or ended_badly)
    if not logger.isEnabledFor(level):
        return
    error = error if len(error) <= LONGEST_ERROR else f"{error[: LONGEST_ERROR - 3]}..."
    parts = [f"{method} {path} {status} in {duration_s:.3f} s"]
    if log_fields.get("model"):
        parts.append(f"model {log_fields['model']}")
    if "prompt_tokens" in log_fields:
        completion = f" + {log_fields['completion_tokens']}" if "completion_tokens" in log_fields else ""
        parts.append(f"{log_fields['prompt_tokens']}{completion} tokens")
    if "first_token_s" in log_fields:
        parts.append(f"first after {log_fields['first_token_s']:.3f} s")
    if "key" in log_fields:
        parts.append(f"key {log_fields['key']}")
    if "endpoint" in log_fields:
        parts.append(f"by {log_fields['endpoint']}")
    if log_fields.get("outcome", "ok") not in _IMPLIED_BY_STATUS:
        parts.append(log_fields["outcome"])
    parts.append(f"id {request_id}")
    if error:
        parts.append(error)
    fields = with_fields(
        method=method,
        path=path,
        status=status,
        duration_s=round(duration_s, 6),
        request_id=request_id,
        error=error or None,
        **log_fields,
    )
    logger.log(level, "%s", _one_line(", ".join(parts)), extra=fields)


def _one_line(text: str) -> str:
    """A client's line breaks and escape sequences as Python writes them: it must not write lines of its own."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def _level(path: str, *, failed: bool) -> int:
    if path in PROBES:
        return logging.INFO if failed else logging.DEBUG
    return logging.WARNING if failed else logging.INFO
